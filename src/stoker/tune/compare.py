"""Is one setting faster than another, and how sure is that? By pairs of windows beside each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

PAIRS_LEAST, PAIRS_MOST = 6, 16
"""Pairs of windows: so few give an interval at all, and after so many it is what it is."""

CONFIDENCE = 0.95
"""How often the interval holds the true median."""

LEAST_GAIN = 0.05
"""What two processes with the same settings differ by on a quiet machine: less is no gain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """How much faster the second of two is, as a ratio."""

    ratio: float
    """Median over the pairs."""

    low: float
    high: float
    """Interval of the median that holds with `CONFIDENCE`, without any assumption about the noise."""

    pairs: int

    def shown(self) -> str:
        """`1.25x [1.20, 1.31]`."""
        return f"{self.ratio:.3g}x [{self.low:.3g}, {self.high:.3g}]"


SAME = Gain(ratio=1.0, low=1.0, high=1.0, pairs=0)
"""Of what was not measured."""


def gain_of(pairs: Sequence[tuple[float, float]]) -> Gain:
    """The gain that pairs of speeds show.

    Args:
        pairs: [pairs] speeds of the first and the second, in one unit, measured side by side; at
            least `PAIRS_LEAST`.

    Raises:
        ValueError: there are too few.

    Source: the sign test's interval of a median by order statistics (Conover, Practical
    Nonparametric Statistics, 3.2).
    """
    if len(pairs) < PAIRS_LEAST:
        raise ValueError(f"{len(pairs)} pairs give no interval, {PAIRS_LEAST} do")
    ratios = [second / first for first, second in pairs]
    low, high = interval(ratios)
    return Gain(ratio=median(ratios), low=low, high=high, pairs=len(ratios))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of the values' median, as `gain_of` says; of fewer than `PAIRS_LEAST` all of them."""
    ordered = sorted(values)
    outside = _outside(len(ordered))
    return ordered[outside], ordered[-1 - outside]


def _outside(count: int) -> int:
    """How many of the smallest, and of the largest, lie outside of the interval."""
    # As whole numbers: 1,024 pairs and more are beyond what a float holds.
    tail, total = 0.0, 2**count
    for outside in range(count):
        tail += math.comb(count, outside) / total
        if 2 * tail > 1 - CONFIDENCE:
            return max(0, outside - 1)
    return 0


def threshold_of(noise: Gain) -> float:
    """The least ratio that is a gain, where two processes of the same settings differ by `noise`."""
    return 1.0 + max(LEAST_GAIN, noise.ratio - 1.0, 1.0 / noise.ratio - 1.0)


def compare(
    first: Callable[[], float], second: Callable[[], float], *, threshold: float
) -> tuple[Gain, list[tuple[float, float]]]:
    """Measure two in turn, until it is clear on which side of the threshold the second lies.

    Args:
        first: Measures the first for a window; its speed.
        second: The same for the second.
        threshold: The least ratio that counts.

    Returns:
        The gain, and the speeds of every pair, in their order.
    """
    pairs: list[tuple[float, float]] = []
    while True:
        # Whoever comes second in a pair meets a machine that the other has warmed.
        if len(pairs) % 2:
            later = second()
            pairs.append((first(), later))
        else:
            earlier = first()
            pairs.append((earlier, second()))
        if len(pairs) < PAIRS_LEAST:
            continue
        gain = gain_of(pairs)
        if gain.low > threshold or gain.high < threshold or len(pairs) >= PAIRS_MOST:
            return gain, pairs
