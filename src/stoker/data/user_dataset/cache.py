"""A split of a user's dataset kept in memory: one pass is read, and every epoch gets its batches."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from stoker.core.errors import ConfigError, Plain
from stoker.data.feed.options import free_memory_bytes
from stoker.data.user_dataset.description import Count

CACHE_SHARE = 0.5
"""Most of the memory that is free which a split's batches may take. It is asked again at every batch,
so that processes that fill theirs side by side stop before there is none left."""

SURE_SHARE = 0.125
"""Share of what may be taken that is read before all of it is told from that: so little does no harm,
and is enough rows to know what a row takes."""

TEXT_BYTES = 24
"""What a text takes beside its bytes: TensorFlow's `tstring`."""


def in_memory(
    dataset: tf.data.Dataset[Any], count: Count, *, what: str, split: str
) -> tf.data.Dataset[Any]:
    """Read a pass and keep it.

    Args:
        dataset: A pass of it is `count.batches` elements.
        count: What the analysis met.
        what: Whose it is, for the message.
        split: Name of the split, for the message.

    Returns:
        The same elements, from memory, in every pass; it holds them for as long as it is there.

    Raises:
        ConfigError: they do not fit; with their size and the limit.
        tf.errors.OpError: the dataset failed, or a pass has another number of elements.
    """
    # TensorFlow keeps what an iterator has read to the end for all iterators of this object.
    kept = dataset.cache()
    taken = rows = 0
    for number, element in enumerate(kept, start=1):
        tensors = tf.nest.flatten(element)
        taken += sum(map(element_bytes, tensors))
        rows += int(tensors[0].shape[0])
        limit = int(CACHE_SHARE * (free_memory_bytes() + taken))
        needed = taken * count.rows // max(1, rows)
        if taken > limit or (needed > limit and taken > SURE_SHARE * limit):
            raise ConfigError(
                f"data.pipeline.cache: memory must fit into {CACHE_SHARE:.0%} of the free memory",
                got=Plain(
                    f"{_size(taken)} in {number} of {count.batches} batches of {what}, split "
                    f"{split!r}, so about {_size(max(taken, needed))} in all; {_size(limit)} may be "
                    "taken"
                ),
                fix="Set data.pipeline.cache to none, or cache in the dataset what is smaller: the "
                "encoded images, or pixels as uint8.",
            )
    return kept


def element_bytes(tensor: tf.Tensor) -> int:
    """Memory that a tensor's elements hold, texts by their length."""
    if tensor.dtype != tf.string:
        return int(tensor.shape.num_elements()) * int(tensor.dtype.size)
    lengths = tf.cast(tf.strings.length(tensor), tf.int64)
    return int(tf.reduce_sum(lengths)) + TEXT_BYTES * int(tensor.shape.num_elements())


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
