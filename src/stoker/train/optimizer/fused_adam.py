"""Keras's Adam as one kernel per weight, where XLA does not fuse it.

Keras writes its update as a dozen operations, each a pass over memory: for a wide layer they take
more time than its matrix products. TensorFlow's own kernel computes the same formula in one pass.
It takes `1 - beta_2` in float32, Keras in float64: for 0.999 they differ by 5e-5, the updates by
2e-5.

On a CPU the kernel divides its work among threads from some hundred numbers on, and waits for them:
the dozen operations are faster, until an array is so large that each result needs newly mapped
memory.

Keras computes the values that all weights share, mainly the powers of both betas, for each weight:
in a small model that is a third of all operations of a step. Here they are computed once per
update.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from stoker.train.optimizer.masked_assign import assign_condition

UNFUSED_SIZES = range(512, 40_000)
"""Sizes of a weight for which separate operations are faster on a CPU: the kernel takes up to 2.5
times as long. For other sizes it takes 0.4 to 0.6 times as long (`benchmarks/train/adam.py`, 2
cores)."""


class _Scalars(NamedTuple):
    """The scalars that the update of every weight of one dtype on one device uses."""

    learning_rate: tf.Tensor
    """Learning rate; 0 if the update does not count."""

    beta_1: tf.Tensor
    beta_2: tf.Tensor
    """1 if the update does not count: momentum and velocity stay."""

    beta_1_power: tf.Tensor
    beta_2_power: tf.Tensor

    alpha: tf.Tensor
    """The learning rate with both bias corrections."""


class _FusedAdam:
    """The update of one of Keras's own optimizers, in fewer operations."""

    def __init__(self, optimizer: keras.optimizers.Adam) -> None:
        self._optimizer = optimizer
        # By device and dtype, while all weights are updated.
        self._scalars: dict[tuple[str, tf.DType], _Scalars] | None = None

    def update_all(self, gradients: Any, variables: Any, learning_rate: Any) -> None:
        """Replace `BaseOptimizer._backend_update_step`, which calls `update` for each weight."""
        optimizer = self._optimizer
        self._scalars = {}
        try:
            update_step = type(optimizer)._backend_update_step  # noqa: SLF001 - what it stands in for
            update_step(optimizer, gradients, variables, learning_rate)
        finally:
            self._scalars = None

    def update(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one weight; the gradient has its shape.

        Source: keras.optimizers.Adam.update_step, tf.raw_ops.ResourceApplyAdam.
        """
        optimizer = self._optimizer
        # Gradients of an Embedding: only the used rows.
        if isinstance(gradient, tf.IndexedSlices):
            type(optimizer).update_step(optimizer, gradient, variable, learning_rate)
            return
        # As Keras's own update does: there is no public way to the slots of a weight.
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
        """Update with operations that round like Keras's."""
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
        # The kernel writes through handles, which cannot be masked: its gradients are then zero.
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
    """Let Keras's Adam and AdamW use one kernel per weight, or their own operations again.

    Args:
        optimizer: Any optimizer; other types, and `amsgrad`, are not changed.
        wanted: True unless XLA compiles the step; XLA fuses Keras's operations itself.
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
