"""Loss scaling without a round trip to the host, and checks for values that are not finite.

Gradients in float16 are scaled up so that small ones do not become zero, and a step whose gradients
overflow is skipped. Keras's `LossScaleOptimizer` skips it with a condition on a value that the device
computes: the host waits for all gradients before it launches the update, and the device then waits
for the host. Here the test, the next scale and the conditional update are arithmetic on the device.

A check of all gradients before the update takes a pass over memory, and no weight can be written before
the last gradient is available. So if `may_defer_finite_check` allows it, only the loss is checked in each
step. All variables are checked every `CHECK_EVERY_STEPS` steps, and before anything is saved or shown. This
is enough, because Keras's optimizers carry a value that is not finite from a gradient into a weight or a
variable of their own, where it stays. A run that finds such a value returns to its last checkpoint, and from
then on checks before each update, to find the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.model.keras_model import extra_optimizers, has_builtin_optimizer, overrides
from stoker.train.optimizer.ema import WeightAverage
from stoker.train.optimizer.gradients import Gradients, scaled, total
from stoker.train.optimizer.masked_assign import masked_assign


class DeviceLossScale:
    """The update of a `LossScaleOptimizer`, with the same variables and rules, but without a condition.

    Source: keras.optimizers.LossScaleOptimizer. There are two differences, in cases where Keras's numbers
    become infinite or NaN: the scale does not grow to infinity, and no update is made with a scale that has
    fallen to zero.
    """

    def __init__(self, optimizer: keras.optimizers.LossScaleOptimizer) -> None:
        """Wrap an optimizer, which is built when the first update is traced."""
        self._optimizer = optimizer

    def apply(
        self, gradients: Gradients, variables: Sequence[Any], average: WeightAverage | None = None
    ) -> None:
        """Update the variables if all gradients are finite, and the scale in any case.

        Args:
            gradients: Gradients of the scaled loss, one per variable; summed over passes.
            variables: The trainable Keras variables.
            average: A moving average of the weights; it changes only if the variables are updated.
        """
        optimizer = self._optimizer
        inner = optimizer.inner_optimizer
        inverse = 1.0 / optimizer.dynamic_scale.value
        # The inverse of a zero scale is infinite, so with a zero scale no update is made.
        finite = tf.math.is_finite(total(gradients) * inverse)
        written = [each.value for each in (*variables, *inner.variables)]
        written += [] if average is None else average.variables
        with masked_assign(finite, written):
            factor = tf.where(finite, inverse, 0.0)
            inner.apply(
                [
                    gradient if _is_the_new_value(variable) else _unscaled(gradient, factor)
                    for gradient, variable in zip(gradients, variables, strict=True)
                ],
                variables,
            )
            if average is not None:
                average.update()
        self._move(finite)

    def _move(self, finite: tf.Tensor) -> None:
        """Halve the scale after a step that is not finite; double it after enough finite steps in a row."""
        optimizer = self._optimizer
        count, scale = optimizer.step_counter.value, optimizer.dynamic_scale.value
        is_due = tf.equal(count, optimizer.dynamic_growth_steps - 1)
        doubled = scale * 2.0
        grown = tf.where(tf.logical_and(is_due, tf.math.is_finite(doubled)), doubled, scale)
        counts = tf.logical_and(finite, tf.logical_not(is_due))
        next_count = tf.where(counts, count + 1, tf.zeros_like(count))
        next_scale = tf.where(finite, grown, scale * 0.5)
        optimizer.step_counter.assign(next_count)
        optimizer.dynamic_scale.assign(next_scale)


def _is_the_new_value(variable: Any) -> bool:
    """Whether the gradient of a variable is its new value, as for scales of float8; Keras does not scale it."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _unscaled(gradient: Any, factor: tf.Tensor) -> Any:
    """Return the gradient times the factor; zeros if the factor is 0, even if the gradient is not finite."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = _unscaled(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    factor = tf.cast(factor, gradient.dtype)
    if gradient.dtype == tf.bfloat16:
        # TensorFlow has no GPU kernel of the following operation for this dtype.
        return tf.where(tf.equal(factor, 0.0), tf.zeros_like(gradient), gradient * factor)
    return tf.math.multiply_no_nan(gradient, factor)


def build_once(model: keras.Model) -> None:
    """Create the optimizer's variables, unless they exist because the step was compiled before.

    If Keras 3.15's `LossScaleOptimizer` is built again, it creates a second scale with the initial value,
    while checkpoints still contain the first one.
    """
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def scales_on_device(model: keras.Model, *, replicas: int) -> bool:
    """Whether `DeviceLossScale` can replace the optimizer's own update.

    It cannot if several replicas exchange values inside the update, or if a user-defined optimizer may write
    to unknown variables. Keras's own condition is used then.
    """
    is_builtin = type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    return is_builtin and replicas == 1 and has_builtin_optimizer(model)


def prepare_loss_scale(model: keras.Model, config: TrainConfig) -> None:
    """Give the compiled optimizer the loss scale of `train.loss_scale`; call this before it is built.

    `auto` keeps the result of `compile`: under mixed_float16 Keras wraps the optimizer in its
    `LossScaleOptimizer`, unless the user has set `auto_scale_loss=False`.

    Args:
        model: A compiled model.
        config: The `train` section. If `loss_scale` is a number, the scale is fixed and no update is
            skipped; `train.on_nan` handles a step that overflows, as in any other precision.
    """
    wanted, optimizer = config.loss_scale, model.optimizer
    is_dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if wanted == "dynamic" and not is_dynamic:
        model.optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    elif not isinstance(wanted, str):
        model.optimizer = optimizer.inner_optimizer if is_dynamic else optimizer
        _scale_by(model.optimizer, float(wanted))


def _scale_by(optimizer: Any, factor: float) -> None:
    """Set a fixed scale, as Keras's `loss_scale_factor` does, which fails for an Embedding (Keras 3.15)."""
    optimizer.loss_scale_factor = None
    optimizer.scale_loss = partial(_times, factor)
    optimizer.apply = partial(_apply_unscaled, optimizer, factor)


def _times(factor: float, loss: Any) -> Any:
    return loss * tf.cast(factor, loss.dtype)


def _apply_unscaled(optimizer: Any, factor: float, grads: Any, variables: Any = None) -> None:
    unscaled = [scaled(gradient, tf.constant(1.0 / factor)) for gradient in grads]
    type(optimizer).apply(optimizer, unscaled, variables)


CHECK_EVERY_STEPS = 20
"""Maximum number of steps between two checks of the variables; they are checked after a call, so a longer
call exceeds this."""


def may_defer_finite_check(
    model: keras.Model, config: TrainConfig, resolved: ResolvedTraining
) -> bool:
    """Return whether a later check of the variables would find every gradient that is not finite.

    Args:
        model: The compiled and built model with its prepared optimizer.
        config: The `train` section. With `deterministic`, XLA must not compile another form of the step
            later, because the two forms round differently.
        resolved: The values that replaced each `auto`.
    """
    if "train_step" in overrides(model):
        return True  # A user-defined step updates the weights before Stoker can check anything.
    # Not in float16, which regularly overflows. Not with clipping or constraints, whose results may be
    # finite although the gradient is not; but a loss scale on the device checks each gradient before.
    replicas = max(resolved.replicas, resolved.virtual_workers)
    hidden = not scales_on_device(model, replicas=replicas) and (
        isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
        or model.optimizer.clipvalue is not None
        or any(getattr(v, "constraint", None) is not None for v in model.trainable_variables)
    )
    same = not (config.deterministic and resolved.xla)
    return same and resolved.strategy != "tpu" and has_builtin_optimizer(model) and not hidden


def all_finite(model: keras.Model) -> tf.Tensor:
    """Return whether all weights and all variables of the optimizers are finite.

    Args:
        model: The model; its optimizers are built.
    """
    optimizers = [model.optimizer, *extra_optimizers(model).values()]
    kept = [variable for optimizer in optimizers for variable in optimizer.variables]
    reached = [*model.trainable_variables, *kept]
    floats = [v.value for v in reached if tf.as_dtype(v.dtype).is_floating]
    return tf.math.is_finite(tf.add_n([tf.reduce_sum(tf.cast(v, tf.float32)) for v in floats]))
