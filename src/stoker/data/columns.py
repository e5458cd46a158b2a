"""What one column of raw data is, the type at every seam of the `data` room.

How a missing value looks, everywhere (shards, `preprocessing_fn`, the serving signature):

dtype      in a shard (Arrow)          as a tensor, shape [batch]
int64      int64, no nulls             tf.int64, never missing
float32    float32, null = missing     tf.float32, NaN = missing
float64    float64, null = missing     tf.float64, NaN = missing (wide whole numbers with gaps)
string     string, no nulls            tf.string, "" = missing
image      binary, no nulls            tf.string: the encoded bytes of an image

A column of vectors holds `length` numbers or strings in every record: in a shard a fixed-size list
of the type above, never null itself; as a tensor [batch, length].
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
"""Dtype -> how a shard stores it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One raw column: its name as the user's data spells it, and its type."""

    name: str
    """The column's name, exactly as in the header."""

    dtype: Dtype
    """What it holds; the module's table says how it looks where."""

    whole: bool = False
    """True for float columns that hold only whole numbers (an integer column with gaps): such a
    column arrives in a serialized `tf.train.Example` as an `int64_list`."""

    length: int | None = None
    """How many values each record holds; None where it holds a single one. Images have none."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one record's value: () or (length,)."""
        return () if self.length is None else (self.length,)

    @property
    def arrow_type(self) -> pa.DataType:
        """How a shard stores it."""
        item = ARROW_TYPES[self.dtype]
        return item if self.length is None else pa.list_(item, self.length)

    @property
    def tensor_dtype(self) -> str:
        """The name of its tensor's dtype, as `tf.as_dtype` takes it."""
        return "string" if self.dtype == "image" else self.dtype


def to_numpy(column: Column, values: pa.Array | pa.ChunkedArray) -> NDArray[Any]:
    """One column of a shard as the array that a tensor is made of.

    Args:
        column: What the values are.
        values: [rows] Arrow values of the column's stored type.

    Returns:
        [rows], or [rows, length] for vectors: int64, float32 (missing = NaN), float64
        (missing = NaN) or an object array of bytes (strings as UTF-8, images encoded).
    """
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if column.length is not None:
        # `flatten` heeds the offset of a slice, `values` does not.
        return _scalars(column, values.flatten()).reshape(len(values), column.length)
    return _scalars(column, values)


def _scalars(column: Column, values: pa.Array) -> NDArray[Any]:
    if column.dtype in ("float32", "float64"):
        filled = pc.fill_null(values, pa.scalar(float("nan"), type=values.type))
        return filled.to_numpy(zero_copy_only=False)
    if column.dtype == "int64":
        return values.to_numpy(zero_copy_only=False)
    as_bytes = values.cast(pa.binary()) if column.dtype == "string" else values
    return np.array(as_bytes.to_pylist(), dtype=object)
