"""The difference between a column's distribution and that in training; `stoker skew` and a server compute it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from stoker.core.statistics.columns import QUANTILE_BUCKETS, TOP_VALUES, ColumnStatistics

_CHANCE = 1.63
"""Two samples of n and m rows from the same distribution differ by more than this factor times sqrt(1/n + 1/m) in one
of 100 cases.
Source: Kolmogorov-Smirnov test of two samples."""

Bounds = tuple[float, float]
"""Smallest and largest possible value of a share that is not known exactly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributionGap:
    """The largest difference between the shares of values in two samples of a column."""

    share: float
    """The difference, 0 to 1."""

    chance: float
    """The difference that chance alone explains, given the number of rows."""

    text: str
    """A clause that names the values whose shares differ, with both shares."""

    @property
    def beyond_chance(self) -> float:
        """The difference that chance does not explain, 0 to 1."""
        return max(self.share - self.chance, 0.0)


def distribution_gap(
    column: ColumnStatistics, training: ColumnStatistics
) -> DistributionGap | None:
    """Compare the distribution of one column with that of the training split.

    Numbers are compared by their cumulative shares at the quantiles and values in the statistics. Strings are compared
    by the share of each value, if both columns have at most `TOP_VALUES` different values. Images are compared by the
    sizes of their files, in the same way as numbers; their content is not compared.

    Args:
        column: The column.
        training: The same column in the training split.

    Returns:
        The largest difference; None if the two cannot be compared.
    """
    if column.dtype != training.dtype or not column.count or not training.count:
        return None
    if _spread(column) is not None and _spread(training) is not None:
        share, text = _numbers(column, training)
    elif _is_whole(column) and _is_whole(training):
        share, text = _strings(column, training)
    else:
        return None
    chance = _CHANCE * math.sqrt(1 / _rows(column) + 1 / _rows(training))
    return DistributionGap(share=share, chance=chance, text=text)


def _rows(column: ColumnStatistics) -> float:
    """Return the number of independent samples: all values of a vector or list are one sample."""
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
    points = {*_thresholds(column), *_thresholds(training)}
    at = [
        (_gap(_cumulative_share(column, p), _cumulative_share(training, p)), p)
        for p in sorted(points)
    ]
    gap, point = max(at, default=(0.0, 0.0))
    here, there = _cumulative_share(column, point), _cumulative_share(training, point)
    limit = f"images have at most {point:,.0f} bytes"
    if column.dtype != "image":
        limit = f"values are at most {point:g}"
    text = f"{_range_text(here)} of its {limit}, in the training split {_range_text(there)}"
    return gap, text


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spread:
    """Deciles, minimum and maximum of a column; without finite values, there are none."""

    quantiles: tuple[float, ...]
    min: float | None
    max: float | None


def _spread(column: ColumnStatistics) -> _Spread | None:
    """Return the deciles of a column of numbers, or of the sizes of images; None if they are not known."""
    found = column.numbers
    if found is not None:
        return _Spread(quantiles=found.quantiles, min=found.min, max=found.max)
    sizes = column.lengths
    if column.dtype == "image" and sizes is not None and sizes.quantiles:
        return _Spread(quantiles=sizes.quantiles, min=sizes.min, max=sizes.max)
    return None


def _thresholds(column: ColumnStatistics) -> Iterator[float]:
    spread = _spread(column)
    if spread is not None:
        yield from spread.quantiles
    if _is_whole(column):
        yield from (float(top.value) for top in column.top)


def _cumulative_share(column: ColumnStatistics, point: float) -> Bounds:
    """Return bounds of the share of values up to `point`.

    They are equal if the share is known, one quantile bucket apart if only quantiles are known, and else 0 and 1.
    """
    if _is_whole(column):
        share = sum(t.count for t in column.top if float(t.value) <= point) / column.count
        return share, share
    spread = _spread(column)
    if spread is None or spread.min is None or spread.max is None or not spread.quantiles:
        return 0.0, 1.0
    if point < spread.min or point >= spread.max:
        share = float(point >= spread.max)
        return share, share
    below = bisect_right(spread.quantiles, point)
    return below / QUANTILE_BUCKETS, (below + 1) / QUANTILE_BUCKETS


def _gap(one: Bounds, other: Bounds) -> float:
    return max(one[0] - other[1], other[0] - one[1], 0.0)


def _range_text(share: Bounds) -> str:
    low, high = share
    return f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}"
