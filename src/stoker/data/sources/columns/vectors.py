"""Lists of numbers or strings: vectors, which have one length in every record, and lists of varying length."""

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
"""Longest list of a column of varying lengths: a batch of 1,024 rows with such a list takes 512 MiB,
as its other lists are padded to it."""


MAX_ODD_SHARE = 0.1
"""Largest share of the lists that `data.max_bad_rows` may leave out because of their length. If more differ,
their lengths vary."""


def lengths_of(lists: pa.Array) -> NDArray[np.int64]:
    """[rows] number of values in each list; -1 for a missing list.

    Args:
        lists: [rows] of type list, large_list, fixed_size_list, or null.
    """
    if pa.types.is_null(lists.type):
        return np.full(len(lists), -1)
    lengths = pc.fill_null(pc.list_value_length(lists), -1)
    return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)


def lists_of(lengths: NDArray[np.int64], flat: pa.Array) -> pa.ListArray:
    """[rows] lists of these lengths, from concatenated values."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), flat)


def common_length(counts: Mapping[int, int], *, most_bad: int) -> int:
    """The length that makes a column of lists a column of vectors: that of at least 99 % of them.

    Args:
        counts: Length -> number of records, without records that have no list.
        most_bad: `data.max_bad_rows`: this many may have another length, if they are at most 10 %.

    Returns:
        `VARYING` if no length is common enough, or it is 0.
    """
    total = sum(counts.values())
    length, records = max(counts.items(), key=lambda item: item[1], default=(0, 0))
    most_bad = min(most_bad, int(MAX_ODD_SHARE * total))
    is_rule = total - records <= allowed_deviations(total, most_bad=most_bad)
    return length if is_rule else VARYING


def allowed_deviations(present: int, *, most_bad: int) -> float:
    """Most records that may deviate and count as bad. If more deviate, the column is read differently."""
    return max(most_bad, (1 - NUMBER_SHARE) * present)


def assumed_of_lists(column: Column, counts: Mapping[int, int]) -> Assumption | None:
    """Return a message that a column is read as lists because their lengths differ, with the setting for it.

    Args:
        column: The column.
        counts: As for `common_length`.
    """
    if not column.is_ragged or len(counts) < 2:
        return None
    length, records = max(counts.items(), key=lambda item: item[1])
    return Assumption(
        column=column.name,
        text=f"column {column.name!r} is read as lists of varying length: {min(counts)} to "
        f"{max(counts)} values, most often {length} (in {records:,} of {sum(counts.values()):,} "
        f"records). {as_lists(column.name)} confirms that{_as_vectors(counts)}",
    )


def _as_vectors(counts: Mapping[int, int]) -> str:
    """The alternative reading, if few lists have another length."""
    total = sum(counts.values())
    length, records = max(counts.items(), key=lambda item: item[1])
    odd = total - records
    if length == 0 or odd > MAX_ODD_SHARE * total:
        return ""
    return f"; data.max_bad_rows: {odd} makes it a vector of length {length} without these records"


def list_cells(lists: pa.Array, *, length: int, read: Callable[[pa.Array], Cells]) -> Cells:
    """Read a column of lists: `varying_cells` if `length` is `VARYING`, else `vector_cells`."""
    if length == VARYING:
        return varying_cells(lists, read=read)
    return vector_cells(lists, length=length, read=read)


def varying_cells(lists: pa.Array, *, read: Callable[[pa.Array], Cells]) -> Cells:
    """Lists of any length: a record is bad if a value in its list is.

    Args:
        lists: [rows] as `lengths_of` takes them.
        read: Reads the concatenated values of many lists, like those of a single-valued column.

    Returns:
        [rows] lists of the results of `read`, none of them null: a missing list is an empty one, and a
        list ends with its last value that is not missing. Bad are a list with a bad value or more
        than `MAX_VALUES`, and one of whole numbers in which one is missing or has the value for that
        (`PADDING`).
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
    reason = f"a list of more than {MAX_VALUES:,} values; cut it where the records are written"
    return with_fault(column, lengths > MAX_VALUES, reason)


def vector_cells(lists: pa.Array, *, length: int, read: Callable[[pa.Array], Cells]) -> Cells:
    """Converts lists to vectors: a record is bad if its list, or any value in it, is.

    Args:
        lists: [rows] as `lengths_of` takes them.
        length: Values in each.
        read: Reads the concatenated values of many lists, like those of a single-valued column.

    Returns:
        [rows] fixed-size lists of the results of `read`; strings without nulls. Bad are a missing
        list, one of another length, one that holds a bad value, and one of whole numbers in which
        one is missing.
    """
    lengths = lengths_of(lists)
    fits = lengths == length
    column = _folded(_without_gaps(read(_values(lists, fits)), NUMBER_MISSING), fits, length)
    column = with_fault(column, lengths < 0, VECTOR_MISSING)
    for wrong in np.unique(lengths[(lengths >= 0) & ~fits]).tolist():
        reason = f"a vector of length {wrong} where length {length} is the rule"
        column = with_fault(column, lengths == wrong, reason)
    return column


def _without_trailing_gaps(flat: pa.Array, lengths: NDArray[np.int64]) -> pa.ListArray:
    owners = np.repeat(np.arange(len(lengths)), lengths)
    places = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    missing = pc.equal(flat, "") if pa.types.is_string(flat.type) else pc.is_null(flat)
    present = ~missing.to_numpy(zero_copy_only=False)
    ends = np.zeros(len(lengths), np.int64)
    ends[owners[present]] = places[present] + 1  # of several the last one counts
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
    """Converts cells of values to cells of their lists; null if a list has another length."""
    at_fault = items.bad.reshape(-1, length) != 0
    # The first bad value of each list, which the error shows; else its first value.
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
