"""Slices: the rows of the eval split, grouped by the value of a raw column."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_DISTINCT_NUMBERS = 20
"""A column of numbers with more distinct values than this is split at its quartiles."""

MAX_SLICES = 100
"""Maximum number of slices of one column; if there are more values, the rarest ones share the last slice."""

MISSING = "(missing)"
"""Printed value of the slice of rows without a value."""

OTHER = "(other)"
"""Printed value of the slice that the rarest values share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """The rows in which a column has the same value, or a value in the same range."""

    column: str
    """The raw column, or the cross `a*b`, as in the configuration."""

    value: str
    """The value that its rows share, as printed."""

    rows: NDArray[np.int64]
    """Indices of the rows, ascending."""


_Coded = tuple[NDArray[np.int64], list[str]]
"""[rows] each row's code, and the printed value of each code."""


def columns_of(name: str, columns: Sequence[str] | Mapping[str, object]) -> tuple[str, ...]:
    """The raw columns of a slice: the column with this name, or else the columns of the cross."""
    return (name,) if name in columns else tuple(part.strip() for part in name.split("*"))


def slice_rows(name: str, columns: Mapping[str, NDArray[Any]]) -> list[Slice]:
    """Group rows by a column, or by a cross of columns.

    Args:
        name: A raw column, or `a*b`.
        columns: Raw column -> [rows] values: numbers (NaN = missing) or strings (`bytes` or
            `str`, "" = missing).

    Returns:
        The slices by number of rows, descending, then by value.
    """
    coded = [_coded(np.asarray(columns[part])) for part in columns_of(name, columns)]
    codes, names = functools.reduce(_crossed, coded)
    return _group(name, codes, names)


def _crossed(one: _Coded, two: _Coded) -> _Coded:
    """Cross two columns; only pairs that occur get a code.

    All possible pairs of two columns of IDs may not fit in memory.
    """
    pairs, codes = np.unique(one[0] * len(two[1]) + two[0], return_inverse=True)
    firsts, seconds = np.divmod(pairs, len(two[1]))
    names = [f"{one[1][i]} * {two[1][j]}" for i, j in zip(firsts, seconds, strict=True)]
    return codes.astype(np.int64), names


def _coded(values: NDArray[Any]) -> _Coded:
    """Each row's code, and each code's printed value."""
    if values.dtype.kind in "iufb":
        return _coded_numbers(values)
    distinct, codes = np.unique(values.astype(object), return_inverse=True)
    return codes.astype(np.int64), [_text(value) or MISSING for value in distinct]


def _text(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _coded_numbers(values: NDArray[Any]) -> _Coded:
    missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), dtype=bool)
    present = values[~missing]
    distinct, found = np.unique(present, return_inverse=True)
    if len(distinct) > MAX_DISTINCT_NUMBERS:
        found, names = _quartiles(present)
    else:
        names = [_number(value) for value in distinct]
    codes = np.full(len(values), len(names), dtype=np.int64)
    codes[~missing] = found
    return codes, [*names, MISSING]


def _quartiles(present: NDArray[Any]) -> _Coded:
    """Return the code of each value, and the ranges as text: there is a code for each range between two quartiles.

    A quartile is a value of the column; equal quartiles count once.
    """
    ordered = np.sort(present)
    edges = np.unique(ordered[[math.ceil(len(ordered) * part / 4) - 1 for part in (1, 2, 3, 4)]])
    lows = [ordered[0], *edges[:-1]]
    names = [
        f"{'[' if place == 0 else '('}{_number(low)}, {_number(high)}]"
        for place, (low, high) in enumerate(zip(lows, edges, strict=True))
    ]
    return np.searchsorted(edges, present, side="left").astype(np.int64), names


def _number(value: Any) -> str:
    """The shortest text that parses to the same number; integers have no fraction."""
    if value.dtype.kind != "f":
        return str(value)
    value = value + value.dtype.type(0)  # so that -0.0 reads as 0
    plain = value == 0 or 1e-4 <= abs(value) < 1e16
    spell = np.format_float_positional if plain else np.format_float_scientific
    return spell(value, trim="-")


def _group(name: str, codes: NDArray[np.int64], names: list[str]) -> list[Slice]:
    order = np.argsort(codes, kind="stable")
    used, starts = np.unique(codes[order], return_index=True)
    groups = np.split(order, starts[1:]) if len(used) else []
    slices = [
        Slice(column=name, value=names[code], rows=rows)
        for code, rows in zip(used, groups, strict=True)
    ]
    slices.sort(key=lambda piece: (-len(piece.rows), piece.value))
    return slices if len(slices) <= MAX_SLICES else _joined(name, slices)


def _joined(name: str, slices: list[Slice]) -> list[Slice]:
    kept, rest = slices[: MAX_SLICES - 1], slices[MAX_SLICES - 1 :]
    rows = np.sort(np.concatenate([piece.rows for piece in rest]))
    return [*kept, Slice(column=name, value=OTHER, rows=rows)]
