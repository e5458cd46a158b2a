"""Reading the bytes of encoded images inside the graph, a whole batch at a time."""

from __future__ import annotations

import tensorflow as tf

HEAD_BYTES = 22
"""How much of each image is looked at to tell what it is."""


def heads(encoded: tf.Tensor) -> tf.Tensor:
    """How images begin: [batch] strings -> [batch, HEAD_BYTES] uint8, zeros behind their end."""
    start = tf.strings.substr(encoded, 0, HEAD_BYTES)
    return tf.io.decode_raw(start, tf.uint8, fixed_length=HEAD_BYTES)


def holds(head: tf.Tensor, text: bytes, at: int = 0) -> tf.Tensor:
    """Where `text` stands at byte `at` of each head: [batch, HEAD_BYTES] -> [batch] bool."""
    part = head[:, at : at + len(text)]
    return tf.reduce_all(tf.equal(part, tf.constant(list(text), tf.uint8)), axis=1)


def bytes_at(encoded: tf.Tensor, at: tf.Tensor, count: int) -> tf.Tensor:
    """`count` bytes of each string from `at` on: [batch, count] int32, zeros behind its end."""
    start = tf.minimum(at, tf.strings.length(encoded))
    part = tf.strings.substr(encoded, start, tf.fill(tf.shape(start), count))
    return tf.cast(tf.io.decode_raw(part, tf.uint8, fixed_length=count), tf.int32)
