"""Signatures of an exported model: raw features by name, or serialized `tf.train.Example`s."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from stoker.data.columns import PADDING, Column, list_lengths
from stoker.data.user_dataset.description import AnyColumn, TensorColumn

SERVING_DEFAULT = "serving_default"
"""Signature that takes raw features by column name. Source: TensorFlow Serving's default signature name."""

SERVING_EXAMPLES = "serving_examples"
"""Signature that takes one input, `examples`: [batch] serialized `tf.train.Example`."""

TRANSFORM_FEATURES = "transform_features"
"""Signature that takes raw features and returns the transformed features. Source: TensorFlow Extended's name."""

SERVING_TRANSFORMED = "serving_transformed"
"""Signature that takes the features that `transform_features` returns: the model without its transform, for devices
that do not support the transform's tables and decoders."""

EXAMPLES_INPUT = "examples"
"""Name of the only input of `serving_examples`."""

_MISSING_WHOLE = -(2**63)
"""Marks a missing value in an Example's int64_list; it is converted to NaN after parsing."""


def argument_names(columns: Sequence[AnyColumn]) -> dict[str, str]:
    """Column name -> argument name in the graph: a unique identifier."""
    return arguments_of([column.name for column in columns])


def arguments_of(features: Sequence[str]) -> dict[str, str]:
    """Feature name -> argument name in the graph: a unique identifier."""
    names: dict[str, str] = {}
    for index, feature in enumerate(features):
        name = re.sub(r"[^A-Za-z0-9_]", "_", feature)
        usable = name[:1].isalpha() and not keyword.iskeyword(name) and name not in names.values()
        names[feature] = name if usable else f"c{index}_{name}"
    return names


def feature_specs(columns: Sequence[AnyColumn]) -> dict[str, tf.TensorSpec]:
    """Column name -> its spec in `serving_default`, [batch] or [batch, length], with its name in the graph.

    Lists of varying length are [batch, None], padded as `stoker.data.columns` describes.
    """
    names = argument_names(columns)
    return {
        column.name: tf.TensorSpec(
            [None, *column.shape], column.tensor_dtype, name=names[column.name]
        )
        for column in columns
    }


def takes_examples(columns: Sequence[AnyColumn]) -> bool:
    """Whether an Example can hold these columns: it has only three types, and tensors in it need a fixed shape."""
    tensors = [column for column in columns if isinstance(column, TensorColumn)]
    return all(
        column.dtype in ("int64", "float32", "string") and None not in column.shape
        for column in tensors
    )


def parse_examples(serialized: tf.Tensor, columns: Sequence[AnyColumn]) -> dict[str, tf.Tensor]:
    """Convert [batch] serialized Examples to raw columns, with missing values as in `stoker.data.columns`.

    An integer column with missing values is an `int64_list`. An Example may leave out a float or string column, and
    an integer column with missing values: the value, or each value of the vector, is then missing. If it leaves out
    a list of varying length, the list is empty. It must have all other columns.

    Returns:
        Column name -> [batch], or [batch, length] for vectors, or [batch, longest] for lists.
    """
    parsed = tf.io.parse_example(serialized, {c.name: _parsing(c) for c in columns})
    return {column.name: _densified(column, parsed[column.name]) for column in columns}


def make_examples(columns: Sequence[AnyColumn], rows: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Serialize rows as Examples: [batch] bytes; missing values are left out."""
    count = len(next(iter(rows.values())))
    serialized = [
        tf.train.Example(
            features=tf.train.Features(
                feature={
                    column.name: feature
                    for column in columns
                    if (feature := _feature(column, _value(column, rows[column.name], row)))
                    is not None
                }
            )
        ).SerializeToString()
        for row in range(count)
    ]
    return np.array(serialized, dtype=object)


def _parsing(column: AnyColumn) -> tf.io.FixedLenFeature | tf.io.VarLenFeature:
    if isinstance(column, TensorColumn):
        return tf.io.FixedLenFeature(column.shape, column.dtype)
    if column.is_ragged:
        return tf.io.VarLenFeature(column.tensor_dtype)

    def parsing(dtype: tf.DType, missing: Any) -> tf.io.FixedLenFeature:
        default = missing if column.length is None else [missing] * column.length
        return tf.io.FixedLenFeature(column.shape, dtype, default_value=default)

    if column.whole:
        return parsing(tf.int64, _MISSING_WHOLE)
    if column.dtype == "float32":
        return parsing(tf.float32, float("nan"))
    if column.dtype == "string":
        return parsing(tf.string, "")
    return tf.io.FixedLenFeature(column.shape, column.tensor_dtype)


def _densified(column: AnyColumn, values: Any) -> tf.Tensor:
    if isinstance(column, Column) and column.is_ragged:
        return tf.sparse.to_dense(values, default_value=PADDING[column.dtype])
    if isinstance(column, TensorColumn) or not column.whole:
        return values
    dtype = column.tensor_dtype
    missing = tf.fill(tf.shape(values), tf.constant(float("nan"), dtype))
    return tf.where(values == _MISSING_WHOLE, missing, tf.cast(values, dtype))


def _value(column: AnyColumn, values: NDArray[Any], row: int) -> Any:
    """The value of a column in a row; a list of varying length is returned without its padding."""
    if isinstance(column, Column) and column.is_ragged:
        return values[row][: list_lengths(column, values[row : row + 1])[0]]
    return values[row]


def _feature(column: AnyColumn, value: Any) -> tf.train.Feature | None:
    values = np.ravel(value).tolist() if column.shape else [value]
    if column.dtype in ("string", "image"):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if column.dtype == "int64":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=map(int, values)))
    if isinstance(column, Column) and np.isnan(values).all():
        return None
    if isinstance(column, Column) and column.whole:
        whole = (_MISSING_WHOLE if np.isnan(number) else int(number) for number in values)
        return tf.train.Feature(int64_list=tf.train.Int64List(value=whole))
    return tf.train.Feature(float_list=tf.train.FloatList(value=map(float, values)))
