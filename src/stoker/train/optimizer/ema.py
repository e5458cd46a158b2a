"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf


class WeightAverage:
    """average <- momentum x average + (1 - momentum) x weight, after every step.

    Source: `use_ema` of Keras's optimizers, which fails under MirroredStrategy.
    """

    def __init__(self, weights: Sequence[Any], *, momentum: float) -> None:
        """Start with the current weights; call it inside the strategy's scope.

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
        """Update the average; call it where a replica's weights have been updated."""
        for weight, average in zip(self._weights, self.variables, strict=True):
            value = tf.cast(weight.value, average.dtype)
            average.assign_sub((1 - self._momentum) * (average - value))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the average as the model's weights, and restore the weights at the end."""
        kept = [tf.identity(weight.value) for weight in self._weights]
        for weight, average in zip(self._weights, self.variables, strict=True):
            weight.value.assign(tf.cast(average, weight.value.dtype))
        try:
            yield
        finally:
            for weight, value in zip(self._weights, kept, strict=True):
                weight.value.assign(value)
