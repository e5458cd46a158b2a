"""Parts of a step that cannot be seen inside of it, and are measured alone."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from stoker.train.checkpoints.cadence import LEAST_EVERY_S, MOST_EVERY_S
from stoker.train.checkpoints.state import TrainingState
from stoker.train.loop.run import Run
from stoker.train.setup.strategy import in_packs

EXCHANGES = 10
"""How often an exchange or a copy is made to be timed."""


def checkpoint_s(run: Run, state: TrainingState) -> float:
    """What a checkpoint holds the step up for, by step at the rate of the settings, seconds.

    Its writing goes on beside the step and is not in it.
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
    """What summing gradients over the replicas takes of a step, seconds; measured alone."""
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
    """What copying a batch to the first GPU takes, seconds; 0 without a GPU."""
    if not tf.config.list_logical_devices("GPU"):
        return 0.0
    with tf.device("CPU:0"):
        batch = tf.nest.map_structure(tf.identity, run.compiled.source.sample)
    copies = []
    begun_s = time.monotonic()
    for _ in range(EXCHANGES):
        with tf.device("GPU:0"):
            copies = [tf.identity(part) for part in tf.nest.flatten(batch)]
    # Copies of a device end in their order.
    for copy in copies:
        copy.numpy()
    return (time.monotonic() - begun_s) / EXCHANGES
