"""Latencies in buckets: every value to three digits, in the memory of one that is small."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hdrh.histogram import HdrHistogram

_UNITS_PER_S = 10_000_000
"""Recorded in tenths of a microsecond: answers of a loopback server take some ten of those ten."""

_MOST_S = 2 * 3600.0
"""Longest that is told apart: the longest run and the longest wait after it."""

_DIGITS = 3
"""Of every value: off by at most a thousandth."""


class Latencies:
    """A High Dynamic Range histogram, in seconds."""

    def __init__(self) -> None:
        self._histogram = HdrHistogram(1, int(_MOST_S * _UNITS_PER_S), _DIGITS)
        self._max_s = 0.0
        self._sum_s = 0.0

    def add(self, value_s: float) -> None:
        """Count one; what is longer than can be told apart counts as the longest."""
        value_s = min(max(value_s, 0.0), _MOST_S)
        self._histogram.record_value(max(1, int(value_s * _UNITS_PER_S)))
        self._sum_s += value_s
        self._max_s = max(value_s, self._max_s)

    @property
    def count(self) -> int:
        """How many."""
        return int(self._histogram.get_total_count())

    @property
    def max_s(self) -> float:
        """The longest, exactly; 0 of none."""
        return self._max_s

    @property
    def mean_s(self) -> float:
        """The mean, exactly; 0 of none."""
        return self._sum_s / self.count if self.count else 0.0

    def at(self, percent: float) -> float:
        """The value that this share does not exceed, seconds; 0 of none."""
        return self.curve([percent])[0]

    def curve(self, percents: Sequence[float]) -> list[float]:
        """`at` for several, by one pass over the buckets."""
        if not self.count:
            return [0.0] * len(percents)
        wanted = [self._whole(percent) for percent in percents]
        found = self._histogram.get_percentile_to_value_dict(wanted)
        # A bucket's upper end may lie beyond the longest that was seen.
        return [min(found[percent] / _UNITS_PER_S, self._max_s) for percent in wanted]

    def _whole(self, percent: float) -> float:
        """The share that a whole number of values is: the library rounds to the nearest, down too.

        The 90th percentile of six would be the fifth, and not every tenth may exceed a p90.
        """
        values = math.ceil(round(percent / 100 * self.count, 6))
        return 100 * max(values, 1) / self.count
