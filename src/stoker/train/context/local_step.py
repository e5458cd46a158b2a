"""Measures how long a worker takes from the end of one all-reduce to the start of the next one.

A whole step takes equally long on all workers, because each waits for the others in the all-reduce. Only the
time between two all-reduces shows which worker is slow: Python, input, forward and backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

WINDOW = 100
"""Number of newest steps that the median covers."""

MIN_STEPS = 20
"""Minimum number of steps for a median."""


class LocalStepTime:
    """Stores the local times of this worker's newest steps, on its CPU."""

    def __init__(self, clock: Callable[[], tf.Tensor] = tf.timestamp) -> None:
        """Start without steps.

        Args:
            clock: Adds an operation to the graph; the operation reads a clock, seconds.
        """
        self._clock = clock
        with tf.device("CPU:0"):
            self._ended_s = tf.Variable(tf.constant(0.0, tf.float64), trainable=False, name="ended")
            self._count = tf.Variable(tf.constant(0, tf.int64), trainable=False, name="count")
            self._seconds = tf.Variable(
                tf.zeros([WINDOW], tf.float64), trainable=False, name="local_step"
            )

    def before_reduction(self, gradients: Any) -> tf.Operation:
        """Add operations to the graph of a step that record when the gradients are ready to be reduced.

        Args:
            gradients: Nested gradients of this replica.
        """
        tensors = tf.nest.flatten(gradients, expand_composites=True)
        ready = [tensor for tensor in tensors if tensor is not None]
        with tf.control_dependencies(ready), tf.device("CPU:0"):
            now_s = self._clock()
            passed_s = now_s - self._ended_s.read_value()
            # The first step has no all-reduce before it, so the next step overwrites its entry.
            is_first = tf.equal(self._ended_s.read_value(), 0.0)
            place = self._count.read_value() % WINDOW
            written = self._seconds.scatter_nd_update([[place]], [passed_s])
            with tf.control_dependencies([written]):
                counted = self._count.assign_add(tf.cast(tf.logical_not(is_first), tf.int64))
        return counted

    def after_reduction(self, reduced: Any) -> None:
        """Add operations to the graph of a step that record when the sums over all workers have arrived."""
        with tf.control_dependencies(tf.nest.flatten(reduced)), tf.device("CPU:0"):
            self._ended_s.assign(self._clock())

    def median_s(self) -> float | None:
        """Return the median of the newest steps, seconds; None before `MIN_STEPS` steps. Thread-safe."""
        count = min(int(self._count.numpy()), WINDOW)
        if count < MIN_STEPS:
            return None
        return float(np.median(self._seconds.numpy()[:count]))
