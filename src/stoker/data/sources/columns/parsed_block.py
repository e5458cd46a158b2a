"""Collect the values of records that name and type their own values into columns, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stoker.core.errors import DataError, Plain
from stoker.data.sources.files.listing import SourceFile
from stoker.data.sources.records import Fault

MAX_NAMES = 100_000
"""Maximum number of column names in a block; with more, the names are probably data."""


@dataclass(slots=True)
class Collected:
    """The values with the same name and kind, while a block is collected."""

    flat: Any
    """The values of all records, concatenated; an object with `append` or `extend`."""

    rows: list[int] = field(default_factory=list)
    """Index in the block of each record that has such values, ascending."""

    counts: list[int] = field(default_factory=list)
    """Number of values of each of these records: 1 or more; or -1 for a single value that the format distinguishes from
    a list of one value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """The values of a block that have the same name and kind."""

    kind: str
    """Name of the kind, such as `a number`."""

    rows: NDArray[np.int64]
    """[records] index in the block of each record that has such values, ascending."""

    counts: NDArray[np.int64]
    """[records] number of values of each record, at least 1."""

    flat: pa.Array
    """[sum of counts] the values of all records, concatenated; nulls for kinds that no column can hold."""

    single: NDArray[np.bool_]
    """[records] whether the record is known to hold a single value, not a list."""

    def chosen(self, mask: NDArray[np.bool_], *, kind: str) -> Values:
        """Return some of the records, as values of `kind`."""
        flat = self.flat.filter(pa.array(np.repeat(mask, self.counts)))
        return Values(
            kind=kind,
            rows=self.rows[mask],
            counts=self.counts[mask],
            flat=flat,
            single=self.single[mask],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedBlock:
    """Some parsed records of one file."""

    file: SourceFile
    """The file of the records."""

    rows: NDArray[np.int64]
    """[rows] numbers, in the file, of the records that could be parsed."""

    columns: dict[str, list[Values]]
    """Name -> its values, one entry per kind; an empty list if the name occurs only without a value."""

    broken: list[Fault]
    """The records that could not be parsed."""

    @property
    def size_bytes(self) -> int:
        """Memory of the values, bytes."""
        values = [each for found in self.columns.values() for each in found]
        return sum(v.flat.nbytes + v.rows.nbytes + v.counts.nbytes for v in values)


Finish = Callable[[str, Collected], Iterable[Values]]
"""Function of a kind and its collected values -> Arrow values, which may be of several kinds."""


class BlockBuilder:
    """A block under construction."""

    def __init__(self, file: SourceFile) -> None:
        """Start an empty block."""
        self.names: dict[str, dict[str, Collected]] = {}
        """Name -> kind -> collected values; parsers write to it directly."""
        self.rows: list[int] = []
        """Numbers of the parsed records."""
        self._file = file
        self._broken: list[Fault] = []

    def refuse(self, row: int, reason: str) -> None:
        """Add a record that cannot be parsed."""
        self._broken.append(Fault(file=self._file.name, row=row, column="", reason=reason))

    def build(self, finish: Finish) -> ParsedBlock:
        """Return the finished block.

        Raises:
            DataError: the block has more than `MAX_NAMES` names.
        """
        if len(self.names) > MAX_NAMES:
            raise DataError(
                f"the records of {self._file.location} must have at most {MAX_NAMES:,} different column names",
                got=Plain(f"{len(self.names):,} names in {len(self.rows):,} records"),
                fix="If the names are data, store them as values of a column.",
            )
        columns = {
            name: [
                v
                for kind, collected in kinds.items()
                for v in finish(kind, collected)
                if len(v.rows)
            ]
            for name, kinds in self.names.items()
        }
        return ParsedBlock(
            file=self._file,
            rows=np.array(self.rows, np.int64),
            columns=columns,
            broken=self._broken,
        )


def values_of(kind: str, collected: Collected, flat: pa.Array) -> Values:
    """Return the collected values as `Values`."""
    counts = np.array(collected.counts, np.int64)
    return Values(
        kind=kind,
        rows=np.array(collected.rows, np.int64),
        counts=np.abs(counts),
        flat=flat,
        single=counts < 0,
    )
