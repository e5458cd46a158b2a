"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf


class WeightAverage:
    """The moving average of the weights: momentum x average + (1 - momentum) x weight, after every step.

    Keras's own, `use_ema` of optimizers, has the same formula, but fails under MirroredStrategy.
    """

    def __init__(self, weights: Sequence[Any], *, momentum: float) -> None:
        """Start with the current weights; call this inside the strategy's scope.

        Args:
            weights: Keras variables.
            momentum: Between 0 and 1.
        """
        self._weights = list(weights)
        self._momentum = momentum
        self.variables = [
            tf.Variable(weight.value, trainable=False, name=f"ema_{index}")
            for index, weight in enumerate(weights)
        ]

    def update(self) -> None:
        """Update the average; call this on a replica after its weights have been updated."""
        for weight, average in zip(self._weights, self.variables, strict=True):
            value = tf.cast(weight.value, average.dtype)
            average.assign_sub((1 - self._momentum) * (average - value))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the average as the model's weights in a `with` block, and restore the weights at its end."""
        kept = [tf.identity(weight.value) for weight in self._weights]
        for weight, average in zip(self._weights, self.variables, strict=True):
            weight.value.assign(tf.cast(average, weight.value.dtype))
        try:
            yield
        finally:
            for weight, value in zip(self._weights, kept, strict=True):
                weight.value.assign(value)
