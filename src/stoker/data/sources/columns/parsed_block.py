"""Records that name and type their own values, taken apart into columns a block at a time."""

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

MOST_NAMES = 100_000
"""Names of columns that a block may hold: where there are more, the names are data themselves."""


@dataclass(slots=True)
class Collected:
    """What records hold under one name, in values of one kind, while a block is gathered."""

    flat: Any
    """The values of all these records, one after another; has `append` or `extend`."""

    rows: list[int] = field(default_factory=list)
    """Places of the records in the block, ascending."""

    counts: list[int] = field(default_factory=list)
    """How many values each of them has, at least one; -1 where it holds a single value, in
    records that distinguish that from a list of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """What records of a block hold under one name, in values of one kind."""

    kind: str
    """The source's word for what they are."""

    rows: NDArray[np.int64]
    """[records] places in the block, ascending."""

    counts: NDArray[np.int64]
    """[records] how many values each of them has, at least one."""

    flat: pa.Array
    """[sum of counts] the values; of type null for kinds that no column can hold."""

    single: NDArray[np.bool_]
    """[records] whether it is known to be one value and no list."""

    def chosen(self, mask: NDArray[np.bool_], *, kind: str) -> Values:
        """Some of these records, as another kind."""
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
    """Some records of one file, taken apart."""

    file: SourceFile
    """Where they stand."""

    rows: NDArray[np.int64]
    """[rows] the numbers of those that could be taken apart."""

    columns: dict[str, list[Values]]
    """Name -> its values by kind; an empty list where the records only name it."""

    broken: list[Fault]
    """Those that could not."""

    @property
    def size_bytes(self) -> int:
        """What the values take in memory."""
        values = [each for found in self.columns.values() for each in found]
        return sum(v.flat.nbytes + v.rows.nbytes + v.counts.nbytes for v in values)


Finish = Callable[[str, Collected], Iterable[Values]]
"""Turns what was gathered under one kind into Arrow values, of one kind or several."""


class BlockBuilder:
    """A block that is being taken apart."""

    def __init__(self, file: SourceFile) -> None:
        """Start with nothing."""
        self.names: dict[str, dict[str, Collected]] = {}
        """Name -> kind -> what is collected; the source's inner loop writes here."""
        self.rows: list[int] = []
        """Numbers of the records taken apart."""
        self._file = file
        self._broken: list[Fault] = []

    def refuse(self, row: int, reason: str) -> None:
        """Name a record that cannot be taken apart."""
        self._broken.append(Fault(file=self._file.name, row=row, column="", reason=reason))

    def build(self, finish: Finish) -> ParsedBlock:
        """The block.

        Raises:
            DataError: it has more than `MOST_NAMES` names.
        """
        if len(self.names) > MOST_NAMES:
            raise DataError(
                f"the records of {self._file.location} must agree on at most {MOST_NAMES:,} names",
                got=Plain(f"{len(self.names):,} in {len(self.rows):,} records"),
                fix="Names that are data belong into a column of their own.",
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
    """What was gathered, with its values as Arrow has them."""
    counts = np.array(collected.counts, np.int64)
    return Values(
        kind=kind,
        rows=np.array(collected.rows, np.int64),
        counts=np.abs(counts),
        flat=flat,
        single=counts < 0,
    )
