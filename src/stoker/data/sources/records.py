"""The result of every source: blocks of typed records, and the faults of records that could not be read."""

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
"""How a column's values are read; `whole` is a column of whole numbers with missing values."""

Progress = Callable[[int, int | None], None]
"""Called with the number of records done, and the total number, which is None until it is known."""

WORKERS = max(2, usable_cores())
"""Number of threads that read, convert and check records; all of this releases the GIL."""

SHOWN_FAULTS = 5
"""Maximum number of bad records that an error lists: enough to show a pattern, few enough for one line."""

LABEL_MISSING = "the label is missing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A record that cannot be read, and the reason."""

    file: str
    """Path of the file, relative to the source."""

    row: int
    """Number of the record in the file, from 1, without the header; 1 for an image file."""

    column: str
    """The column with the error; "" if the whole record is bad."""

    reason: str
    """What is wrong with the value or record."""

    retype: bool = False
    """Whether the record would be good if the column were read as strings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowNumbers:
    """The numbers of the records of a block in their file."""

    file: str
    """Path of the file, relative to the source."""

    rows: NDArray[np.int64]
    """[rows] numbers of the records that could be split into columns."""

    broken: Sequence[Fault] = ()
    """Faults of the records that could not be split into columns; only the first ones are listed."""

    broken_count: int = 0
    """Number of all records that could not be split into columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Some records of one file, in order."""

    table: pa.Table
    """The good records; each column has the type that a shard stores."""

    faults: tuple[Fault, ...]
    """Faults of the first bad records, at most `data.max_bad_rows` + `SHOWN_FAULTS`."""

    bad: int
    """Number of all bad records."""

    content: NDArray[np.uint64] | None = None
    """[good records] the result of `Content` for each record; None if it was not requested."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumption:
    """An assumption about how a column is read; the user is warned about it."""

    column: str
    """Name of the column."""

    text: str
    """The assumption and how to change it, in one line."""

    number: str = ""
    """Example for `data.types` with which the column would be read as numbers; "" if it cannot be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """The result of one pass over the whole source."""

    columns: tuple[Column, ...]
    """The columns, in the source's order."""

    readings: tuple[Reading, ...]
    """How each column is read."""

    rows: int
    """Number of records with the right number of fields."""

    image: tuple[int, int, int] | None
    """Height, width and channels of the images; None for tables."""

    kinds: tuple[str, ...] = ()
    """The kind of value in each column, if the values in the records have kinds (TFRecord, JSON Lines)."""

    assumptions: tuple[Assumption, ...] = ()
    """Assumptions about how columns are read; the user is warned about them."""


Content = Callable[[pa.Table, Sequence[Column]], NDArray[np.uint64]]
"""Function that computes a number for each row of a table, [rows]; it runs in the worker that reads the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """One column of a block: its values, and which of them are invalid."""

    values: pa.Array
    """[rows] values in the stored type; null if missing or bad."""

    bad: NDArray[np.int16]
    """[rows] 0 if the value is good; else 1 + index of the reason in `reasons`."""

    reasons: tuple[str, ...]
    """Reasons why values are bad; `{}` in a reason stands for the value."""

    raw: pa.Array
    """[rows] the original values, for messages."""

    retype: bool = False
    """Whether bad values would be good if the column were read as strings."""


def silent(done: int, total: int | None) -> None:
    """Do nothing: the default for `progress`."""


def good_cells(values: pa.Array, raw: pa.Array) -> Cells:
    """Return a column without faults."""
    return Cells(values=values, bad=np.zeros(len(raw), np.int16), reasons=(), raw=raw)


def with_fault(column: Cells, mask: NDArray[np.bool_], reason: str) -> Cells:
    """Return the column with further values marked as bad; values that were bad keep their reason."""
    if not mask.any():
        return column
    code = len(column.reasons) + 1
    bad = np.where(mask & (column.bad == 0), np.int16(code), column.bad)
    return replace(column, bad=bad, reasons=(*column.reasons, reason))


def joined(first: Cells, second: Cells, *, retype: bool) -> Cells:
    """Combine two steps of reading: values of the second step, faults of both; the first fault of a value counts."""
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
    """Mark missing labels as bad: a model can neither learn from such records nor be evaluated on them."""
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
    """Return a block of the records that are good in every column, with the faults of the other records.

    Args:
        columns: The type of each column.
        cells: The cells of each column, in the same order.
        numbers: The numbers of the records in their file.
        max_bad_rows: The setting `data.max_bad_rows`; it limits the number of listed faults.
        content: Function for an additional value of each good record; None: not computed.
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
    """Return the Arrow schema of these columns in a shard."""
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
    """Return one value; a string is returned as bytes, because it may not be UTF-8."""
    if pa.types.is_string(raw.type) or pa.types.is_large_string(raw.type):
        raw = raw.slice(at, 1).cast(pa.large_binary())
        at = 0
    return raw[at].as_py()


_SHOWN_CHARS = 40
"""Maximum length of the part of a bad value that an error shows."""


def shown(value: Any) -> str:
    """Return a bad value as a short text, whatever bytes it contains."""
    text = repr(value) if isinstance(value, str | bytes) else str(value)
    if isinstance(value, float) and abs(value) == sys.float_info.max:
        # A JSON number beyond the range of float64 is read as this value.
        text = f"{'-' if value < 0 else ''}1.8e308 or more"
    if isinstance(value, bytes):
        try:
            text = repr(value.decode())
        except UnicodeDecodeError:
            text = text.removeprefix("b")
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
