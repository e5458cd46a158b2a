"""Sparse vectors, from two columns of raw data: lists of positions and lists of values."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from stoker.core.errors import ConfigError, Plain
from stoker.data.features.preprocessing.trace import required_whole


def sparse_from_lists(
    places: tf.RaggedTensor, values: tf.RaggedTensor, size: int
) -> tf.SparseTensor:
    """Build sparse vectors from a column of positions and a column of values, as `tf.io.SparseFeature` does.

    In training and in serving, a row that breaks the rules below is an error.

    Args:
        places: [batch, None] whole numbers in [0, size), in any order, each at most once per row.
        values: [batch, None] numbers or strings, one for each place. There may be fewer floats or strings
            than places, because missing values at the end of a list are not stored: they become NaN or "".
        size: Length of the vectors, at least 1.

    Returns:
        [batch, size] sparse tensor of the values' type, ordered by place.

    Raises:
        ConfigError: the columns are not lists of varying length, the places are not whole numbers, or
            `size` is below 1.
    """
    if not all(isinstance(each, tf.RaggedTensor) for each in (places, values)):
        raise ConfigError(
            "stoker.transform.sparse_from_lists must be given lists of varying length",
            got=Plain(f"{type(places).__name__} and {type(values).__name__}"),
            fix="List both columns under `data.columns: {lists: [...]}`.",
        )
    if not places.dtype.is_integer:
        raise ConfigError(
            "stoker.transform.sparse_from_lists must be given places that are whole numbers",
            got=Plain(places.dtype.name),
        )
    required_whole("size", size, least=1)
    at, row = tf.cast(places.flat_values, tf.int64), places.value_rowids()
    missing = places.row_lengths() - values.row_lengths()
    rules = [
        _rule(missing >= 0, "a place for each value"),
        _rule(tf.equal(missing, 0) | (values.dtype in _MISSING), "a value for each place"),
        _rule((at >= 0) & (at < size), f"places from 0 to {size - 1}"),
    ]
    with tf.control_dependencies(rules):
        nth = tf.range(tf.size(at, tf.int64)) - tf.gather(places.row_starts(), row)
        is_stored = nth < tf.gather(values.row_lengths(), row)
        where = tf.where(
            is_stored,
            tf.gather(values.row_starts(), row) + nth,
            tf.size(values.flat_values, tf.int64),
        )
    filler = tf.constant([_MISSING.get(values.dtype, 0)], values.dtype)
    # `tf.sparse.to_dense` then knows the width while tracing.
    shape = tf.stack([places.nrows(), size])
    sparse = tf.sparse.reorder(
        tf.SparseTensor(
            tf.stack([row, at], axis=1),
            tf.gather(tf.concat([values.flat_values, filler], axis=0), where),
            shape,
        )
    )
    differ = tf.reduce_any(sparse.indices[1:] != sparse.indices[:-1], axis=1)
    with tf.control_dependencies([_rule(differ, "each place at most once")]):
        return tf.SparseTensor(sparse.indices, tf.identity(sparse.values), shape)


_MISSING: dict[tf.DType, Any] = {tf.float32: float("nan"), tf.float64: float("nan"), tf.string: ""}
"""Type of values -> the missing value."""


def _rule(holds: tf.Tensor, rule: str) -> Any:
    message = f"stoker.transform.sparse_from_lists: every row must have {rule}"
    return tf.debugging.Assert(tf.reduce_all(holds), [message])
