"""The result of every source: blocks of typed records, and the records that could not be read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from stoker.cluster.limits import usable_cores
from stoker.data.columns import Column

Reading = Literal["int", "bool", "whole", "bool_with_gaps", "float", "string", "image"]
"""How a column's values are read; `whole` is an integer column with gaps."""

Progress = Callable[[int, int | None], None]
"""Called with the number of records done and the total, None while it is not known."""

WORKERS = max(2, usable_cores())
"""Number of threads that read, convert and check: all three release the GIL."""

SHOWN_FAULTS = 5
"""Bad records that an error lists: enough to show a pattern, few enough for one line."""

LABEL_MISSING = "the label is missing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A record that cannot be read, and why."""

    file: str
    """Path relative to the source."""

    row: int
    """1-based record number in that file, the header not counted; 1 for an image file."""

    column: str
    """The column with the error; "" if it is the whole record."""

    reason: str
    """What is wrong with it."""

    retype: bool = False
    """True if reading the column as a string would fix it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowNumbers:
    """Which records of a file were read together."""

    file: str
    """Path relative to the source."""

    rows: NDArray[np.int64]
    """[rows] the record numbers of those that could be split into columns."""

    broken: Sequence[Fault] = ()
    """The other records; `broken_count` may be larger."""

    broken_count: int = 0
    """Number of the other records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Some records of one file, in order."""

    table: pa.Table
    """The good records, with each column in the type of a shard."""

    faults: tuple[Fault, ...]
    """The bad records; at most `data.max_bad_rows` and a few to show."""

    bad: int
    """Number of bad records."""

    content: NDArray[np.uint64] | None = None
    """[valid records] the result of `Content` for each, if it was requested."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumption:
    """An assumption about how a column is read."""

    column: str
    """The column."""

    text: str
    """The assumption and how to change it, one line."""

    number: str = ""
    """The example for `data.types` that would read the column as numbers, if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """The result of one pass over the whole source."""

    columns: tuple[Column, ...]
    """In the source's order."""

    readings: tuple[Reading, ...]
    """How each is read."""

    rows: int
    """Number of records with the right number of fields."""

    image: tuple[int, int, int] | None
    """Height, width and channels of the images; None for tables."""

    kinds: tuple[str, ...] = ()
    """The kind of value in each column, if the records name it."""

    assumptions: tuple[Assumption, ...] = ()
    """Assumptions about how columns are read that the user should know."""


Content = Callable[[pa.Table, Sequence[Column]], NDArray[np.uint64]]
"""Computes [rows] a number for each row of a table, in the worker that reads it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """One column of a block: its values, and which of them are invalid."""

    values: pa.Array
    """[rows] of the stored type; null where missing or bad."""

    bad: NDArray[np.int16]
    """[rows] 0 where good, else 1 + the index into `reasons`."""

    reasons: tuple[str, ...]
    """Reasons, each with `{}` for the value."""

    raw: pa.Array
    """[rows] the original values, to be shown."""

    retype: bool = False
    """True if reading the column as a string would fix it."""


def silent(done: int, total: int | None) -> None:
    """The `Progress` that does nothing."""


def good_cells(values: pa.Array, raw: pa.Array) -> Cells:
    """Return a column without faults."""
    return Cells(values=values, bad=np.zeros(len(raw), np.int16), reasons=(), raw=raw)


def with_fault(column: Cells, mask: NDArray[np.bool_], reason: str) -> Cells:
    """The column, with some of its good values marked bad."""
    if not mask.any():
        return column
    code = len(column.reasons) + 1
    bad = np.where(mask & (column.bad == 0), np.int16(code), column.bad)
    return replace(column, bad=bad, reasons=(*column.reasons, reason))


def joined(first: Cells, second: Cells, *, retype: bool) -> Cells:
    """Combine two reading steps: the values of the second, the faults of both in order."""
    shift = np.int16(len(first.reasons))
    later = np.where(second.bad > 0, second.bad + shift, np.int16(0))
    return Cells(
        values=second.values,
        bad=np.where(first.bad > 0, first.bad, later).astype(np.int16),
        reasons=(*first.reasons, *second.reasons),
        raw=first.raw,
        retype=retype,
    )


def require_label(column: Cells) -> Cells:
    """Mark records without a label as bad: a model can neither learn from them nor be evaluated on them."""
    missing = column.values.is_null()
    if pa.types.is_string(column.values.type):
        missing = pc.or_(missing, pc.equal(pc.fill_null(column.values, ""), ""))
    return with_fault(column, missing.to_numpy(zero_copy_only=False), LABEL_MISSING)


def block_of(
    columns: Sequence[Column],
    cells: Sequence[Cells],
    numbers: RowNumbers,
    *,
    max_bad_rows: int,
    content: Content | None,
) -> Block:
    """Return the records that are good in every column, and list the others.

    Args:
        columns: The type of each column.
        cells: Each column's cells, in the same order.
        numbers: The positions of the records.
        max_bad_rows: `data.max_bad_rows`; a few more faults are listed.
        content: Additional value to compute for the good records.
    """
    first_bad = np.full(len(numbers.rows), -1)
    for index in range(len(cells) - 1, -1, -1):
        first_bad[cells[index].bad != 0] = index
    bad = np.flatnonzero(first_bad >= 0)
    limit = max_bad_rows + SHOWN_FAULTS
    found = [
        _fault(columns[first_bad[at]], cells[first_bad[at]], int(at), numbers) for at in bad[:limit]
    ]
    listed = sorted([*numbers.broken, *found], key=lambda fault: fault.row)[:limit]
    table = _stored(columns, cells, first_bad < 0 if len(bad) else None)
    return Block(
        table=table,
        faults=tuple(listed),
        bad=numbers.broken_count + len(bad),
        content=None if content is None else content(table, columns),
    )


def _stored(
    columns: Sequence[Column], cells: Sequence[Cells], good: NDArray[np.bool_] | None
) -> pa.Table:
    mask = None if good is None else pa.array(good)
    arrays = []
    for column, each in zip(columns, cells, strict=True):
        values = each.values if mask is None else each.values.filter(mask)
        if column.dtype == "string" and column.length is None:
            values = pc.fill_null(values, "")
        arrays.append(values.cast(column.arrow_type))
    return pa.Table.from_arrays(arrays, schema=shard_schema(columns))


def shard_schema(columns: Sequence[Column]) -> pa.Schema:
    """The type of these columns in a shard."""
    return pa.schema([pa.field(c.name, c.arrow_type) for c in columns])


def _fault(column: Column, cells: Cells, at: int, numbers: RowNumbers) -> Fault:
    reason = cells.reasons[cells.bad[at] - 1]
    return Fault(
        file=numbers.file,
        row=int(numbers.rows[at]),
        column=column.name,
        reason=reason.replace("{}", shown(_value(cells.raw, at))),
        retype=cells.retype and reason != LABEL_MISSING,
    )


def _value(raw: pa.Array, at: int) -> Any:
    """Return one value; text as its bytes, because it may not be UTF-8."""
    if pa.types.is_string(raw.type) or pa.types.is_large_string(raw.type):
        raw = raw.slice(at, 1).cast(pa.large_binary())
        at = 0
    return raw[at].as_py()


_SHOWN_CHARS = 40
"""Longest part of a bad value that an error shows."""


def shown(value: Any) -> str:
    """A bad value as one short text, whatever bytes it contains."""
    text = repr(value) if isinstance(value, str | bytes) else str(value)
    if isinstance(value, float) and abs(value) == sys.float_info.max:
        # Every JSON number beyond the range of a float is read as this value.
        text = f"{'-' if value < 0 else ''}1.8e308 or more"
    if isinstance(value, bytes):
        try:
            text = repr(value.decode())
        except UnicodeDecodeError:
            text = text.removeprefix("b")
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
