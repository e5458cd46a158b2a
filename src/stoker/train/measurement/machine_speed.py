"""How quick the machine itself is just now, at what does not depend on the training."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

CPU_SIZE = 48
"""Rows and columns of what a core multiplies: so few that NumPy leaves them to one thread."""

GPU_SIZE = 2048
"""The same of a GPU: 17 GFLOP, some ms at most; three of them are 50 MB."""

PRODUCTS_PER_CHECK = 50
"""Products between two looks at the clock."""


class MachineSpeed:
    """The same products of matrices, whenever it is asked.

    On a CPU by one thread and by its CPU time: the training's own threads, and others that take the
    cores, leave it as it is; another clock, or a neighbour on the same physical core, does not. On a
    GPU by the device, waited for.
    """

    def __init__(self) -> None:
        """Make the matrices."""
        self._has_gpu = bool(tf.config.list_logical_devices("GPU"))
        size = GPU_SIZE if self._has_gpu else CPU_SIZE
        # So that the numbers keep their size, however often they are multiplied.
        factor = np.random.default_rng(0).normal(scale=size**-0.5, size=(size, size))
        self._factor = factor.astype(np.float32)
        self._flops = PRODUCTS_PER_CHECK * 2.0 * size**3

    def measure(self, seconds: float) -> float | None:
        """Floating-point operations a second, over about so many; None where there is no memory for it."""
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
