"""The columns of a window, filled row group by row group; each row is written to its place in the window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from stoker.data.columns import Column
from stoker.data.sources.columns.vectors import lengths_of, lists_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A column of strings as codes (indices into a dictionary), without a Python object per row."""

    codes: NDArray[np.int32]
    """[rows] or [rows, length] indices into the dictionary."""

    dictionary: pa.StringArray
    """The different strings of the window; a string's index is its code."""

    def __getitem__(self, rows: slice) -> Text:
        """Return some of the rows, with the whole dictionary."""
        return replace(self, codes=self.codes[rows])


@dataclass(frozen=True, kw_only=True, slots=True)
class Lists:
    """A column of lists of varying length."""

    rows: pa.ListArray
    """[rows] lists of numbers, or of indices into the dictionary."""

    dictionary: pa.StringArray | None = None
    """The different strings of the window; None for numbers."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __getitem__(self, rows: slice) -> Lists:
        """Return some of the rows, with the whole dictionary."""
        return replace(self, rows=self.rows[rows])

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of values of each list: [rows]."""
        return lengths_of(self.rows)

    def flat(self) -> NDArray[Any]:
        """Return the values of all lists, one after another; a missing float is NaN."""
        return self.rows.flatten().to_numpy(zero_copy_only=False)


Values = NDArray[Any] | Text | Lists
"""One column: numbers as `columns.to_numpy` returns them, strings, or lists of numbers or strings."""


def empty_column(column: Column) -> Values:
    """Return a column without rows."""
    if column.is_ragged:
        return ListColumn(column, None).finished()
    if column.dtype == "string":
        codes = np.empty((0, *_shape(column)), np.int32)
        return Text(codes=codes, dictionary=pa.array([], pa.string()))
    return np.empty((0, *_shape(column)), column.tensor_dtype)


class NumberColumn:
    """A column of numbers of a window, while it is filled."""

    def __init__(self, column: Column, leftover: NDArray[Any], *, rows: int) -> None:
        """Allocate the rows left from the previous window, and `rows` more."""
        self._column = column
        self._values = _aligned((len(leftover) + rows, *_shape(column)), column.tensor_dtype)
        self._values[: len(leftover)] = leftover

    def put(self, places: NDArray[np.int64], chunks: pa.ChunkedArray, *, first: int) -> None:
        """Write the values of a row group to the places of its rows."""
        del first  # only codes of strings depend on the row group
        # A missing float becomes NaN.
        parts = [_flat(self._column, chunk) for chunk in chunks.chunks]
        numbers = pa.concat_arrays(parts).to_numpy(zero_copy_only=False)
        self._values[places] = numbers.reshape(-1, *_shape(self._column))

    def finished(self) -> NDArray[Any]:
        """Return [leftover + rows, ...] with every row at its place."""
        return self._values


class TextColumn:
    """A column of strings of a window, while it is filled. The row groups' dictionaries are merged into one."""

    def __init__(self, column: Column, leftover: Text, *, rows: int) -> None:
        """Allocate the rows left from the previous window, and `rows` more."""
        self._column = column
        self._codes = _aligned((len(leftover.codes) + rows, *_shape(column)), np.int32)
        self._dictionaries: dict[int, pa.StringArray] = {}
        # Only the strings of leftover rows are kept; otherwise, dictionaries would grow with every window.
        strings = leftover.dictionary.take(pa.array(leftover.codes.reshape(-1)))
        self._put(0, slice(len(leftover.codes)), strings.dictionary_encode())

    def put(self, places: NDArray[np.int64], chunks: pa.ChunkedArray, *, first: int) -> None:
        """Write the values of a row group to the places of its rows.

        Args:
            places: [rows] the place of each row of the group in the window.
            chunks: The values.
            first: Number of rows that come before the group, leftover rows included.
        """
        parts = [_flat(self._column, chunk) for chunk in chunks.chunks]
        whole = parts[0]
        if len(parts) != 1 or not _has_small_dictionary(whole):
            strings = [p.cast(pa.string()) for p in parts]
            whole = pa.concat_arrays(strings).dictionary_encode()
        self._put(first, places, whole)

    def _put(self, first: int, places: Any, strings: pa.DictionaryArray) -> None:
        # Codes of a group start at `start`. A group has at most as many different strings as it has
        # strings, so the groups' ranges of codes do not overlap.
        start = first * (self._column.length or 1)
        found, known = strings.indices.to_numpy(), len(strings.dictionary)
        if len(found) and not 0 <= found.min() <= found.max() < known:
            raise pa.ArrowInvalid(f"a string's code is outside its dictionary of {known} strings")
        codes = found + np.int32(start)
        self._codes[places] = codes.reshape(-1, *_shape(self._column))
        self._dictionaries[start] = strings.dictionary

    def finished(self) -> Text:
        """Return [leftover + rows, ...] with every row at its place, and one dictionary."""
        starts = sorted(self._dictionaries)
        parts = [self._dictionaries[start] for start in starts]
        unified = pa.concat_arrays(parts).dictionary_encode()
        new_codes = np.empty(self._codes.size, np.int32)
        offset = 0
        for start, part in zip(starts, parts, strict=True):
            new_codes[start : start + len(part)] = unified.indices[offset : offset + len(part)]
            offset += len(part)
        new_codes.take(self._codes, out=self._codes, mode="clip")
        return Text(codes=self._codes, dictionary=unified.dictionary)


class ListColumn:
    """A column of lists of a window, while it is filled. Rows are kept as they are read, and sorted at the end."""

    def __init__(self, column: Column, leftover: Lists | None) -> None:
        """Start with the rows that are left from the previous window."""
        self._column = column
        self._parts: list[tuple[NDArray[np.int64], pa.ListArray]] = []
        if leftover is not None and len(leftover):
            rows = leftover.rows
            if leftover.dictionary is not None:
                rows = lists_of(leftover.lengths(), leftover.dictionary.take(rows.flatten()))
            self._parts.append((np.arange(len(leftover)), rows))

    def put(self, places: NDArray[np.int64], chunks: pa.ChunkedArray, *, first: int) -> None:
        """Keep a row group and the places of its rows."""
        # In `TextColumn`, codes of strings depend on `first`; here, `finished` computes the codes of all groups.
        del first
        self._parts.append((places, pa.concat_arrays(chunks.chunks)))

    def finished(self) -> Lists:
        """Return [leftover + rows] with every row at its place, and one dictionary."""
        kind = self._column.arrow_type
        rows = pa.concat_arrays(
            [part.cast(kind) for _, part in self._parts] or [pa.array([], kind)]
        )
        stored = np.argsort(np.concatenate([np.zeros(0, np.int64), *(at for at, _ in self._parts)]))
        rows = rows.take(pa.array(stored))
        if self._column.dtype != "string":
            return Lists(rows=rows)
        # Strings are coded in the final order, so that codes do not depend on the order of the threads.
        coded = rows.flatten().dictionary_encode()
        return Lists(rows=lists_of(lengths_of(rows), coded.indices), dictionary=coded.dictionary)


def window_column(
    column: Column, leftover: Values, *, rows: int
) -> NumberColumn | TextColumn | ListColumn:
    """Return a column to fill; its first rows are the ones that are left from the previous window."""
    if isinstance(leftover, Lists):
        return ListColumn(column, leftover)
    if isinstance(leftover, Text):
        return TextColumn(column, leftover, rows=rows)
    return NumberColumn(column, leftover, rows=rows)


def _shape(column: Column) -> tuple[int, ...]:
    """Return the shape of one record's value: () or (length,)."""
    return () if column.length is None else (column.length,)


def _flat(column: Column, values: pa.Array) -> pa.Array:
    return values if column.length is None else values.flatten()


def _has_small_dictionary(values: pa.Array) -> bool:
    """Return whether `values` is a dictionary array whose dictionary is not longer than the array."""
    return pa.types.is_dictionary(values.type) and len(values.dictionary) <= len(values)


def _aligned(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    # TensorFlow uses an array without a copy if its address is a multiple of 64, which Arrow's buffers are.
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(pa.allocate_buffer(size), dtype).reshape(shape)
