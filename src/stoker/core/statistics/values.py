"""Statistics of a column from its values in memory; the analysis of a dataset computes the same with SQL queries."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.statistics.columns import (
    HISTOGRAM_BINS,
    QUANTILE_BUCKETS,
    TOP_VALUES,
    ColumnStatistics,
    LengthStatistics,
    NumberStatistics,
    ValueCount,
)


def statistics_of_values(values: NDArray[Any], like: ColumnStatistics) -> ColumnStatistics:
    """Compute the statistics of a column of numbers or strings.

    Args:
        values: [rows] or [rows, length]; strings as `str`.
        like: Statistics of the same column in other data; only its name, type and length are used.
    """
    flat = values.reshape(-1)
    if like.dtype == "string":
        present = flat[flat != ""]
        numbers = None
    else:
        flat = flat.astype(like.dtype)
        present = flat[~np.isnan(flat)] if flat.dtype.kind == "f" else flat
        numbers = _numbers(present)
    distinct, counts = np.unique(present, return_counts=True)
    keeps_top = like.dtype == "string" or len(distinct) <= TOP_VALUES
    return ColumnStatistics(
        name=like.name,
        dtype=like.dtype,
        length=like.length,
        count=len(present),
        missing=len(flat) - len(present),
        distinct=len(distinct),
        numbers=numbers,
        lengths=None,
        top=_top(distinct.tolist(), counts.tolist()) if keeps_top else (),
    )


def statistics_of_sizes(sizes: NDArray[np.int64], like: ColumnStatistics) -> ColumnStatistics:
    """Compute the statistics of a column of images.

    Args:
        sizes: [rows] Size of each image, bytes; 0 if the image is missing.
        like: Statistics of the same column in other data; only its name, type and length are used.
    """
    present = np.sort(sizes[sizes > 0])
    return ColumnStatistics(
        name=like.name,
        dtype=like.dtype,
        length=like.length,
        count=len(present),
        missing=len(sizes) - len(present),
        distinct=None,
        numbers=None,
        lengths=LengthStatistics(
            mean=float(present.mean()) if len(present) else None,
            min=int(present[0]) if len(present) else None,
            max=int(present[-1]) if len(present) else None,
            quantiles=_quantiles(present),
        ),
        top=(),
    )


def _quantiles(ascending: NDArray[Any]) -> tuple[float, ...]:
    size = len(ascending)
    positions = [index * size // QUANTILE_BUCKETS for index in range(1, QUANTILE_BUCKETS)]
    return tuple(float(ascending[at]) + 0.0 for at in positions) if size else ()


def _top(distinct: Iterable[Any], counts: Iterable[int]) -> tuple[ValueCount, ...]:
    """Return the most frequent values; of equally frequent values, the smaller one is first."""
    # `distinct` is in ascending order, and Python's sort keeps the order of equally frequent values.
    ordered = sorted(zip(distinct, counts, strict=True), key=lambda each: -each[1])
    return tuple(
        ValueCount(value=value_text(value), count=count) for value, count in ordered[:TOP_VALUES]
    )


def value_text(value: object) -> str:
    """Return a value as text, in the form of `ValueCount.value`."""
    return str(value + 0.0 if isinstance(value, float) else value)  # 0.0 and -0.0 are one value


def _numbers(present: NDArray[Any]) -> NumberStatistics:
    is_finite = np.isfinite(present)
    finite = np.sort(present[is_finite])
    wide = finite.astype(np.float64)
    size = len(finite)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = (float(wide.mean()), float(wide.std())) if size else (math.nan, math.nan)
    return NumberStatistics(
        mean=mean if math.isfinite(mean) else None,
        std=std if math.isfinite(std) else None,
        min=float(wide[0]) if size else None,
        max=float(wide[-1]) if size else None,
        zeros=int(np.count_nonzero(wide == 0.0)),
        infinite=int(len(present) - size),
        quantiles=_quantiles(wide),
        histogram=_histogram(wide),
    )


def _histogram(ascending: NDArray[np.float64]) -> tuple[int, ...]:
    if not len(ascending) or ascending[0] == ascending[-1]:
        return (len(ascending),) if len(ascending) else ()
    # Compute with halves: the difference of two float64 values may overflow.
    start = ascending[0] / 2
    width = ascending[-1] / 2 - start
    places = np.floor((ascending / 2 - start) / width * HISTOGRAM_BINS)
    bins = np.bincount(
        places.clip(0, HISTOGRAM_BINS - 1).astype(np.int64), minlength=HISTOGRAM_BINS
    )
    return tuple(bins.tolist())
