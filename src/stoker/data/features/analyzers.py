"""Compute what analyzers return for all values of a tensor: moments, range, quantiles, vocabulary.

Every function accepts a table with the single column `value`. The functions for moments and range also
accept a table with the partial results of each row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import ibis
import ibis.expr.types as ir
import numpy as np
from numpy.typing import NDArray

EMPTY_VOCABULARY_TOKEN = b"49d0cd50-04bb-48c0-bc6f-5b575dce351a"
"""The only term of an empty vocabulary, because a lookup table needs a row; as in TensorFlow Transform."""


EXACT_IN_FLOAT64 = 2**53
"""Up to this magnitude float64 holds every whole number."""


_ROUNDS_NOTHING = 2**40
"""Up to this magnitude, rounding in the sum of a column is too small to matter, however many rows it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Mean, variance and range of the finite values; all zero if there are none.

    For integers that float64 would round, the mean is a Fraction, and `low` and `high` are integers.
    """

    count: int
    """Number of finite values."""

    mean: float | Fraction
    """Mean of the values: from a float64 sum in the order of the rows, or exact if it is a Fraction."""

    var: float
    """Biased variance of the values (0 delta degrees of freedom); exactly 0 if all are equal."""

    low: float | int
    """The smallest finite value."""

    high: float | int
    """The largest finite value."""

    @property
    def is_constant(self) -> bool:
        """Whether the values cannot be scaled by their range: no value, or one distinct value."""
        return not self.low < self.high


def row_moments(values: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return the partial results of each row of a batch, for `moments`.

    Args:
        values: [rows, ...] numbers.

    Returns:
        Column -> [rows]: number of the row's finite values, their mean, the sum of squared differences
        from the mean, the smallest and the largest value. The count of a row without finite values is 0.
    """
    flat = values.reshape(len(values), math.prod(values.shape[1:])).astype(np.float64)
    finite = np.isfinite(flat)
    count = finite.sum(axis=1)
    total = np.where(finite, flat, 0.0).sum(axis=1)
    mean = total / np.maximum(count, 1)
    with np.errstate(invalid="ignore"):
        squares = np.where(finite, flat - mean[:, None], 0.0) ** 2
    return {
        "count": count.astype(np.int64),
        "mean": mean,
        "squares": squares.sum(axis=1),
        "low": np.where(finite, flat, np.inf).min(axis=1, initial=np.inf),
        "high": np.where(finite, flat, -np.inf).max(axis=1, initial=-np.inf),
    }


def moments(table: ir.Table) -> Moments:
    """Compute the moments of a column `value`, or of the partial results of `row_moments`.

    Two passes are needed: one for the mean, then one for the squared differences from the mean.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """
    if "value" in table.columns:
        if table.value.type().is_integer():
            low, high = value_range(table)
            if _needs_exact(table, low, high):
                return _exact_moments(table, low, high)
        table = _one_value_per_row(table)
    rows = table.filter(table["count"] > 0)
    first = _one_row(
        rows.aggregate(
            count=rows["count"].sum(),
            total=(rows["count"] * rows["mean"]).sum(),
            low=rows["low"].min(),
            high=rows["high"].max(),
        )
    )
    if not first["count"]:
        return Moments(count=0, mean=0.0, var=0.0, low=0.0, high=0.0)
    count, low, high = int(first["count"]), first["low"], first["high"]
    if low == high:
        return Moments(count=count, mean=low, var=0.0, low=low, high=high)
    mean = first["total"] / count
    away = rows["mean"] - mean
    second = _one_row(rows.aggregate(squares=(rows["squares"] + rows["count"] * away * away).sum()))
    return Moments(count=count, mean=mean, var=second["squares"] / count, low=low, high=high)


def _needs_exact(table: ir.Table, low: int, high: int) -> bool:
    """Return whether float64 would round these integers, or shift their mean by a millionth of their range."""
    largest = max(-low, high)
    if largest <= _ROUNDS_NOTHING:
        return False
    count = _one_row(table.aggregate(count=table.count()))["count"]
    return largest > EXACT_IN_FLOAT64 or largest * count > (high - low) * EXACT_IN_FLOAT64 / 1e6


def _one_value_per_row(table: ir.Table) -> ir.Table:
    """Return the columns of `row_moments` for a table with one value per row."""
    value = table.value.cast("float64")
    return table.filter(value.notnull() & ~value.isnan() & ~value.isinf()).select(
        count=ibis.literal(1, type="int64"),
        mean=value,
        squares=ibis.literal(0.0),
        low=value,
        high=value,
    )


def _exact_moments(table: ir.Table, low: int, high: int) -> Moments:
    """Return the moments of integers that float64 would round; the mean is exact."""
    value = table.value.cast(_WIDE)
    first = _one_row(table.aggregate(count=value.count(), total=value.sum()))
    count = first["count"]
    mean = Fraction(int(first["total"]), count)
    center = round(mean)
    away = (value - ibis.literal(Decimal(center), _WIDE)).cast("float64") - float(mean - center)
    second = _one_row(table.aggregate(squares=(away * away).sum()))
    return Moments(count=count, mean=mean, var=second["squares"] / count, low=low, high=high)


_WIDE = "decimal(38, 0)"
"""Type that holds the sum of any column of 64-bit integers."""


def row_range(values: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return the smallest and largest value of each row of a batch. NaN only if a row has no other value.

    Args:
        values: [rows, ...] numbers. Integers keep their type, so that 64-bit integers stay exact.
    """
    flat = values.reshape(len(values), math.prod(values.shape[1:]))
    if flat.dtype.kind != "f":
        return {"low": flat.min(axis=1), "high": flat.max(axis=1)}
    flat = flat.astype(np.float64)
    missing = np.isnan(flat)
    some = ~missing.all(axis=1)
    low = np.where(missing, np.inf, flat).min(axis=1, initial=np.inf)
    high = np.where(missing, -np.inf, flat).max(axis=1, initial=-np.inf)
    return {"low": np.where(some, low, np.nan), "high": np.where(some, high, np.nan)}


def value_range(table: ir.Table) -> tuple[Any, Any]:
    """Return the smallest and the largest value, infinities included; both are NaN if there are no values.

    Args:
        table: Table with a column `value`, or with the partial results of `row_range`.
    """
    low, high = (table.value,) * 2 if "value" in table.columns else (table.low, table.high)
    present = low.notnull() & ~low.isnan() if low.type().is_floating() else low.notnull()
    found = _one_row(table.aggregate(low=low.min(where=present), high=high.max(where=present)))
    if found["low"] is None:
        return math.nan, math.nan
    return found["low"], found["high"]


def quantiles(table: ir.Table, num_buckets: int) -> list[float | int]:
    """Return the exact boundaries that split the finite values into buckets of equal size.

    Returns:
        `num_buckets - 1` boundaries, ascending, repeated where the data repeats: boundary `i` is the value
        at position `floor(i * n / num_buckets)` of the `n` sorted values. Empty if there are no values.

    Source: TensorFlow Transform's own tests of `tft.quantiles` with small inputs, for which its
    approximation is exact ([1, 2, 3, 4] in 6 buckets: 1, 2, 3, 3, 4).
    """
    finite = table.filter(table.value.notnull())
    if table.value.type().is_floating():
        finite = table.filter(table.value.notnull() & ~table.value.isnan() & ~table.value.isinf())
    ranked = finite.select(
        value=finite.value,
        rank=ibis.row_number().over(order_by=finite.value),
        rows=finite.count().over(ibis.window()),
    )
    # Rank r is a boundary if, for the smallest i with i * rows / num_buckets >= r, the floor is r itself.
    step = (ranked["rank"] * num_buckets + ranked["rows"] - 1) // ranked["rows"]
    is_boundary = (step * ranked["rows"]) // num_buckets == ranked["rank"]
    found = ranked.filter((ranked["rank"] == 0) | is_boundary).to_pyarrow().to_pylist()
    if not found:
        return []
    at = {row["rank"]: row["value"] for row in found}
    positions = [index * found[0]["rows"] // num_buckets for index in range(1, num_buckets)]
    return [at[position] + 0 for position in positions]  # -0.0 and 0.0 tie; + 0 turns -0.0 into 0.0


def vocabulary(
    table: ir.Table, *, top_k: int | None, frequency_threshold: int | None
) -> list[bytes]:
    """Return the distinct tokens, most frequent first; equally frequent tokens in descending byte order.

    Empty strings are left out, as in TensorFlow Transform. Tokens that contain a line break are kept;
    TensorFlow Transform drops them. Without tokens, the only term is `EMPTY_VOCABULARY_TOKEN`.

    Source: `tft.vocabulary` (ties: the example in the documentation of `tft.tfidf`, where "like"
    comes before "I").
    """
    value = table.value.cast("string") if table.value.type().is_integer() else table.value
    tokens = table.select(token=value)
    counted = tokens.group_by("token").aggregate(count=tokens.count())
    if frequency_threshold is not None:
        counted = counted.filter(counted["count"] >= frequency_threshold)
    ordered = counted.order_by(ibis.desc("count"), ibis.desc("token"))
    found: list[bytes] = []
    for token in _stream(ordered.select("token"), "token"):
        if top_k is not None and len(found) == top_k:
            break
        if token:
            found.append(token)
    return found or [EMPTY_VOCABULARY_TOKEN]


def classes(table: ir.Table) -> list[bytes]:
    """Return the distinct non-empty strings, sorted by their bytes."""
    distinct = table.select("value").distinct()
    return sorted(token for token in _stream(distinct, "value") if token)


def _stream(table: ir.Table, column: str) -> Iterator[bytes]:
    with table.to_pyarrow_batches() as batches:
        for batch in batches:
            for token in batch.column(column).to_pylist():
                if token is not None:
                    yield token.encode() if isinstance(token, str) else token


def _one_row(table: ir.Table) -> dict[str, Any]:
    return table.to_pyarrow().to_pylist()[0]
