"""Loss scaling without a round trip to the host, and checks for values that are not finite.

Gradients in float16 are scaled up so that small ones do not become zero, and a step whose gradients
overflow is skipped. Keras's `LossScaleOptimizer` skips it with a condition on a bool that the device
computes: the host waits for all gradients before it launches the update, and the device then waits
for the host. Here the test, the next scale and the conditional update are arithmetic on the device.

Checking every gradient before the update is a pass over memory, and no weight can be written before
the last gradient is available. So where `may_defer_finite_check` says so, only the loss of each step
is checked, and all variables now and then and before anything is saved or shown: Keras's optimizers
carry a value that is not finite from a gradient into the weight or a variable of their own, where it
stays. A run that finds one returns to its last checkpoint and from then on checks before each update,
which identifies the step.
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
    """The update of a `LossScaleOptimizer`, with its variables and rules, without its condition.

    Source: keras.optimizers.LossScaleOptimizer. There are two differences, both in cases where
    Keras ends in non-finite numbers: the scale does not grow to infinity, and no update is made
    with a scale that has fallen to zero.
    """

    def __init__(self, optimizer: keras.optimizers.LossScaleOptimizer) -> None:
        """Wrap an optimizer that is built when the first update is traced."""
        self._optimizer = optimizer

    def apply(
        self, gradients: Gradients, variables: Sequence[Any], average: WeightAverage | None = None
    ) -> None:
        """Update the variables if all gradients are finite, and the scale in any case.

        Args:
            gradients: Of the scaled loss, one per variable; summed over passes.
            variables: The trainable Keras variables.
            average: A moving average of the weights, which changes only with an update.
        """
        optimizer = self._optimizer
        inner = optimizer.inner_optimizer
        inverse = 1.0 / optimizer.dynamic_scale.value
        # The inverse of a zero scale is infinite, so no update is made with it.
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
        """Double the scale after this many good steps in a row; halve it after a bad one."""
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
    """Whether a variable's gradient is its new value (float8's scales); Keras never scales it."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _unscaled(gradient: Any, factor: tf.Tensor) -> Any:
    """The gradient times the factor; zeros if the factor is 0, whatever the gradient contains."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = _unscaled(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    factor = tf.cast(factor, gradient.dtype)
    if gradient.dtype == tf.bfloat16:
        # TensorFlow has no GPU kernel of the following operation for it.
        return tf.where(tf.equal(factor, 0.0), tf.zeros_like(gradient), gradient * factor)
    return tf.math.multiply_no_nan(gradient, factor)


def build_once(model: keras.Model) -> None:
    """Create the optimizer's variables if there are none; a step may be compiled several times.

    Keras 3.15's `LossScaleOptimizer` creates a second scale, at the initial value, when it is built
    again, while checkpoints still hold the first one.
    """
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def scales_on_device(model: keras.Model, *, replicas: int) -> bool:
    """Whether `DeviceLossScale` can replace the optimizer's own update.

    Several replicas exchange values inside the update, and a user-defined optimizer may write to
    unknown variables: in both cases Keras's condition stays.
    """
    is_builtin = type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    return is_builtin and replicas == 1 and has_builtin_optimizer(model)


def prepare_loss_scale(model: keras.Model, config: TrainConfig) -> None:
    """Give the compiled optimizer the loss scale of `train.loss_scale`; call it before it is built.

    `auto` keeps the result of `compile`: under mixed_float16 Keras wraps the optimizer in its
    `LossScaleOptimizer`, unless the user has set `auto_scale_loss=False`.

    Args:
        model: A compiled model.
        config: With a number, the scale is fixed and no update is skipped: `train.on_nan` handles a
            step that overflows, as in any other precision.
    """
    wanted, optimizer = config.loss_scale, model.optimizer
    is_dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if wanted == "dynamic" and not is_dynamic:
        model.optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    elif not isinstance(wanted, str):
        model.optimizer = optimizer.inner_optimizer if is_dynamic else optimizer
        _scale_by(model.optimizer, float(wanted))


def _scale_by(optimizer: Any, factor: float) -> None:
    """Like Keras's `loss_scale_factor`, which fails for an Embedding's gradient (Keras 3.15)."""
    optimizer.loss_scale_factor = None
    optimizer.scale_loss = partial(_times, factor)
    optimizer.apply = partial(_apply_unscaled, optimizer, factor)


def _times(factor: float, loss: Any) -> Any:
    return loss * tf.cast(factor, loss.dtype)


def _apply_unscaled(optimizer: Any, factor: float, grads: Any, variables: Any = None) -> None:
    unscaled = [scaled(gradient, tf.constant(1.0 / factor)) for gradient in grads]
    type(optimizer).apply(optimizer, unscaled, variables)


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
    replicas = max(resolved.replicas, resolved.virtual_workers)
    hidden = not scales_on_device(model, replicas=replicas) and (
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
