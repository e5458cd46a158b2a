"""Steps that update at once, and how it is seen afterwards whether all went well.

To look at every gradient before the update is a pass over memory, and no weight can be written
before the last gradient is there. So the loss of each step is looked at, and every variable now and
then, and before anything is saved or shown: Keras's optimizers carry what is not finite from a
gradient into the weight or into a variable of their own, and from there nothing leads back. A run
that finds something goes back to its last checkpoint and looks first from then on: that names the
step.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.model.keras_model import extra_optimizers, has_builtin_optimizer, overrides
from stoker.train.optimizer.loss_scaling import scales_on_device

CHECK_EVERY_STEPS = 20
"""Steps after which the variables are looked at, at most, where calls are shorter."""


def may_defer_finite_check(
    model: keras.Model, config: TrainConfig, resolved: ResolvedTraining
) -> bool:
    """Whether steps update at once: it would be seen afterwards that a gradient was not finite.

    Args:
        model: Compiled and built, its optimizer prepared.
        config: Where a run must not differ by a bit, XLA may not compile now this step and now that
            one: it rounds otherwise.
        resolved: What its `auto`s became.
    """
    if "train_step" in overrides(model):
        return True  # The user's step has written before anybody could look.
    # Float16 overflows in the course of things; a clipped value or a constraint may be finite where
    # the gradient was not. A loss scale on the device checks each gradient before all that.
    hidden = not scales_on_device(model, replicas=resolved.replicas) and (
        isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
        or model.optimizer.clipvalue is not None
        or any(getattr(v, "constraint", None) is not None for v in model.trainable_variables)
    )
    same = not (config.deterministic and resolved.xla)
    return same and resolved.strategy != "tpu" and has_builtin_optimizer(model) and not hidden


def all_finite(model: keras.Model) -> tf.Tensor:
    """Whether all that gradients reach is finite: the weights, and what its optimizers keep.

    Args:
        model: Its optimizers are built.
    """
    optimizers = [model.optimizer, *extra_optimizers(model).values()]
    kept = [variable for optimizer in optimizers for variable in optimizer.variables]
    reached = [*model.trainable_variables, *kept]
    floats = [v.value for v in reached if tf.as_dtype(v.dtype).is_floating]
    return tf.math.is_finite(tf.add_n([tf.reduce_sum(tf.cast(v, tf.float32)) for v in floats]))
