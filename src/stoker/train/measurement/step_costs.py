"""Costs of a step that cannot be seen inside it and are measured separately."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from stoker.train.checkpoints.cadence import LEAST_EVERY_S, MOST_EVERY_S
from stoker.train.checkpoints.state import TrainingState
from stoker.train.loop.run import Run
from stoker.train.setup.strategy import in_packs

EXCHANGES = 10
"""Number of timed exchanges or copies."""


def checkpoint_s(run: Run, state: TrainingState) -> float:
    """Return the time that checkpoints delay the step, seconds per step.

    Writing continues beside the step and is not included.
    """
    config = run.config.checkpoint
    state.capture()
    begun_s = time.monotonic()
    state.capture()
    copy_s, step_s = time.monotonic() - begun_s, run.last_ceiling_s
    if config.every_steps is not None:
        return copy_s / config.every_steps
    by_cost_s = min(MOST_EVERY_S, max(LEAST_EVERY_S, copy_s / config.max_overhead))
    every_s = by_cost_s if config.every_s == "auto" else config.every_s
    return copy_s * step_s / every_s


def communication_s(run: Run) -> float:
    """Return the time per step of summing gradients over the replicas, measured separately."""
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
    """Return the time of copying a batch to the first GPU, seconds; 0 without a GPU."""
    if not tf.config.list_logical_devices("GPU"):
        return 0.0
    with tf.device("CPU:0"):
        batch = tf.nest.map_structure(tf.identity, run.compiled.source.sample)
    copies = []
    begun_s = time.monotonic()
    for _ in range(EXCHANGES):
        with tf.device("GPU:0"):
            copies = [tf.identity(part) for part in tf.nest.flatten(batch)]
    # Copies of one device end in order.
    for copy in copies:
        copy.numpy()
    return (time.monotonic() - begun_s) / EXCHANGES
