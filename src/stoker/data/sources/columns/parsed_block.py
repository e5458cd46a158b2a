"""Parses records that name and type their own values into columns, a block at a time."""

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
"""Most names of columns in a block: with more, the names are themselves data."""


@dataclass(slots=True)
class Collected:
    """The values of one name and one kind, while a block is collected."""

    flat: Any
    """The values of all these records, concatenated; has `append` or `extend`."""

    rows: list[int] = field(default_factory=list)
    """Indexes of the records in the block, ascending."""

    counts: list[int] = field(default_factory=list)
    """Number of values of each, at least one; -1 for a single value, in
    records that distinguish that from a list of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """The values of a block with one name and one kind."""

    kind: str
    """The source's name of the kind."""

    rows: NDArray[np.int64]
    """[records] indexes in the block, ascending."""

    counts: NDArray[np.int64]
    """[records] number of values of each, at least one."""

    flat: pa.Array
    """[sum of counts] the values; of type null for kinds that no column can hold."""

    single: NDArray[np.bool_]
    """[records] whether the value is known to be single, not a list."""

    def chosen(self, mask: NDArray[np.bool_], *, kind: str) -> Values:
        """Some of these records, with another kind."""
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
    """Their position."""

    rows: NDArray[np.int64]
    """[rows] the numbers of the records that could be parsed."""

    columns: dict[str, list[Values]]
    """Name -> its values by kind; an empty list if the records only name it."""

    broken: list[Fault]
    """The records that could not be parsed."""

    @property
    def size_bytes(self) -> int:
        """Memory of the values, bytes."""
        values = [each for found in self.columns.values() for each in found]
        return sum(v.flat.nbytes + v.rows.nbytes + v.counts.nbytes for v in values)


Finish = Callable[[str, Collected], Iterable[Values]]
"""Converts the collected values of one kind to Arrow values, of one kind or several."""


class BlockBuilder:
    """A block under construction."""

    def __init__(self, file: SourceFile) -> None:
        """Start an empty block."""
        self.names: dict[str, dict[str, Collected]] = {}
        """Name -> kind -> collected values; the source's inner loop writes here."""
        self.rows: list[int] = []
        """Numbers of the parsed records."""
        self._file = file
        self._broken: list[Fault] = []

    def refuse(self, row: int, reason: str) -> None:
        """Add a record that cannot be parsed."""
        self._broken.append(Fault(file=self._file.name, row=row, column="", reason=reason))

    def build(self, finish: Finish) -> ParsedBlock:
        """The block.

        Raises:
            DataError: the block has more than `MAX_NAMES` names.
        """
        if len(self.names) > MAX_NAMES:
            raise DataError(
                f"the records of {self._file.location} must agree on at most {MAX_NAMES:,} names",
                got=Plain(f"{len(self.names):,} in {len(self.rows):,} records"),
                fix="Store names that are data as values of a column.",
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
    """The collected values as Arrow arrays."""
    counts = np.array(collected.counts, np.int64)
    return Values(
        kind=kind,
        rows=np.array(collected.rows, np.int64),
        counts=np.abs(counts),
        flat=flat,
        single=counts < 0,
    )
