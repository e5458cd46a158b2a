"""Arrow's many types -> the few that a column of Stoker can have."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stoker.data.sources.columns.text import TOO_WIDE
from stoker.data.sources.records import Cells, cells, with_fault

Family = Literal["int", "float", "string", "image", "null"]
"""What the values of an Arrow type are: whole numbers, numbers, text, bytes, or nothing at all."""

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

_DAY_S = 86_400


def family_of(kind: pa.DataType) -> Family | None:
    """The family of an Arrow type, None where a column cannot hold its values."""
    is_a = pa.types
    if is_a.is_dictionary(kind):
        return family_of(kind.value_type)
    if is_a.is_null(kind):
        return "null"
    if is_a.is_integer(kind) or is_a.is_boolean(kind) or _is_time(kind):
        return "int"
    if is_a.is_floating(kind) or is_a.is_decimal(kind):
        return "float"
    if is_a.is_string(kind) or is_a.is_large_string(kind) or is_a.is_string_view(kind):
        return "string"
    return "image" if _is_binary(kind) else None


def item_type(kind: pa.DataType) -> pa.DataType | None:
    """The type of a list's values, None for what is no list."""
    is_a = pa.types
    is_list = is_a.is_list(kind) or is_a.is_large_list(kind) or is_a.is_fixed_size_list(kind)
    return kind.value_type if is_list else None


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _is_binary(kind: pa.DataType) -> bool:
    is_a = pa.types
    return bool(
        is_a.is_binary(kind)
        or is_a.is_large_binary(kind)
        or is_a.is_fixed_size_binary(kind)
        or is_a.is_binary_view(kind)
    )


def plain(values: pa.Array) -> Cells:
    """Values of any family as int64, float64, string or binary; null where missing.

    Args:
        values: [rows] of a type that `family_of` knows. Times become whole seconds since 1970, UTC.
    """
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    family = family_of(values.type)
    if family == "int":
        return _whole(values)
    if family == "float":
        numbers = values.cast(pa.float64())
        return cells(pc.if_else(pc.is_nan(numbers), None, numbers), values)
    if family == "null":
        return cells(values.cast(pa.string()), values)
    # Text is checked before it is called text: Parquet does not promise UTF-8.
    content = values.cast(pa.large_binary()).cast(pa.binary())
    return cells(content, content)


def _whole(values: pa.Array) -> Cells:
    if _is_time(values.type):
        return cells(_seconds(values), values)
    if not pa.types.is_uint64(values.type):
        return cells(values.cast(pa.int64()), values)
    beyond = pc.fill_null(pc.greater(values, pa.scalar(2**63 - 1, pa.uint64())), False)
    kept = pc.if_else(beyond, None, values).cast(pa.int64())
    column = replace(cells(kept, values), retype=True)
    return with_fault(column, beyond.to_numpy(zero_copy_only=False), TOO_WIDE)


def _seconds(values: pa.Array) -> pa.Array:
    if pa.types.is_date32(values.type):
        return pc.multiply(values.cast(pa.int32()).cast(pa.int64()), _DAY_S)
    unit = "ms" if pa.types.is_date64(values.type) else values.type.unit
    ticks = pc.fill_null(values.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    missing = values.is_null().to_numpy(zero_copy_only=False)
    return pa.array(np.floor_divide(ticks, _PER_SECOND[unit]), pa.int64(), mask=missing)
