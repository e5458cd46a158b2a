"""The shift between the predictions of two versions, with a lower bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_SHIFT = 0.2
"""Default of the largest accepted Kolmogorov distance between the predictions of two versions."""

FIRST_LOOK = 100
"""Predictions that each version must give before the bound can exceed 0."""


def least_shift(
    baseline: NDArray[np.int64], candidate: NDArray[np.int64], *, alpha: float
) -> float:
    """Lower bound of the Kolmogorov distance of two distributions, valid at all looks at once.

    A candidate is judged by how far its predictions have moved, not by whether they have: a better model
    predicts differently, and with enough traffic any difference is significant.

    Args:
        baseline: [bins] predictions of the baseline in each bin, in the order of the bins' values.
        candidate: [bins] those of the candidate, in the same bins.
        alpha: probability that the bound ever exceeds the true distance.

    Returns:
        The bound, in [0, 1]; 0 while a version has given fewer than `FIRST_LOOK` predictions. Coarser bins lower
        it, and never make it wrong.
    """
    counts = int(baseline.sum()), int(candidate.sum())
    if min(counts) < FIRST_LOOK:
        return 0.0
    distance = np.abs(baseline.cumsum() / counts[0] - candidate.cumsum() / counts[1]).max()
    return max(0.0, float(distance) - sum(_band(count, alpha / 2.0) for count in counts))


def _band(count: int, alpha: float) -> float:
    """Largest distance of an empirical distribution function to the true one, at all counts from `FIRST_LOOK` on.

    Source: Howard and Ramdas, Bernoulli 28(3), 2022, theorem 2 with A = 0.85.
    """
    iterated = math.log(math.log(math.e * count / FIRST_LOOK))
    return 0.85 * math.sqrt((iterated + 0.8 * math.log(1_612.0 / alpha)) / count)


def predicted(outputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float64] | None:
    """[rows] the predicted number or class of each row, from the first numeric output.

    Returns:
        The number if a row has a single one, else the index of the largest; None without a numeric output.
    """
    for name in sorted(outputs):
        values = outputs[name]
        if values.dtype.kind in "fiub" and values.size:
            rows = values.reshape(len(values) if values.ndim else 1, -1).astype(np.float64)
            if not np.isfinite(rows).all():
                return np.array([math.nan])
            return rows[:, 0] if rows.shape[1] == 1 else rows.argmax(1).astype(np.float64)
    return None
