"""One column of records that name their own values: find its kind and length, and the records that deviate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stoker.core.errors import Plain
from stoker.data.columns import VARYING, Column
from stoker.data.sources.columns.column_typing import ColumnTyping, Family
from stoker.data.sources.columns.parsed_block import ParsedBlock, Values
from stoker.data.sources.columns.table import UnusableColumn, no_lists
from stoker.data.sources.columns.text import assumed_of, clean, read_text
from stoker.data.sources.columns.vectors import (
    LIST_NUMBER_MISSING,
    allowed_deviations,
    assumed_of_lists,
    list_cells,
)
from stoker.data.sources.config import Override, leaving_out
from stoker.data.sources.records import Assumption, Cells, Reading, with_fault
from stoker.data.sources.written_numbers import NumberText

NUMBER, WHOLE_NUMBER, TRUTH = "a number", "a whole number", "true or false"
WIDE_NUMBER = "a whole number of any size"
TEXT, IMAGE, NOTHING, NULLS = "text", "an image", "", "a list of nulls"
"""Kinds of values that several formats have; `NOTHING` if no record has a value. Values of `WIDE_NUMBER` are kept as
text, because it is known only after the whole column was read whether they fit its type."""

FAMILIES: dict[str, Family] = {
    NOTHING: "null",
    "an int64_list": "int",
    "a float_list": "float",
    WHOLE_NUMBER: "int",
    WIDE_NUMBER: "int",
    NUMBER: "float",
    TRUTH: "int",
    TEXT: "string",
    IMAGE: "image",
}
"""Kind of value that a column can hold -> its family."""

_ARROW: dict[Family, pa.DataType] = {
    "null": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "string": pa.string(),
    "image": pa.binary(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedColumn:
    """How one column is read; decided after all records were scanned."""

    column: Column
    """The stored column."""

    how: Reading
    """How the column's values are read."""

    kind: str
    """The kind of value that a record must hold."""

    override: Override | NumberText | None
    """The column's setting in `data.types`; None without one."""

    def cells(self, block: ParsedBlock, missing: pa.Array) -> Cells:
        """Return the column's cells in one block; images are not checked yet.

        Args:
            block: The records.
            missing: The strings that mean "missing" in a column of numbers.
        """
        given = block.columns.get(self.column.name, [])
        own = next((values for values in given if self._takes(values.kind)), None)
        if own is None:
            own = _no_values(_ARROW[FAMILIES[self.kind]])
        typed = ColumnTyping(
            name=self.column.name,
            override=self.override,
            families={FAMILIES[self.kind]: block.file.name},
        )

        def read(flat: pa.Array) -> Cells:
            wide = self.column.dtype == "float64"
            if own.kind == WIDE_NUMBER:
                return read_text(clean(flat), self.how, missing, wide=wide)
            return typed.typed(flat, how=self.how, wide=wide, missing=missing)

        cells = self._folded(own, len(block.rows), read)
        for values in given:
            if values.kind == NULLS:
                cells = self._without_other_lengths(cells, values)
            elif not self._takes(values.kind):
                wrong = _at(values.rows, len(block.rows))
                reason = f"it holds {values.kind} instead of {self.kind}"
                cells = with_fault(cells, wrong, reason)
        return cells

    def _takes(self, kind: str) -> bool:
        both_numbers = kind in (WHOLE_NUMBER, WIDE_NUMBER) and self.kind in (WHOLE_NUMBER, NUMBER)
        return kind == self.kind or both_numbers

    def _without_other_lengths(self, cells: Cells, nulls: Values) -> Cells:
        """Refuse lists of nulls that cannot be missing values.

        These are the lists of another length than the column's or, if its length varies, all lists of nulls in an
        int or bool column.
        """
        if self.column.is_ragged:
            missing = _at(nulls.rows, len(cells.bad)) & (self.how in ("int", "bool"))
            return with_fault(cells, missing, LIST_NUMBER_MISSING)
        length = self.column.length or 1
        other = nulls.counts != length if self.kind else np.zeros(len(nulls.rows), np.bool_)
        reason = f"it holds a list of nulls whose length is not {length}"
        return with_fault(cells, _at(nulls.rows[other], len(cells.bad)), reason)

    def _folded(self, own: Values, rows: int, read: Callable[[pa.Array], Cells]) -> Cells:
        length = self.column.length
        if length is not None:
            # A list of whole numbers cannot be missing, because its column has no missing value.
            filled = 0 if self.how in ("int", "bool") else length
            cells = list_cells(_lists(own, rows, filled=filled), length=length, read=read)
            single = _at(own.rows[own.single], rows) & self.column.is_ragged
            return with_fault(cells, single, "it holds a single value instead of a list")
        single = own.counts == 1
        kept = own if single.all() else own.chosen(single, kind=own.kind)
        cells = read(_spread(kept.flat, kept.rows, rows))
        for count in np.unique(own.counts[~single]).tolist():
            wrong = _at(own.rows[own.counts == count], rows)
            cells = with_fault(cells, wrong, f"it holds {count} values instead of one")
        return cells


@dataclass(slots=True)
class LearnedColumn:
    """What is known so far about one column, while the records are scanned."""

    name: str
    """The column's name in the records."""

    override: Override | NumberText | None
    """The column's setting in `data.types`; None without one."""

    varies: bool = False
    """Whether `data.columns.lists` names the column."""

    kinds: dict[str, ColumnTyping] = field(default_factory=dict)
    """Kind -> what is known about the values of this kind."""

    lengths: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(Kind, number of values) -> number of records; records without a value are not counted."""

    first: dict[tuple[str, int], str] = field(default_factory=dict)
    """(Kind, number of values) -> the first record with them, for messages."""

    single: int = 0
    """Number of records that are known to hold a single value, not a list of one value."""

    def add(self, block: ParsedBlock, missing: pa.Array) -> None:
        """Add the column's values in one block."""
        for values in block.columns.get(self.name, ()):
            if values.kind == NULLS:
                continue
            kind = NUMBER if values.kind in (WHOLE_NUMBER, WIDE_NUMBER) else values.kind
            self.single += int(values.single.sum())
            counts, first, records = np.unique(values.counts, return_index=True, return_counts=True)
            for count, at, number in zip(
                counts.tolist(), first.tolist(), records.tolist(), strict=True
            ):
                self.lengths[kind, count] += number
                row = block.rows[values.rows[at]]
                self.first.setdefault((kind, count), f"{block.file.name} record {row}")
            if values.kind in FAMILIES:
                typed = self.kinds.setdefault(
                    kind, ColumnTyping(name=self.name, override=self.override)
                )
                typed.families.setdefault(FAMILIES[values.kind], block.file.name)
                is_text = values.kind == WIDE_NUMBER
                typed.add_values(
                    values.flat.cast(pa.float64()) if is_text else values.flat, missing
                )
                if values.kind == TEXT:
                    typed.tally.keep(clean(values.flat).values)

    def assumed(self, settled: NamedColumn) -> Assumption | None:
        """Return the assumption about the column of which the user must be warned; None if there is none."""
        if settled.column.is_ragged:
            counts: Counter[int] = Counter()
            for (_, count), records in self.lengths.items():
                counts[count] += records
            return None if self.varies else assumed_of_lists(settled.column, counts)
        typed = self.kinds.get(TEXT)
        if typed is None or self.override is not None:
            return None
        return assumed_of(self.name, settled.how, typed.tally)

    def settled(self, *, rows: int, is_label: bool, max_bad: int) -> NamedColumn:
        """Decide how the column is read, after all blocks were added.

        Args:
            rows: Total number of records.
            is_label: Whether every record must have a value in the column.
            max_bad: The setting `data.max_bad_rows`.

        Raises:
            DataError: no column can hold the values, or too many records deviate from the others.
        """
        (kind, length), records = max(
            self.lengths.items(), key=lambda item: item[1], default=((NOTHING, 1), 0)
        )
        present = self.lengths.total()
        allowed = allowed_deviations(present, max_bad=max_bad)
        if self.varies or present - records > allowed:
            kind, length = self._listed_kind(allowed), VARYING
        if kind not in FAMILIES:
            raise self._unlike()
        typed = self.kinds.get(kind) or ColumnTyping(
            name=self.name, override=self.override, families={"null": ""}
        )
        if kind == IMAGE and length > 1:
            raise self._unlike()
        if kind == NUMBER and typed.family == "int":
            kind = WHOLE_NUMBER
        typed.tally.missing += rows - present
        typed.varies = length == VARYING
        if length != 1:
            typed.forms["vectors"], typed.lengths = "", Counter({length: records})
        how = typed.reading(is_label=is_label)
        column = typed.column(how, max_bad=max_bad)
        return NamedColumn(column=column, how=how, kind=kind, override=self.override)

    def _listed_kind(self, allowed: float) -> str:
        """Return the kind of value that lists of varying length hold.

        Raises:
            DataError: the records hold several kinds, single values, or lists of images.
            ConfigError: `data.columns.lists` names a column of single values.
        """
        kinds: Counter[str] = Counter()
        for (kind, _), records in self.lengths.items():
            kinds[kind] += records
        kind, records = max(kinds.items(), key=lambda item: item[1], default=(NOTHING, 0))
        if self.varies and self.single > allowed:
            raise no_lists(self.name)
        if self.single > allowed or kinds.total() - records > allowed or kind == IMAGE:
            raise self._unlike()
        return kind

    def _unlike(self) -> UnusableColumn:
        parts = [
            f"{f'{count} values, each ' if count > 1 else ''}{kind}, in {records:,} "
            f"record{'s' if records > 1 else ''} (first {self.first[kind, count]})"
            for (kind, count), records in self.lengths.most_common(_SHOWN)
        ]
        more = len(self.lengths) - len(parts)
        rest = f"; and {more} other combinations of kind and number of values" if more else ""
        return UnusableColumn(
            self.name,
            f"column {self.name!r} must hold the same kind of value in every record: a number, a string or "
            "an encoded image, or a list of numbers or strings",
            got=Plain("; ".join(parts) + rest),
            fix=f"Set {leaving_out(self.name)}, or cut, pad or convert the values when the records are "
            "written.",
        )


_SHOWN = 3
"""Maximum number of kinds and lengths that an error lists, the most common first."""


def _no_values(kind: pa.DataType) -> Values:
    none = np.zeros(0, np.int64)
    return Values(
        kind=NOTHING, rows=none, counts=none, flat=pa.nulls(0, kind), single=none.astype(np.bool_)
    )


def _at(rows: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
    mask = np.zeros(count, np.bool_)
    mask[rows] = True
    return mask


def _spread(flat: pa.Array, rows: NDArray[np.int64], count: int) -> pa.Array:
    """Return [count] values: `flat` at its rows, and null in the other rows."""
    if len(rows) == count:
        return flat
    places = np.full(count, -1)
    places[rows] = np.arange(len(rows))
    return flat.take(pa.array(places, mask=places < 0))


def _lists(values: Values, rows: int, *, filled: int) -> pa.Array:
    """Return a list for each record: [rows].

    Args:
        values: The values of the records that have a value.
        rows: Total number of records.
        filled: Number of nulls in the list of a record without a value; 0: its list is null.
    """
    counts = np.zeros(rows, np.int64)
    counts[values.rows] = values.counts
    absent, flat = counts == 0, values.flat
    if filled and absent.any():
        counts[absent] = filled
        given = np.repeat(~absent, counts)
        flat = _spread(flat, np.flatnonzero(given), len(given))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    no_list = np.append(counts == 0, np.False_)
    return pa.ListArray.from_arrays(pa.array(offsets, mask=no_list), flat)
