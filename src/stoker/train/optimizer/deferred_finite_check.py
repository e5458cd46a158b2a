"""Steps that update without checking every gradient, and the check that follows later.

Checking every gradient before the update is a pass over memory, and no weight can be written before
the last gradient is available. So only the loss of each step is checked, and all variables now and
then and before anything is saved or shown: Keras's optimizers carry a value that is not finite from
a gradient into the weight or a variable of their own, where it stays. A run that finds one returns
to its last checkpoint and from then on checks before each update, which identifies the step.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.model.keras_model import extra_optimizers, has_builtin_optimizer, overrides
from stoker.train.optimizer.loss_scaling import scales_on_device

CHECK_EVERY_STEPS = 20
"""Most steps between two checks of the variables, if calls are shorter."""


def may_defer_finite_check(
    model: keras.Model, config: TrainConfig, resolved: ResolvedTraining
) -> bool:
    """Return whether a later check would find every gradient that is not finite.

    Args:
        model: The compiled and built model with its prepared optimizer.
        config: If a run must be reproducible to the bit, XLA must not compile one step now and
            another one later: they round differently.
        resolved: The values that replaced each `auto`.
    """
    if "train_step" in overrides(model):
        return True  # The user's step has written before anybody could look.
    # Float16 overflows regularly; a clipped value or a constraint may be finite although the
    # gradient was not. A loss scale on the device checks each gradient before that.
    hidden = not scales_on_device(model, replicas=resolved.replicas) and (
        isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
        or model.optimizer.clipvalue is not None
        or any(getattr(v, "constraint", None) is not None for v in model.trainable_variables)
    )
    same = not (config.deterministic and resolved.xla)
    return same and resolved.strategy != "tpu" and has_builtin_optimizer(model) and not hidden


def all_finite(model: keras.Model) -> tf.Tensor:
    """Return whether everything that gradients reach is finite: weights and optimizer variables.

    Args:
        model: The model; its optimizers are built.
    """
    optimizers = [model.optimizer, *extra_optimizers(model).values()]
    kept = [variable for optimizer in optimizers for variable in optimizer.variables]
    reached = [*model.trainable_variables, *kept]
    floats = [v.value for v in reached if tf.as_dtype(v.dtype).is_floating]
    return tf.math.is_finite(tf.add_n([tf.reduce_sum(tf.cast(v, tf.float32)) for v in floats]))
