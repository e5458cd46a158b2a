"""Measures the current speed of the machine with work that does not depend on the training."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

CPU_SIZE = 48
"""Rows and columns of the matrices on a CPU: so few that NumPy uses one thread."""

GPU_SIZE = 2048
"""The same for a GPU: 17 GFLOP, some ms at most; three matrices take 50 MB."""

PRODUCTS_PER_CHECK = 50
"""Products between two readings of the clock."""


class MachineSpeed:
    """Multiplies the same matrices whenever it is called.

    On a CPU it uses one thread and its CPU time: other threads that take the cores do not change
    the result; another clock rate, or a neighbor on the same physical core, does. On a GPU it waits
    for the device.
    """

    def __init__(self) -> None:
        """Create the matrices."""
        self._has_gpu = bool(tf.config.list_logical_devices("GPU"))
        size = GPU_SIZE if self._has_gpu else CPU_SIZE
        # Scaled so that the numbers keep their size, however often they are multiplied.
        factor = np.random.default_rng(0).normal(scale=size**-0.5, size=(size, size))
        self._factor = factor.astype(np.float32)
        self._flops = PRODUCTS_PER_CHECK * 2.0 * size**3

    def measure(self, seconds: float) -> float | None:
        """Return floating-point operations per second; None if memory is insufficient."""
        if not self._has_gpu:
            return _rate(self._on_a_core, self._flops, time.thread_time, seconds)
        try:
            with tf.device("GPU:0"):
                factor = tf.constant(self._factor)
                return _rate(lambda: _on_a_gpu(factor), self._flops, time.monotonic, seconds)
        except tf.errors.ResourceExhaustedError:
            return None

    def _on_a_core(self) -> None:
        found = self._factor
        for _ in range(PRODUCTS_PER_CHECK):
            found = found @ self._factor


def _on_a_gpu(factor: tf.Tensor) -> None:
    found = factor
    for _ in range(PRODUCTS_PER_CHECK):
        found = tf.linalg.matmul(found, factor)
    found[0, 0].numpy()


def _rate(
    work: Callable[[], None], flops: float, clock: Callable[[], float], seconds: float
) -> float:
    work()  # finds the kernel, and wakes the device
    times, begun_s = 0, clock()
    while (took_s := clock() - begun_s) < seconds or not times:
        work()
        times += 1
    return times * flops / took_s
