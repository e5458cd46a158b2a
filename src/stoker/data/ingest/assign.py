"""Assign records to splits: by the seed, the record's content, and the number of equal records before it.

Equal records are interchangeable, so the order of files and records does not change the content of a
split. The constants in this module must never change, because every split depends on them.

Source: splitmix64 (Steele, Lea, Flood 2014), finalizer by David Stafford (variant 13).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from stoker.data.columns import Column

Hashes = NDArray[np.uint64]

_MISSING = 0x6D697373696E6721
"""Bits that are hashed for a missing number: an arbitrary constant that is unlikely to be a value."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class SplitRule:
    """Assigns records to splits by their content."""

    def __init__(self, shares: Mapping[str, float], *, seed: int, split_by: str | None) -> None:
        """Set the rule; the order of `shares` does not matter.

        Args:
            shares: Split -> share of the records.
            seed: A different seed gives different splits.
            split_by: The only column that decides the split; None: all columns or, for images, their bytes.
        """
        self.names = tuple(sorted(shares))
        self._bounds = np.cumsum([shares[name] for name in self.names])[:-1]
        self._seed = np.uint64(_digest(f"seed {seed}".encode()))
        self._split_by = split_by

    def assign(self, table: pa.Table, columns: Sequence[Column]) -> NDArray[np.intp]:
        """Return the index into `names` of each record's split: [rows].

        Args:
            table: The records, as a shard stores them.
            columns: The types of the table's columns.
        """
        return self.deal(self.content(table, columns))

    def content(self, table: pa.Table, columns: Sequence[Column]) -> Hashes:
        """Return a hash of the parts of each record that decide its split: [rows].

        Args:
            table: The records, as a shard stores them.
            columns: The types of the table's columns.
        """
        return hash_rows(table, self.deciding(columns))

    def deal(self, content: Hashes, copies: NDArray[np.int64] | None = None) -> NDArray[np.intp]:
        """Return the index into `names` of each record's split: [rows].

        Args:
            content: [rows] hashes of the records; see `content`.
            copies: [rows] number of equal records before each record; None: equal records are assigned to the
                same split.
        """
        if copies is not None:
            salts = _mixed(copies.astype(np.uint64))
            content = np.where(copies == 0, content, content ^ salts)
        uniform = (_mixed(content ^ self._seed) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return np.searchsorted(self._bounds, uniform, side="right")

    def deciding(self, columns: Sequence[Column]) -> list[Column]:
        """Return the columns that decide a record's split."""
        if self._split_by is not None:
            return [column for column in columns if column.name == self._split_by]
        images = [column for column in columns if column.dtype == "image"]
        return images or list(columns)


def hash_rows(table: pa.Table, columns: Sequence[Column]) -> Hashes:
    """Return a hash of each record's values in these columns, the sum of a hash per column: [rows].

    Args:
        table: The records, as a shard stores them.
        columns: The columns to hash, in any order.
    """
    total = np.zeros(table.num_rows, np.uint64)
    for column in columns:
        salt = np.uint64(_digest(column.name.encode()))
        # A sum does not depend on the order of the columns.
        total += _mixed(_value_hashes(column, table.column(column.name)) ^ salt)
    return total


def _value_hashes(column: Column, values: pa.ChunkedArray) -> Hashes:
    """Return a hash of each value: [rows].

    3 and 3.0 have the same hash: if any value of a column is missing, all its integers become floats.
    """
    if column.length is not None:
        items = _value_hashes(replace(column, length=None), pc.list_flatten(values))
        if column.is_ragged:
            return _list_hashes(items, pc.list_value_length(values).to_numpy())
        # Include each position; otherwise [1, 2] and [2, 1] would have the same hash.
        places = _mixed(np.arange(column.length, dtype=np.uint64))
        placed = _mixed(items.reshape(-1, column.length) ^ places)
        return _mixed(placed.sum(axis=1, dtype=np.uint64))
    if column.dtype == "image":
        return _each_digest(values)
    if column.dtype == "string":
        return _bytes_hashes(values.combine_chunks())
    if column.dtype == "int64":
        return _mixed(values.to_numpy().view(np.uint64))
    missing = values.is_null().to_numpy()
    numbers = pc.fill_null(values, 0.0).to_numpy().astype(np.float64)
    whole = (np.trunc(numbers) == numbers) & (np.abs(numbers) < 2.0**63)
    as_int = np.where(whole, numbers, 0.0).astype(np.int64).view(np.uint64)
    bits = np.where(whole, as_int, numbers.view(np.uint64))
    return _mixed(np.where(missing, np.uint64(_MISSING), bits))


def _list_hashes(items: Hashes, lengths: NDArray[np.int32]) -> Hashes:
    """Return a hash of each list, computed as for vectors from its values and their positions: [rows]."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    places = np.arange(len(items)) - np.repeat(starts, lengths)
    placed = _mixed(items ^ _mixed(places.astype(np.uint64)))
    sums = np.append(np.uint64(0), np.cumsum(placed, dtype=np.uint64))
    return _mixed(sums[ends] - sums[starts])


def _bytes_hashes(values: pa.Array) -> Hashes:
    """Return a digest of each string: [rows]. It is computed once per distinct value; categories have few."""
    encoded = values.dictionary_encode()
    if not len(encoded):
        return np.zeros(0, np.uint64)
    each = encoded.dictionary.cast(pa.binary()).to_pylist()
    digests = np.fromiter((_digest(value) for value in each), np.uint64, len(each))
    return digests[encoded.indices.to_numpy()]


def _each_digest(values: pa.ChunkedArray) -> Hashes:
    """Return a digest of each image: [rows]. Images rarely repeat, so each is hashed; its bytes are not copied."""
    found = (_digest(value.as_buffer() or b"") for chunk in values.chunks for value in chunk)
    return np.fromiter(found, np.uint64, len(values))


def _digest(value: bytes | pa.Buffer) -> int:
    return int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "little")


def _mixed(values: Hashes) -> Hashes:
    """Mix the bits of each value: every bit of the input changes every bit of the output with probability 1/2."""
    mixed = values + _GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))
