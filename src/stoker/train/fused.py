"""Keras's Adam as one kernel a weight, where it is not XLA that makes one of it.

Keras writes its update as a dozen operations, each a pass over memory: of a wide layer they take
more time than its matrix products. TensorFlow's own kernel for Adam computes the same formula in one.
It takes `1 - beta_2` in float32, Keras in float64: of 0.999 that is 5e-5 apart, of an update 2e-5.

On a CPU it parts its work among threads from some hundred numbers on, and waits for them: until an array
is so large that each operation's result has to be mapped anew, the dozen is quicker.
"""

from __future__ import annotations

import math
from types import MethodType
from typing import Any

import keras
import tensorflow as tf

QUICKER_APART = range(512, 40_000)
"""Numbers of a weight for which Keras's own operations take a CPU less time: the kernel takes up to 2.5 times
as long. Of fewer or more it takes 0.4 to 0.6 times as long (`benchmarks/train/adam.py`, 2 cores)."""


class _FusedAdam(keras.optimizers.Adam):  # type: ignore[misc]  # Keras has no types
    """Lends its update to an optimizer of Keras's own."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one weight, [shape] as its gradient.

        Source: keras.optimizers.Adam.update_step, tf.raw_ops.ResourceApplyAdam.
        """
        # Of an Embedding: the rows that were seen.
        sparse = isinstance(gradient, tf.IndexedSlices)
        if sparse or (_on_cpu() and math.prod(variable.shape) in QUICKER_APART):
            type(self).update_step(self, gradient, variable, learning_rate)
            return
        dtype = variable.dtype
        step = tf.cast(self.iterations.value + 1, dtype)
        beta_1, beta_2 = (tf.constant(beta, dtype) for beta in (self.beta_1, self.beta_2))
        index = self._get_variable_index(variable)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._momentums[index].value.handle,
            v=self._velocities[index].value.handle,
            beta1_power=beta_1**step,
            beta2_power=beta_2**step,
            lr=tf.cast(learning_rate, dtype),
            beta1=beta_1,
            beta2=beta_2,
            epsilon=tf.constant(self.epsilon, dtype),
            grad=tf.cast(gradient, dtype),
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
    vars(inner).pop("update_step", None)
    if wanted:
        inner.update_step = MethodType(_FusedAdam.update_step, inner)
