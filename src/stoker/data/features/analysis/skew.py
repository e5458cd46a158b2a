"""Where the values of requests are spread otherwise than those of training."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator

from stoker.data.features.analysis.anomalies import Anomaly
from stoker.data.features.analysis.statistics import QUANTILE_BUCKETS, TOP_VALUES, ColumnStatistics

SKEW_SHARE = 0.1
"""Share of the values that may lie elsewhere than in training before it is worth a word."""

_CHANCE = 1.63
"""Times sqrt(1/n + 1/m): two samples of one distribution differ by more in one of 100 cases.
Source: Kolmogorov-Smirnov test of two samples."""

Bounds = tuple[float, float]
"""Least and most that a share can be."""


def find_skew(
    split: str, column: ColumnStatistics, training: ColumnStatistics
) -> Iterator[Anomaly]:
    """Hold the spread of one column against that of the training split.

    Numbers are compared by the share of values up to a point, at the points that the statistics
    know; strings by the share of each value, where both have at most `TOP_VALUES`.

    Args:
        split: What the anomaly is to name.
        column: The column as it is now.
        training: The same in the training split.

    Yields:
        At most one anomaly, where the shares differ by more than `SKEW_SHARE` and chance.
    """
    if column.dtype != training.dtype or not column.count or not training.count:
        return
    allowed = SKEW_SHARE + _CHANCE * math.sqrt(1 / _rows(column) + 1 / _rows(training))
    if column.numbers is not None:
        found = _numbers(column, training)
    elif _is_whole(column) and _is_whole(training):
        found = _strings(column, training)
    else:
        return
    gap, text = found
    if gap > allowed:
        yield Anomaly(
            split=split, column=column.name, kind="skew", severity="warning", message=text
        )


def _rows(column: ColumnStatistics) -> float:
    """Values of one vector or list go together: they are not independent samples."""
    mean = None if column.list_lengths is None else column.list_lengths.mean
    return column.count / max(mean or column.length or 1, 1)


def _is_whole(column: ColumnStatistics) -> bool:
    return bool(column.top) and (column.distinct or 0) <= TOP_VALUES


def _strings(column: ColumnStatistics, training: ColumnStatistics) -> tuple[float, str]:
    now, then = ({t.value: t.count / c.count for t in c.top} for c in (column, training))
    value = max({**now, **then}, key=lambda name: abs(now.get(name, 0.0) - then.get(name, 0.0)))
    here, there = now.get(value, 0.0), then.get(value, 0.0)
    text = f"{value[:40]!r} is {here:.1%} of its values, in the training split {there:.1%}"
    return abs(here - there), text


def _numbers(column: ColumnStatistics, training: ColumnStatistics) -> tuple[float, str]:
    points = {*_points(column), *_points(training)}
    at = [(_gap(_up_to(column, p), _up_to(training, p)), p) for p in sorted(points)]
    gap, point = max(at, default=(0.0, 0.0))
    here, there = _up_to(column, point), _up_to(training, point)
    text = (
        f"{_said(here)} of its values are at most {point:g}, in the training split {_said(there)}"
    )
    return gap, text


def _points(column: ColumnStatistics) -> Iterator[float]:
    if column.numbers is not None:
        yield from column.numbers.quantiles
    if _is_whole(column):
        yield from (float(top.value) for top in column.top)


def _up_to(column: ColumnStatistics, point: float) -> Bounds:
    """The share of values that are at most `point`: known where all are, else to a tenth."""
    if _is_whole(column):
        share = sum(t.count for t in column.top if float(t.value) <= point) / column.count
        return share, share
    numbers = column.numbers
    if numbers is None or numbers.min is None or numbers.max is None or not numbers.quantiles:
        return 0.0, 1.0
    if point < numbers.min or point >= numbers.max:
        share = float(point >= numbers.max)
        return share, share
    below = bisect_right(numbers.quantiles, point)
    return below / QUANTILE_BUCKETS, (below + 1) / QUANTILE_BUCKETS


def _gap(one: Bounds, other: Bounds) -> float:
    return max(one[0] - other[1], other[0] - one[1], 0.0)


def _said(share: Bounds) -> str:
    low, high = share
    return f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}"
