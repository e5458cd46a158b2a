"""Measures what a step's time does not show: checkpoints, exchange, copies, prefetch, machine speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from stoker.train.checkpoints.cadence import MAX_EVERY_S, MIN_EVERY_S
from stoker.train.checkpoints.state import TrainingState
from stoker.train.loop.run import Run
from stoker.train.setup.strategy import in_packs

CPU_SIZE = 48
"""Number of rows and columns of the matrices on a CPU: so few that NumPy uses a single thread."""

GPU_SIZE = 2048
"""The same on a GPU: a product has 17 GFLOP and takes some ms at most; three matrices take 50 MB."""

PRODUCTS_PER_CHECK = 50
"""Number of matrix products between two readings of the clock."""


class MachineSpeed:
    """Measures the machine's own speed: how fast it multiplies the same matrices each time.

    On a CPU, it uses one thread and measures its CPU time. So threads that use other cores do not change the
    result, but another clock rate, or another program on the same physical core, does. On a GPU, it
    measures wall time until the device has finished.
    """

    def __init__(self) -> None:
        """Create the matrices."""
        self._has_gpu = bool(tf.config.list_logical_devices("GPU"))
        size = GPU_SIZE if self._has_gpu else CPU_SIZE
        # This scale keeps the numbers in range, however often they are multiplied.
        factor = np.random.default_rng(0).normal(scale=size**-0.5, size=(size, size))
        self._factor = factor.astype(np.float32)
        self._flops = PRODUCTS_PER_CHECK * 2.0 * size**3

    def measure(self, seconds: float) -> float | None:
        """Return the speed, floating-point operations per second; None if memory is insufficient."""
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
    work()  # the first call selects the kernel, and wakes the device
    times, begun_s = 0, clock()
    while (took_s := clock() - begun_s) < seconds or not times:
        work()
        times += 1
    return times * flops / took_s


def prefetched_elements(iterator: Any) -> float | None:
    """Return how many elements are in the buffers of a pipeline, converted to elements of its output.

    Args:
        iterator: Iterator of a dataset. The result is None if TensorFlow keeps no model of the pipeline:
            if the autotuner is off, or if several replicas share the iterator.

    Source: tf.data.experimental.get_model_proto; tensorflow/core/framework/model.proto.
    """
    if not isinstance(iterator, tf.data.Iterator):
        return None
    try:
        model = tf.data.experimental.get_model_proto(iterator)
    except tf.errors.NotFoundError:
        return None
    ready, per_element, number = 0.0, 1.0, model.output
    while number in model.nodes:
        node = model.nodes[number]
        ready += node.buffered_elements / per_element
        # If a stage drops or adds elements, e.g. a filter, its ratio is unknown: stop before it.
        known = node.ratio > 0
        if not known or not node.inputs or node.name.startswith("Shuffle"):
            break
        per_element, number = per_element * node.ratio, node.inputs[0]
    return ready


EXCHANGES = 10
"""Number of timed exchanges or copies."""


def checkpoint_s(run: Run, state: TrainingState) -> float:
    """Return the time by which checkpoints delay a step on average, seconds.

    Writing is not included, because it continues during the following steps.
    """
    config = run.config.checkpoint
    state.capture()
    begun_s = time.monotonic()
    state.capture()
    copy_s, step_s = time.monotonic() - begun_s, run.last_ceiling_s
    if config.every_steps is not None:
        return copy_s / config.every_steps
    by_cost_s = min(MAX_EVERY_S, max(MIN_EVERY_S, copy_s / config.max_overhead))
    every_s = by_cost_s if config.every_s == "auto" else config.every_s
    return copy_s * step_s / every_s


def communication_s(run: Run) -> float:
    """Measure separately how long a step needs to sum gradients over the replicas, seconds."""
    strategy, model = run.distribution.strategy, run.built.model
    if run.distribution.replicas == 1:
        return 0.0
    dtype = run.config.reduction_dtype
    packs = in_packs(run.config.reduction_bytes_per_pack)

    def exchanged() -> Any:
        context = tf.distribute.get_replica_context()
        gradients = [tf.zeros(v.shape, dtype) for v in model.trainable_variables]
        return tf.add_n(
            [
                tf.cast(tf.reduce_max(summed), tf.float32)
                for summed in context.all_reduce(
                    tf.distribute.ReduceOp.SUM, gradients, options=packs
                )
            ]
        )

    exchange = tf.function(lambda: strategy.run(exchanged))
    exchange()
    begun_s = time.monotonic()
    for _ in range(EXCHANGES):
        tf.nest.map_structure(
            lambda one: one.numpy(), strategy.experimental_local_results(exchange())
        )
    return (time.monotonic() - begun_s) / EXCHANGES


def transfer_s(run: Run) -> float:
    """Return the time to copy a batch to the first GPU, seconds; 0 without a GPU."""
    if not tf.config.list_logical_devices("GPU"):
        return 0.0
    with tf.device("CPU:0"):
        batch = tf.nest.map_structure(tf.identity, run.compiled.source.sample)
    copies = []
    begun_s = time.monotonic()
    for _ in range(EXCHANGES):
        with tf.device("GPU:0"):
            copies = [tf.identity(part) for part in tf.nest.flatten(batch)]
    # Copies to the same device end in order, so wait only for the last one.
    for copy in copies:
        copy.numpy()
    return (time.monotonic() - begun_s) / EXCHANGES
