"""Vectors: lists of numbers or strings that have one length in every record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from stoker.core.errors import Plain
from stoker.data.sources.config import leaving_out
from stoker.data.sources.records import Cells, with_fault
from stoker.data.sources.table import UnusableColumn

VECTOR_MISSING = "the vector is missing"

NUMBER_MISSING = "a whole number of the vector is missing"


def lengths_of(lists: pa.Array) -> NDArray[np.int64]:
    """[rows] how many values each list holds; -1 where there is no list.

    Args:
        lists: [rows] of type list, large_list, fixed_size_list, or null.
    """
    if pa.types.is_null(lists.type):
        return np.full(len(lists), -1)
    lengths = pc.fill_null(pc.list_value_length(lists), -1)
    return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)


def common_length(counts: Mapping[int, int], *, column: str) -> int:
    """The length that makes a column of lists one of vectors: that of more than half of them.

    Args:
        counts: Length -> number of records; those without a list left out.
        column: The column's name, for the error.

    Raises:
        DataError: there is no list, there is no such length, or it is 0.
    """
    total = sum(counts.values())
    length, records = max(counts.items(), key=lambda item: item[1], default=(0, 0))
    if length and 2 * records > total:
        return length
    seen = f"{min(counts)} to {max(counts)} values, most often {length}" if counts else "no list"
    often = f" (in {records:,} of {total:,} records)" if counts else ""
    raise UnusableColumn(
        column,
        f"column {column!r} must hold lists of one length, of at least one value",
        got=Plain(seen + often),
        fix=f"Set {leaving_out(column)}, or bring the lists to one length (cut or pad them).",
    )


def vector_cells(lists: pa.Array, *, length: int, read: Callable[[pa.Array], Cells]) -> Cells:
    """Lists -> vectors: a record is bad where its list, or any value in it, is.

    Args:
        lists: [rows] as `lengths_of` takes them.
        length: Values in each.
        read: Reads the values of many lists, one after another, as those of a single-valued column.

    Returns:
        [rows] fixed-size lists of what `read` gives; strings without nulls. Bad are a missing
        list, one of another length, one that holds a bad value, and one of whole numbers in which
        one is missing.
    """
    lengths = lengths_of(lists)
    fits = lengths == length
    column = _folded(_without_gaps(read(_values(lists, fits))), fits, length)
    column = with_fault(column, lengths < 0, VECTOR_MISSING)
    for wrong in np.unique(lengths[(lengths >= 0) & ~fits]).tolist():
        reason = f"a vector of length {wrong} where length {length} is the rule"
        column = with_fault(column, lengths == wrong, reason)
    return column


def _values(lists: pa.Array, chosen: NDArray[np.bool_]) -> pa.Array:
    if pa.types.is_null(lists.type):
        return lists.slice(0, 0)
    # `flatten` heeds the offset of a slice, `values` does not.
    return (lists if chosen.all() else lists.filter(pa.array(chosen))).flatten()


def _without_gaps(items: Cells) -> Cells:
    kind = items.values.type
    if pa.types.is_integer(kind):
        missing = items.values.is_null().to_numpy(zero_copy_only=False)
        return with_fault(items, missing, NUMBER_MISSING)
    is_text = pa.types.is_string(kind)
    return replace(items, values=pc.fill_null(items.values, "")) if is_text else items


def _folded(items: Cells, fits: NDArray[np.bool_], length: int) -> Cells:
    """Cells of values -> cells of the lists that hold them; null where a list has another length."""
    at_fault = items.bad.reshape(-1, length) != 0
    # The first bad value of each list, which is what will be shown; else its first.
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
