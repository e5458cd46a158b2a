"""Does a setting that changes numbers train alike? By loss curves, against what seeds change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

SEEDS = (0, 1, 2)
"""Trainings from other weights, in another order: three pairs of them give the spread."""

POINTS = 10
"""Stretches of a curve, each the mean loss over its steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Two settings' loss curves beside each other."""

    alike: bool
    """Whether they differ by no more than seeds do."""

    differ_by: float
    """Mean distance of the curves of a seed, over the second half; the largest of all seeds."""

    seeds_differ_by: float
    """Mean distance of the curves of two seeds under the first setting, the largest of all pairs."""

    why: str
    """In a sentence."""


def parity_of(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Parity:
    """Compare curves seed by seed.

    Args:
        first: [seeds][points] losses under the one setting.
        second: [seeds][points] losses under the other, of the same seeds and as many samples.

    Raises:
        ValueError: they are not as many, or there are fewer than two seeds.
    """
    before, after = np.array(first, np.float64), np.array(second, np.float64)
    if before.shape != after.shape or len(before) < 2:
        raise ValueError(f"curves of {before.shape} and {after.shape} cannot be compared")
    if not np.isfinite(after).all():
        return Parity(
            alike=False,
            differ_by=float("inf"),
            seeds_differ_by=0.0,
            why="a loss is not finite",
        )
    settled = slice(before.shape[1] // 2, None)
    differ_by = max(map(_distance, before[:, settled], after[:, settled]))
    spread = max(_distance(one, two) for one, two in combinations(before[:, settled], 2))
    alike = differ_by <= spread
    what = "no more than" if alike else "more than"
    return Parity(
        alike=alike,
        differ_by=differ_by,
        seeds_differ_by=spread,
        why=f"its loss differs by {differ_by:.3g}, {what} the {spread:.3g} that seeds make",
    )


def _distance(one: NDArray[np.float64], two: NDArray[np.float64]) -> float:
    return float(np.abs(one - two).mean())


def stretches(steps: int) -> int:
    """Steps of a stretch, where a curve has so many."""
    return max(1, steps // POINTS)
