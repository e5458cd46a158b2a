"""Computes which rows of an element a replica takes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from stoker.train.setup.strategy import Distribution


def rows_of(element: Any) -> tf.Tensor:
    """Return the number of rows of an element or a batch, int32."""
    return tf.shape(tf.nest.flatten(element)[0])[0]


def part_of_replica(
    count: tf.Tensor, distribution: Distribution, *, worker_rows_only: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the rows of an element that this replica takes; the shares of replicas differ by at most one row.

    Args:
        count: Number of rows of the element, int32.
        distribution: Devices that share the element.
        worker_rows_only: Whether the element contains only this worker's rows.

    Returns:
        The first row, and the number of rows.
    """
    parts = distribution.local_replicas if worker_rows_only else distribution.replicas
    if parts == 1 or distribution.takes_whole_batches:
        return tf.constant(0), count
    context = tf.distribute.get_replica_context()
    part = tf.cast(context.replica_id_in_sync_group, tf.int32) % parts
    first = count * part // parts
    return first, count * (part + 1) // parts - first
