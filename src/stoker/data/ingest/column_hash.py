"""The name of a column's content, so that a stage can depend on just the columns that it reads."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stoker.data.columns import Column


class ColumnHash:
    """The SHA-256 of a column's type and values, however they are cut into pieces."""

    def __init__(self, column: Column) -> None:
        """Start with no value."""
        length = "" if column.length is None else f" {column.length}"
        self._values = hashlib.sha256(f"{column.dtype} {column.whole}{length}".encode())
        self._lengths = hashlib.sha256()
        self._lists = hashlib.sha256()
        self._is_ragged = column.is_ragged

    def add(self, values: pa.ChunkedArray) -> None:
        """Take more values, of the type that a shard stores."""
        for chunk in values.chunks:
            if pa.types.is_list(chunk.type):
                lengths = pc.list_value_length(chunk).to_numpy(zero_copy_only=False)
                self._lists.update(lengths.astype("<i8").tobytes())
            is_single = not pa.types.is_nested(chunk.type)
            self._add(chunk if is_single else chunk.flatten())

    def hexdigest(self) -> str:
        """The hash of all values so far."""
        lists = self._lists.digest() if self._is_ragged else b""
        return hashlib.sha256(self._values.digest() + self._lengths.digest() + lists).hexdigest()

    def _add(self, values: pa.Array) -> None:
        if pa.types.is_string(values.type) or pa.types.is_binary(values.type):
            # Without the lengths "ab", "c" and "a", "bc" would be the same.
            lengths = pc.binary_length(values).to_numpy(zero_copy_only=False)
            self._lengths.update(lengths.astype("<i8").tobytes())
            self._values.update(_content(values))
            return
        if pa.types.is_floating(values.type):
            values = pc.fill_null(values, pa.scalar(np.nan, values.type))
        numbers = values.to_numpy(zero_copy_only=False)
        self._values.update(numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).tobytes())


def _content(values: pa.Array) -> memoryview:
    """The bytes of all values, one after another."""
    _, offsets, content = values.buffers()
    if content is None or not len(values):
        return memoryview(b"")
    ends = np.frombuffer(offsets, np.int32)[[values.offset, values.offset + len(values)]]
    return memoryview(content)[ends[0] : ends[1]]
