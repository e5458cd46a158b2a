"""Keras's Adam as one kernel a weight, where it is not XLA that makes one of it.

Keras writes its update as a dozen operations, each a pass over memory: of a wide layer they take
more time than its matrix products. TensorFlow's own kernel for Adam computes the same formula in one.
It takes `1 - beta_2` in float32, Keras in float64: of 0.999 that is 5e-5 apart, of an update 2e-5.

On a CPU it parts its work among threads from some hundred numbers on, and waits for them: until an array
is so large that each operation's result has to be mapped anew, the dozen is quicker.

What all weights share, the powers of both betas above all, Keras computes for each of them: of a small
model that is a third of all operations of a step. Here it is computed once an update.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from stoker.train.optimizer.masked_assign import assign_condition

UNFUSED_SIZES = range(512, 40_000)
"""Numbers of a weight for which operations one by one take a CPU less time: the kernel takes up to 2.5 times
as long. Of fewer or more it takes 0.4 to 0.6 times as long (`benchmarks/train/adam.py`, 2 cores)."""


class _Scalars(NamedTuple):
    """What an update of every weight of a type on a device takes."""

    learning_rate: tf.Tensor
    """Learning rate; 0 if the update does not count."""

    beta_1: tf.Tensor
    beta_2: tf.Tensor
    """1 if the update does not count: momentum and velocity stay."""

    beta_1_power: tf.Tensor
    beta_2_power: tf.Tensor

    alpha: tf.Tensor
    """The rate with both biases corrected."""


class _FusedAdam:
    """The update of an optimizer of Keras's own, in fewer operations."""

    def __init__(self, optimizer: keras.optimizers.Adam) -> None:
        self._optimizer = optimizer
        # By device and type, while an update of all weights is made.
        self._scalars: dict[tuple[str, tf.DType], _Scalars] | None = None

    def update_all(self, gradients: Any, variables: Any, learning_rate: Any) -> None:
        """As `BaseOptimizer._backend_update_step`, which calls `update` for each weight."""
        optimizer = self._optimizer
        self._scalars = {}
        try:
            update_step = type(optimizer)._backend_update_step  # noqa: SLF001 - what it stands in for
            update_step(optimizer, gradients, variables, learning_rate)
        finally:
            self._scalars = None

    def update(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one weight, [shape] as its gradient.

        Source: keras.optimizers.Adam.update_step, tf.raw_ops.ResourceApplyAdam.
        """
        optimizer = self._optimizer
        # Of an Embedding: the rows that were seen.
        if isinstance(gradient, tf.IndexedSlices):
            type(optimizer).update_step(optimizer, gradient, variable, learning_rate)
            return
        # What Keras's own update takes: there is no public way to a weight's slots.
        index = optimizer._get_variable_index(variable)  # noqa: SLF001 - as above
        momentum = optimizer._momentums[index].value  # noqa: SLF001 - as above
        velocity = optimizer._velocities[index].value  # noqa: SLF001 - as above
        gradient = tf.cast(gradient, variable.dtype)
        scalars = self._shared(variable, learning_rate)
        if _on_cpu() and math.prod(variable.shape) in UNFUSED_SIZES:
            self._by_operations(variable, gradient, momentum, velocity, scalars.alpha)
        else:
            self._by_kernel(variable, gradient, momentum, velocity, scalars)

    def _shared(self, variable: tf.Variable, learning_rate: Any) -> _Scalars:
        kept = {} if self._scalars is None else self._scalars
        key = variable.device, variable.dtype
        if key not in kept:
            kept[key] = _scalars_of(self._optimizer, learning_rate, variable.dtype)
        return kept[key]

    def _by_operations(
        self,
        variable: tf.Variable,
        gradient: tf.Tensor,
        momentum: tf.Variable,
        velocity: tf.Variable,
        alpha: tf.Tensor,
    ) -> None:
        """By operations that round as Keras's do."""
        optimizer = self._optimizer
        before = momentum.read_value(), velocity.read_value()
        first = before[0] + (gradient - before[0]) * (1 - optimizer.beta_1)
        second = before[1] + (tf.square(gradient) - before[1]) * (1 - optimizer.beta_2)
        momentum.assign(first)
        velocity.assign(second)
        variable.assign_sub(first * alpha / (tf.sqrt(second) + optimizer.epsilon))

    def _by_kernel(
        self,
        variable: tf.Variable,
        gradient: tf.Tensor,
        momentum: tf.Variable,
        velocity: tf.Variable,
        scalars: _Scalars,
    ) -> None:
        optimizer, dtype = self._optimizer, variable.dtype
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=momentum.handle,
            v=velocity.handle,
            beta1_power=scalars.beta_1_power,
            beta2_power=scalars.beta_2_power,
            lr=scalars.learning_rate,
            beta1=scalars.beta_1,
            beta2=scalars.beta_2,
            epsilon=tf.constant(optimizer.epsilon, dtype),
            grad=gradient,
        )


def _scalars_of(optimizer: keras.optimizers.Adam, learning_rate: Any, dtype: tf.DType) -> _Scalars:
    step = tf.cast(optimizer.iterations.value + 1, dtype)
    rate = tf.cast(learning_rate, dtype)
    betas = [tf.constant(beta, dtype) for beta in (optimizer.beta_1, optimizer.beta_2)]
    power_1, power_2 = (beta**step for beta in betas)
    alpha = rate * tf.sqrt(1 - power_2) / (1 - power_1)
    counts = assign_condition()
    if counts is not None:
        # The kernel writes by handles, which cannot be held back: then its gradients are zero.
        rate = tf.where(counts, rate, 0.0)
        betas = [tf.where(counts, beta, 1.0) for beta in betas]
    return _Scalars(
        learning_rate=rate,
        beta_1=betas[0],
        beta_2=betas[1],
        beta_1_power=power_1,
        beta_2_power=power_2,
        alpha=alpha,
    )


def _on_cpu() -> bool:
    return not tf.config.list_logical_devices("GPU")


def fuse(optimizer: keras.optimizers.Optimizer, *, wanted: bool) -> None:
    """Let Keras's own Adam and AdamW update by one kernel a weight, or by their own operations again.

    Args:
        optimizer: Any; others, and `amsgrad`, stay as they are.
        wanted: Outside of XLA, which fuses Keras's operations by itself.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if type(inner) not in (keras.optimizers.Adam, keras.optimizers.AdamW) or inner.amsgrad:
        return
    for lent in ("update_step", "_backend_update_step"):
        vars(inner).pop(lent, None)
    if wanted:
        fused = _FusedAdam(inner)
        inner.update_step = fused.update
        inner._backend_update_step = fused.update_all  # noqa: SLF001 - Keras's hook around all weights
