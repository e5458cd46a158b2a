"""What every source returns: blocks of typed records, and the records that could not be read."""

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
"""Threads that read, convert and check: all three let go of the interpreter's lock."""

SHOWN_FAULTS = 5
"""Bad records that an error lists: enough to see a pattern, few enough for one line."""

LABEL_MISSING = "the label is missing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A record that cannot be read, and why."""

    file: str
    """Relative to the source."""

    row: int
    """1-based record number in that file, the header not counted; 1 for an image file."""

    column: str
    """The column at fault, "" where the whole record is."""

    reason: str
    """What is wrong with it."""

    retype: bool = False
    """True if reading the column as a string would fix it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowNumbers:
    """Which records of a file were read together."""

    file: str
    """Relative to the source."""

    rows: NDArray[np.int64]
    """[rows] the record numbers of those that could be split into columns."""

    broken: Sequence[Fault] = ()
    """The others; `broken_count` may be larger."""

    broken_count: int = 0
    """Number of the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Some records of one file, in order."""

    table: pa.Table
    """The good ones, each column in the type that a shard stores."""

    faults: tuple[Fault, ...]
    """The bad ones; no more than `data.max_bad_rows` and a few to show."""

    bad: int
    """How many were bad."""

    content: NDArray[np.uint64] | None = None
    """[valid ones] what `Content` computed of each, if it was requested."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumption:
    """An assumption about how a column is read."""

    column: str
    """The column."""

    text: str
    """What was assumed, and how to say otherwise; a line."""

    number: str = ""
    """The example for `data.types` that would read the column as numbers, where one would."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What one pass over the whole source finds out."""

    columns: tuple[Column, ...]
    """In the source's order."""

    readings: tuple[Reading, ...]
    """How each is read."""

    rows: int
    """Records that have the right number of fields."""

    image: tuple[int, int, int] | None
    """Height, width and channels to which images are brought; None for tables."""

    kinds: tuple[str, ...] = ()
    """The kind of value that each column holds, where the records themselves name it."""

    assumptions: tuple[Assumption, ...] = ()
    """Assumptions about how columns are read that the user should know."""


Content = Callable[[pa.Table, Sequence[Column]], NDArray[np.uint64]]
"""Computes [rows] a number for each row of a table, in the worker that reads it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """One column of a block: its values, and which cannot be used."""

    values: pa.Array
    """[rows] of the stored type; null where missing or bad."""

    bad: NDArray[np.int16]
    """[rows] 0 where good, else 1 + the index into `reasons`."""

    reasons: tuple[str, ...]
    """Each with `{}` for the value."""

    raw: pa.Array
    """[rows] what the source held, to be shown."""

    retype: bool = False
    """True if reading the column as a string would fix it."""


def silent(done: int, total: int | None) -> None:
    """The `Progress` that shows nothing."""


def good_cells(values: pa.Array, raw: pa.Array) -> Cells:
    """Return a column without faults."""
    return Cells(values=values, bad=np.zeros(len(raw), np.int16), reasons=(), raw=raw)


def with_fault(column: Cells, mask: NDArray[np.bool_], reason: str) -> Cells:
    """The column with some of its good values made bad."""
    if not mask.any():
        return column
    code = len(column.reasons) + 1
    bad = np.where(mask & (column.bad == 0), np.int16(code), column.bad)
    return replace(column, bad=bad, reasons=(*column.reasons, reason))


def joined(first: Cells, second: Cells, *, retype: bool) -> Cells:
    """Return a column read in two steps: the values of the second, the faults of both in order."""
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
        numbers: Where the records are.
        max_bad_rows: `data.max_bad_rows`; a few more faults are listed.
        content: What to compute of the good records in addition.
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
    """How a shard stores these columns."""
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
    """A bad value as one short text, whatever bytes it holds."""
    text = repr(value) if isinstance(value, str | bytes) else str(value)
    if isinstance(value, float) and abs(value) == sys.float_info.max:
        # Every JSON number beyond the range of a float is read as this one.
        text = f"{'-' if value < 0 else ''}1.8e308 or more"
    if isinstance(value, bytes):
        try:
            text = repr(value.decode())
        except UnicodeDecodeError:
            text = text.removeprefix("b")
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
