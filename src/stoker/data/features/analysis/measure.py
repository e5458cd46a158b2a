"""Compute the statistics with as few full passes over every split as possible.

Counts, sums and limits of all columns are computed in one query, because converting an expression to SQL
costs more than running it over a few thousand rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ibis
import ibis.expr.types as ir

from stoker.cluster.limits import usable_cores
from stoker.core.statistics.columns import (
    HISTOGRAM_BINS,
    QUANTILE_BUCKETS,
    TOP_VALUES,
    ColumnStatistics,
    LengthStatistics,
    NumberStatistics,
    ValueCount,
)
from stoker.core.statistics.values import value_text
from stoker.data.columns import Column
from stoker.data.dataset import Dataset
from stoker.data.features import analyzers, engine
from stoker.data.features.analysis.statistics import Statistics
from stoker.data.features.engine import Progress, no_progress

_NUMBERS = ("int64", "float32", "float64")

Totals = dict[str, Any]
"""One column's counts, sums and limits, by name."""


def compute_statistics(dataset: Dataset, *, progress: Progress = no_progress) -> Statistics:
    """Compute the statistics of every split that holds a record.

    Args:
        dataset: The dataset; every shard's hash is checked first.
        progress: Called with columns done, number of columns, and the split.

    Raises:
        DataError: a shard is missing, truncated or changed.
    """
    rows = {name: dataset.rows(name) for name in dataset.splits}
    return Statistics(
        fingerprint=dataset.fingerprint,
        rows=rows,
        splits={
            name: _split(dataset, name, progress) if rows[name] else () for name in dataset.splits
        },
    )


def _split(dataset: Dataset, name: str, progress: Progress) -> tuple[ColumnStatistics, ...]:
    engine.verify_split(dataset, name)
    cores = usable_cores()
    groups = [dataset.columns[start::cores] for start in range(min(cores, len(dataset.columns)))]
    found = engine.in_parallel(partial(_totals, dataset, name), groups)
    totals = {column: total for group in found for column, total in group.items()}
    columns = []
    with engine.connection(threads=cores) as backend:
        split = engine.read_split(backend, dataset, name)
        for done, column in enumerate(dataset.columns, start=1):
            total = totals[column.name] | {"quantiles": _sizes(split, column, dataset)}
            columns.append(_column(split, column, total, dataset.rows(name)))
            progress(done, len(dataset.columns), f"statistics of {name}")
    return tuple(columns)


def _totals(dataset: Dataset, name: str, columns: Sequence[Column]) -> dict[str, Totals]:
    """Return column -> its counts, sums and limits, computed by one thread."""
    with engine.connection() as backend:
        split = engine.read_split(backend, dataset, name)
        totals = _totals_of(split, columns, _total_expressions)
        squares = _totals_of(split, columns, partial(_squares, totals))
    return {column: totals[column] | squares[column] for column in totals}


def _totals_of(
    split: engine.Split,
    columns: Sequence[Column],
    expressions_of: Callable[[ir.Column, Column], dict[str, ir.Scalar]],
) -> dict[str, Totals]:
    """Return column -> its totals: one query for all single values, one for each column of vectors."""
    single = [column for column in columns if column.length is None]
    expressions = {
        column.name: expressions_of(split.value(column.name), column) for column in single
    }
    found = _run_query(split.table, expressions)
    for column in columns:
        if column.length is not None:
            values = split.values(column)
            found |= _run_query(values, {column.name: expressions_of(values.value, column)})
    return found


def _lists(split: engine.Split, column: Column, count: int) -> dict[str, Any]:
    """Return list lengths and the number of missing values; {} unless the lists are of varying length.

    Args:
        split: The split.
        column: One of its columns.
        count: Number of values in all lists of the column, without missing values.
    """
    if not column.is_ragged:
        return {}
    length = split.value(column.name).length()
    expressions = {
        "mean": length.mean(),
        "shortest": length.min(),
        "longest": length.max(),
        "held": length.sum(),
        "empty": (length == 0).sum(),
    }
    found = _run_query(split.table, {column.name: expressions})[column.name]
    missing = int(found["held"]) - count + int(found["empty"])
    return {"list_lengths": _lengths(found), "missing": missing}


def _run_query(table: ir.Table, expressions: dict[str, dict[str, ir.Scalar]]) -> dict[str, Totals]:
    names = list(expressions)
    numbers = {
        f"{key}_{index}": number
        for index, name in enumerate(names)
        for key, number in expressions[name].items()
    }
    found: dict[str, Totals] = {name: {} for name in names}
    if numbers:
        row = table.aggregate(**numbers).to_pyarrow().to_pylist()[0]
        for numbered, value in row.items():
            key, _, index = numbered.rpartition("_")
            found[names[int(index)]][key] = value
    return found


def _total_expressions(value: ir.Column, column: Column) -> dict[str, ir.Scalar]:
    present = engine.is_present(value, column.dtype)
    if column.dtype in _NUMBERS:
        number = value.cast("float64")
        finite = present & ~number.isinf()
        return {
            "count": present.sum(),
            "finite": finite.sum(),
            "zeros": (finite & (number == 0)).sum(),
            "total": number.sum(where=finite),
            "low": number.min(where=finite),
            "high": number.max(where=finite),
        }
    length = value.length() if column.dtype == "string" else _bytes(value)
    return {
        "count": present.sum(),
        "mean": length.mean(where=present),
        "shortest": length.min(where=present),
        "longest": length.max(where=present),
    }


def _squares(totals: dict[str, Totals], value: ir.Column, column: Column) -> dict[str, ir.Scalar]:
    """Return the sum of squared differences from the mean; the mean is a result of the first pass."""
    total = totals[column.name]
    if not total.get("finite"):
        return {}
    number = value.cast("float64")
    away = number - _mean(total)
    finite = engine.is_present(value, column.dtype) & ~number.isinf()
    return {"squares": (away * away).sum(where=finite)}


def _mean(total: Totals) -> float:
    is_constant = total["low"] == total["high"]
    return total["low"] if is_constant else total["total"] / total["finite"]


def _column(split: engine.Split, column: Column, total: Totals, rows: int) -> ColumnStatistics:
    values = split.present_values(column)
    count = int(total["count"] or 0)
    distinct, top = (None, ()) if column.dtype == "image" else _frequencies(values)
    is_number = column.dtype in _NUMBERS
    facts: dict[str, Any] = {"missing": rows * (column.length or 1) - count}
    return ColumnStatistics(
        name=column.name,
        dtype=column.dtype,
        length=column.length,
        whole=column.whole,
        count=count,
        distinct=distinct,
        numbers=_numbers(values, count, total) if is_number else None,
        lengths=None if is_number else _lengths(total),
        top=() if is_number and (distinct or 0) > TOP_VALUES else top,
        **facts | _lists(split, column, count),
    )


def _frequencies(values: ir.Table) -> tuple[int, tuple[ValueCount, ...]]:
    counted = values.group_by("value").aggregate(count=values.count())
    ordered = (
        counted.mutate(distinct=counted.count().over(ibis.window()))
        .order_by(ibis.desc("count"), "value")
        .limit(TOP_VALUES)
    )
    rows = ordered.to_pyarrow().to_pylist()
    top = tuple(ValueCount(value=value_text(row["value"]), count=row["count"]) for row in rows)
    return (rows[0]["distinct"] if rows else 0), top


def _lengths(total: Totals) -> LengthStatistics:
    return LengthStatistics(
        mean=total["mean"],
        min=total["shortest"],
        max=total["longest"],
        quantiles=total.get("quantiles", ()),
    )


def _sizes(split: engine.Split, column: Column, dataset: Dataset) -> tuple[float, ...]:
    """Return the deciles of images' sizes in bytes; () unless images are stored in their original form."""
    as_came = (dataset.image_store or "original").startswith("original")
    if column.dtype != "image" or not as_came:
        return ()
    values = split.present_values(column)
    sizes = values.select(value=_bytes(values.value))
    return tuple(map(float, analyzers.quantiles(sizes, QUANTILE_BUCKETS)))


@ibis.udf.scalar.builtin(name="octet_length")
def _bytes(value: bytes) -> int:  # type: ignore[empty-body]  # DuckDB has the body
    """DuckDB's function for the length of a BLOB."""


def _numbers(values: ir.Table, count: int, total: Totals) -> NumberStatistics:
    finite = int(total["finite"] or 0)
    return NumberStatistics(
        mean=_representable(_mean(total)) if finite else None,
        std=_representable(math.sqrt(total["squares"] / finite)) if finite else None,
        min=total["low"],
        max=total["high"],
        zeros=int(total["zeros"] or 0),
        infinite=count - finite,
        quantiles=tuple(map(float, analyzers.quantiles(values, QUANTILE_BUCKETS))),
        histogram=_histogram(values, finite, total),
    )


def _representable(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _histogram(values: ir.Table, finite: int, total: Totals) -> tuple[int, ...]:
    if not finite or total["low"] == total["high"]:
        return (finite,) if finite else ()
    value = values.value.cast("float64")
    # All terms are halved: the full width of a column that spans all of float64 would overflow.
    start, width = total["low"] / 2, total["high"] / 2 - total["low"] / 2
    place = ((value / 2 - start) / width * HISTOGRAM_BINS).floor().clip(0, HISTOGRAM_BINS - 1)
    placed = values.filter(~value.isinf()).select(place=place)
    counted = placed.group_by("place").aggregate(count=placed.count())
    bins = {int(row["place"]): row["count"] for row in counted.to_pyarrow().to_pylist()}
    return tuple(bins.get(index, 0) for index in range(HISTOGRAM_BINS))
