"""Lists of numbers or strings: vectors, whose length is the same in every record, and lists of varying length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from stoker.data.columns import PADDING, VARYING, Column
from stoker.data.sources.columns.text import NUMBER_SHARE
from stoker.data.sources.config import as_lists
from stoker.data.sources.records import Assumption, Cells, with_fault

VECTOR_MISSING = "the vector is missing"

NUMBER_MISSING = "a whole number of the vector is missing"

LIST_NUMBER_MISSING = "a whole number of the list is missing"

MAX_VALUES = 1 << 16
"""Maximum length of a list of varying length. The lists of a batch are padded to the longest, so a batch of 1,024
rows with such a list takes 512 MiB."""


MAX_ODD_SHARE = 0.1
"""Maximum share of a column's lists that may be bad records because of their length, whatever `data.max_bad_rows`
is. If more lists have a different length, they are lists of varying length."""


def lengths_of(lists: pa.Array) -> NDArray[np.int64]:
    """Return the number of values in each list, -1 for a missing list: [rows].

    Args:
        lists: [rows] of type list, large_list, fixed_size_list, or null.
    """
    if pa.types.is_null(lists.type):
        return np.full(len(lists), -1)
    lengths = pc.fill_null(pc.list_value_length(lists), -1)
    return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)


def lists_of(lengths: NDArray[np.int64], flat: pa.Array) -> pa.ListArray:
    """Return lists of these lengths, from their concatenated values: [rows]."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), flat)


def common_length(counts: Mapping[int, int], *, max_bad: int) -> int:
    """Return the length that at least 99 % of a column's lists have, so that the column holds vectors.

    Args:
        counts: Length -> number of records; records without a list are not counted.
        max_bad: The setting `data.max_bad_rows`: up to this number, and up to 10 %, of the lists may have a
            different length, even if they are more than 1 %.

    Returns:
        The length; `VARYING` if no length is common enough, or the common length is 0.
    """
    total = sum(counts.values())
    length, records = max(counts.items(), key=lambda item: item[1], default=(0, 0))
    max_bad = min(max_bad, int(MAX_ODD_SHARE * total))
    is_rule = total - records <= allowed_deviations(total, max_bad=max_bad)
    return length if is_rule else VARYING


def allowed_deviations(present: int, *, max_bad: int) -> float:
    """Return the maximum number of records that may deviate from a column's type; with more, it gets another type."""
    return max(max_bad, (1 - NUMBER_SHARE) * present)


def assumed_of_lists(column: Column, counts: Mapping[int, int]) -> Assumption | None:
    """Return the assumption that a column holds lists of varying length; None if it need not be assumed.

    Args:
        column: The column.
        counts: Length -> number of records, as for `common_length`.
    """
    if not column.is_ragged or len(counts) < 2:
        return None
    length, records = max(counts.items(), key=lambda item: item[1])
    return Assumption(
        column=column.name,
        text=f"column {column.name!r} is read as lists of varying length: {min(counts)} to "
        f"{max(counts)} values, most often {length} (in {records:,} of {sum(counts.values()):,} "
        f"records). Set {as_lists(column.name)} to confirm this{_as_vectors(counts)}",
    )


def _as_vectors(counts: Mapping[int, int]) -> str:
    """Return the end of the message, with the setting to read vectors; "" if too many lists have another length."""
    total = sum(counts.values())
    length, records = max(counts.items(), key=lambda item: item[1])
    odd = total - records
    if length == 0 or odd > MAX_ODD_SHARE * total:
        return ""
    return f", or data.max_bad_rows: {odd} to leave out {odd:,} records and read vectors of length {length}"


def list_cells(lists: pa.Array, *, length: int, read: Callable[[pa.Array], Cells]) -> Cells:
    """Read a column of lists: `varying_cells` if `length` is `VARYING`, else `vector_cells`."""
    if length == VARYING:
        return varying_cells(lists, read=read)
    return vector_cells(lists, length=length, read=read)


def varying_cells(lists: pa.Array, *, read: Callable[[pa.Array], Cells]) -> Cells:
    """Read a column of lists of varying length.

    Args:
        lists: [rows] lists of a type that `lengths_of` accepts.
        read: Function that reads the concatenated values of many lists, as a column of single values.

    Returns:
        [rows] lists of the results of `read`. No list is null: a missing list becomes an empty list. Missing
        values at the end of a list are removed. A record is bad if its list holds a bad value or more than
        `MAX_VALUES` values. A list of whole numbers is also bad if a value is missing, or equals `PADDING`,
        which means "missing".
    """
    lengths = np.maximum(lengths_of(lists), 0)
    kept = np.where(lengths <= MAX_VALUES, lengths, 0)
    items = _without_gaps(read(_values(lists, kept == lengths)), LIST_NUMBER_MISSING)
    if pa.types.is_integer(items.values.type):
        lowest = pc.fill_null(pc.equal(items.values, PADDING["int64"]), False)
        reason = f"{PADDING['int64']} means a missing value"
        items = with_fault(items, lowest.to_numpy(zero_copy_only=False), reason)
    at_fault = np.flatnonzero(items.bad)
    owners, first = np.unique(np.repeat(np.arange(len(kept)), kept)[at_fault], return_index=True)
    bad, shown = np.zeros(len(kept), np.int16), np.full(len(kept), -1)
    bad[owners], shown[owners] = items.bad[at_fault[first]], at_fault[first]
    column = Cells(
        values=_without_trailing_gaps(items.values, kept),
        bad=bad,
        reasons=items.reasons,
        raw=items.raw.take(pa.array(shown, mask=shown < 0)),
    )
    reason = f"a list of more than {MAX_VALUES:,} values; cut it when the records are written"
    return with_fault(column, lengths > MAX_VALUES, reason)


def vector_cells(lists: pa.Array, *, length: int, read: Callable[[pa.Array], Cells]) -> Cells:
    """Read a column of lists as vectors.

    Args:
        lists: [rows] lists of a type that `lengths_of` accepts.
        length: Number of values in each vector.
        read: Function that reads the concatenated values of many lists, as a column of single values.

    Returns:
        [rows] fixed-size lists of the results of `read`; strings have no nulls. A record is bad if its list is
        missing, has a different length or holds a bad value, or if a whole number in it is missing.
    """
    lengths = lengths_of(lists)
    fits = lengths == length
    column = _folded(_without_gaps(read(_values(lists, fits)), NUMBER_MISSING), fits, length)
    column = with_fault(column, lengths < 0, VECTOR_MISSING)
    for wrong in np.unique(lengths[(lengths >= 0) & ~fits]).tolist():
        reason = f"a vector of length {wrong} instead of {length}"
        column = with_fault(column, lengths == wrong, reason)
    return column


def _without_trailing_gaps(flat: pa.Array, lengths: NDArray[np.int64]) -> pa.ListArray:
    owners = np.repeat(np.arange(len(lengths)), lengths)
    places = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    missing = pc.equal(flat, "") if pa.types.is_string(flat.type) else pc.is_null(flat)
    present = ~missing.to_numpy(zero_copy_only=False)
    ends = np.zeros(len(lengths), np.int64)
    ends[owners[present]] = places[present] + 1  # NumPy keeps the last assignment to an index
    return lists_of(ends, flat.filter(pa.array(places < ends[owners])))


def _values(lists: pa.Array, chosen: NDArray[np.bool_]) -> pa.Array:
    if pa.types.is_null(lists.type):
        return lists.slice(0, 0)
    # `flatten` respects the offset of a slice, `values` does not.
    return (lists if chosen.all() else lists.filter(pa.array(chosen))).flatten()


def _without_gaps(items: Cells, reason: str) -> Cells:
    kind = items.values.type
    if pa.types.is_integer(kind):
        missing = items.values.is_null().to_numpy(zero_copy_only=False)
        return with_fault(items, missing, reason)
    is_text = pa.types.is_string(kind)
    return replace(items, values=pc.fill_null(items.values, "")) if is_text else items


def _folded(items: Cells, fits: NDArray[np.bool_], length: int) -> Cells:
    """Convert cells of values to cells of their lists; a list of a different length is null."""
    at_fault = items.bad.reshape(-1, length) != 0
    # The error shows the first bad value of a list; a list without a bad value has its first value here.
    shown = at_fault.argmax(axis=1) + np.arange(len(at_fault)) * length
    bad = np.zeros(len(fits), np.int16)
    bad[fits] = items.bad[shown]
    places = pa.array(np.cumsum(fits) - 1, mask=~fits)
    return Cells(
        values=pa.FixedSizeListArray.from_arrays(items.values, length).take(places),
        bad=bad,
        reasons=items.reasons,
        raw=items.raw.take(pa.array(shown)).take(places),
    )
