"""The bound of a shift of predictions: never above the truth, and soon close to it."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.rollout.statistics.prediction_shift import FIRST_LOOK, MAX_SHIFT, least_shift

EDGES = np.linspace(0, 1, 65)[1:-1]


def counts(values: np.ndarray) -> np.ndarray:
    return np.bincount(np.searchsorted(EDGES, values), minlength=64)


def test_of_2000_pairs_without_a_shift_at_most_5_percent_ever_show_one() -> None:
    random, runs, alarms = np.random.default_rng(3), 2_000, 0
    for _ in range(runs):
        drawn = [random.random((100, 20)) for _ in range(2)]
        seen = [np.cumsum([counts(rows) for rows in each], axis=0) for each in drawn]
        alarms += any(
            least_shift(seen[0][look], seen[1][look], alpha=0.05) > 0 for look in range(4, 100, 5)
        )

    assert alarms / runs <= 0.05


@pytest.mark.parametrize(("shift", "found"), [(0.4, True), (0.15, False)])
def test_a_shift_is_found_by_its_size_and_not_by_the_traffic(shift: float, found: bool) -> None:
    random = np.random.default_rng(4)
    baseline = counts(random.random(200_000))
    # A share of the predictions moves to the top.
    moved = random.random(200_000)
    moved[random.random(len(moved)) < shift] = 1.0

    bound = least_shift(baseline, counts(moved), alpha=0.001)

    assert bound == pytest.approx(shift, abs=0.03)
    assert bound <= shift
    assert (bound > MAX_SHIFT) is found


def test_too_few_predictions_show_nothing() -> None:
    one, other = np.zeros(64, int), np.zeros(64, int)
    one[0], other[63] = FIRST_LOOK - 1, 10_000
    assert least_shift(one, other, alpha=0.05) == 0.0
    one[0] = 1_000
    assert least_shift(one, other, alpha=0.05) > 0.6
