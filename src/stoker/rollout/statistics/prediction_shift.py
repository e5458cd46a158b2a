"""Measures the shift between the predictions of two versions, by a lower bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_SHIFT = 0.2
"""Largest accepted Kolmogorov distance between the predictions of two versions, by default."""

FIRST_LOOK = 100
"""Number of predictions that each version must give before the bound can exceed 0."""


def least_shift(
    baseline: NDArray[np.int64], candidate: NDArray[np.int64], *, alpha: float
) -> float:
    """Return a lower bound of the Kolmogorov distance of two distributions, valid however often it is computed.

    The size of the shift decides, not its significance: a better model predicts differently, and with enough traffic
    any difference is significant.

    Args:
        baseline: [bins] number of the baseline's predictions in each bin, in the order of the bins' values.
        candidate: [bins] number of the candidate's predictions in the same bins.
        alpha: Probability that the bound ever exceeds the true distance.

    Returns:
        The bound, in [0, 1]; 0 while a version has given fewer than `FIRST_LOOK` predictions. Coarser bins make the
        bound lower, but not wrong.
    """
    counts = int(baseline.sum()), int(candidate.sum())
    if min(counts) < FIRST_LOOK:
        return 0.0
    distance = np.abs(baseline.cumsum() / counts[0] - candidate.cumsum() / counts[1]).max()
    return max(0.0, float(distance) - sum(_band(count, alpha / 2.0) for count in counts))


def _band(count: int, alpha: float) -> float:
    """Return a bound of the distance between the empirical and the true distribution function.

    It is valid at all counts from `FIRST_LOOK` on.

    Source: Howard and Ramdas, Bernoulli 28(3), 2022, theorem 2 with A = 0.85.
    """
    iterated = math.log(math.log(math.e * count / FIRST_LOOK))
    return 0.85 * math.sqrt((iterated + 0.8 * math.log(1_612.0 / alpha)) / count)


def predicted(outputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float64] | None:
    """Return the predicted number or class of each row, [rows], from the first numeric output.

    Returns:
        The number if a row has a single number, else the index of the largest; None if no output is numeric.
    """
    for name in sorted(outputs):
        values = outputs[name]
        if values.dtype.kind in "fiub" and values.size:
            rows = values.reshape(len(values) if values.ndim else 1, -1).astype(np.float64)
            if not np.isfinite(rows).all():
                return np.array([math.nan])
            return rows[:, 0] if rows.shape[1] == 1 else rows.argmax(1).astype(np.float64)
    return None
