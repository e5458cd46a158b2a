"""The type of one column of raw data, used everywhere in the package `data`.

The form of values and of missing values everywhere (shards, `preprocessing_fn`, the serving signature):

dtype      in a shard (Arrow)          as a tensor, shape [batch]
int64      int64, no nulls             tf.int64, never missing
float32    float32, null = missing     tf.float32, NaN = missing
float64    float64, null = missing     tf.float64, NaN = missing (wide whole numbers with gaps)
string     string, no nulls            tf.string, "" = missing
image      binary, no nulls            tf.string: the encoded bytes of an image

A column of vectors holds `length` numbers or strings in every record: in a shard, a fixed-size list
of the type above, which is never null; as a tensor, [batch, length].

A column of lists of varying length (`length` is `VARYING`) holds any number of values: in a shard, a
list of the type above, which is never null (a missing list is stored as an empty list); as a tensor, [batch,
longest list of the batch], where shorter lists are filled with `PADDING`, a missing value. So missing
values at the end of a list look the same as padding: ingest removes them from the lists in a
shard, and in `preprocessing_fn` the column is a `tf.RaggedTensor` without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Dtype = Literal["int64", "float32", "float64", "string", "image"]

ARROW_TYPES: dict[str, pa.DataType] = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "image": pa.binary(),
}
"""Dtype -> its type in a shard."""

VARYING = 0
"""Value of `Column.length` for lists of varying length."""

PADDING: dict[str, Any] = {"int64": -(2**63), "float32": float("nan"), "string": b""}
"""Dtype -> the value that fills a list up to the longest list of its batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One raw column: its name as in the user's data, and its type."""

    name: str
    """The column's name, exactly as in the header."""

    dtype: Dtype
    """Type of its values; the table at the top of this module shows how they are stored."""

    whole: bool = False
    """True for float columns that hold only whole numbers (an integer column with gaps): such a
    column arrives in a serialized `tf.train.Example` as an `int64_list`."""

    length: int | None = None
    """Number of values in each record; None for a single value, `VARYING` if records have different
    numbers of values. Always None for images."""

    @property
    def is_ragged(self) -> bool:
        """Whether the column holds lists of varying length."""
        return self.length == VARYING

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of one record's value: (), (length,), or (None,) where lengths vary."""
        return () if self.length is None else (self.length or None,)

    @property
    def arrow_type(self) -> pa.DataType:
        """The column's Arrow type in a shard."""
        item = ARROW_TYPES[self.dtype]
        return item if self.length is None else pa.list_(item, self.length or -1)

    @property
    def tensor_dtype(self) -> str:
        """The dtype of the column's tensor, as a name that `tf.as_dtype` accepts."""
        return "string" if self.dtype == "image" else self.dtype


def to_numpy(column: Column, values: pa.Array | pa.ChunkedArray) -> NDArray[Any]:
    """Convert one column of a shard to the array from which a tensor is made.

    Args:
        column: The type of the values.
        values: [rows] Arrow values of the column's stored type.

    Returns:
        [rows], or [rows, length] for vectors, or [rows, longest list] padded with `PADDING`: int64,
        float32 (missing = NaN), float64 (missing = NaN) or an object array of bytes (strings as
        UTF-8, images encoded).
    """
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if column.is_ragged:
        lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False)
        return _padded(column, _scalars(column, values.flatten()), lengths)
    if column.length is not None:
        # `flatten` respects the offset of a slice, `values` does not.
        return _scalars(column, values.flatten()).reshape(len(values), column.length)
    return _scalars(column, values)


def list_lengths(column: Column, padded: NDArray[Any]) -> NDArray[np.int64]:
    """Return the length of each list, without the missing values at its end.

    Args:
        column: Lists of varying length.
        padded: [rows, longest list] as `to_numpy` returns it.
    """
    is_number = column.dtype == "float32"
    present = ~np.isnan(padded) if is_number else padded != PADDING[column.dtype]
    return (present * np.arange(1, padded.shape[1] + 1)).max(axis=1, initial=0).astype(np.int64)


def _padded(column: Column, flat: NDArray[Any], lengths: NDArray[np.int32]) -> NDArray[Any]:
    width = int(lengths.max(initial=0))
    padded = np.full((len(lengths), width), PADDING[column.dtype], flat.dtype)
    padded[np.arange(width) < lengths[:, None]] = flat
    return padded


def _scalars(column: Column, values: pa.Array) -> NDArray[Any]:
    if column.dtype in ("float32", "float64"):
        filled = pc.fill_null(values, pa.scalar(float("nan"), type=values.type))
        return filled.to_numpy(zero_copy_only=False)
    if column.dtype == "int64":
        return values.to_numpy(zero_copy_only=False)
    as_bytes = values.cast(pa.binary()) if column.dtype == "string" else values
    return np.array(as_bytes.to_pylist(), dtype=object)
