"""Intervals of an A/B test that may be looked at after each key."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.rollout.statistics.confidence_sequence import ArmTotals, difference, log_share_evidence

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
KEYS = 20_000
LOOKS = np.unique(np.geomspace(200, KEYS, 60).astype(int)) - 1


def rate(share: float) -> Draw:
    return lambda random, count: (random.random(count) < share).astype(float)


def amount(random: np.random.Generator, count: int) -> NDArray[np.float64]:
    return np.where(random.random(count) < 0.2, random.lognormal(0, 1.5, count), 0.0)


def totals(values: NDArray[np.float64], mine: NDArray[np.bool_]) -> list[ArmTotals]:
    """What an arm has at each look."""
    columns = (mine, values * mine, values**2 * mine, (values != 0) & mine)
    sums = [column.cumsum()[LOOKS] for column in columns]
    return [
        ArmTotals(keys=int(n), total=float(s), squares=float(q), nonzero=int(z))
        for n, s, q, z in zip(*sums, strict=True)
    ]


def looks(
    random: np.random.Generator, draw: Draw, other: Draw, share: float
) -> list[tuple[ArmTotals, ArmTotals]]:
    arm = random.random(KEYS) < share
    values = np.where(arm, other(random, KEYS), draw(random, KEYS))
    return list(zip(totals(values, ~arm), totals(values, arm), strict=True))


@pytest.mark.parametrize("share", [0.5, 0.1])
@pytest.mark.parametrize(
    ("draw", "bounded"),
    [(rate(0.02), True), (rate(0.1), True), (rate(0.5), True), (amount, False)],
    ids=["2%", "10%", "50%", "amount"],
)
def test_of_400_tests_without_a_difference_at_most_5_percent_ever_show_one(
    draw: Draw, bounded: bool, share: float
) -> None:
    random, runs = np.random.default_rng(11), 400

    alarms = 0
    for _ in range(runs):
        found = [difference(*look, bounded=bounded) for look in looks(random, draw, draw, share)]
        alarms += any(each is not None and not each.low <= 0 <= each.high for each in found)

    assert alarms / runs <= 0.05


def test_10_percent_against_15_is_found_with_2000_keys_an_arm() -> None:
    random, runs, found = np.random.default_rng(12), 200, 0
    for _ in range(runs):
        several = [
            difference(*look)
            for look in looks(random, rate(0.1), rate(0.15), 0.5)
            if look[0].keys + look[1].keys <= 4_000
        ]
        found += any(each is not None and each.low > 0 for each in several)

    assert found / runs >= 0.9


def test_too_few_outcomes_are_too_early() -> None:
    one = ArmTotals(keys=10_000, total=60, squares=60, nonzero=60)
    few = ArmTotals(keys=10_000, total=49, squares=49, nonzero=49)

    assert difference(one, few) is None
    assert difference(one, one) is not None
    assert difference(one, one, bounded=False) is None


def test_more_comparisons_have_wider_intervals() -> None:
    one = ArmTotals(keys=10_000, total=1_000, squares=1_000, nonzero=1_000)
    alone, of_three = difference(one, one), difference(one, one, comparisons=3)

    assert alone is not None
    assert of_three is not None
    assert of_three.low < alone.low < 0 < alone.high < of_three.high


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.9, 0.1), (0.6, 0.3, 0.1)])
def test_wrong_shares_are_found_and_right_ones_are_not(weights: tuple[float, ...]) -> None:
    random, runs, alarms = np.random.default_rng(13), 400, 0
    for _ in range(runs):
        seen = random.multinomial(100, weights, 200).cumsum(0)
        alarms += any(
            log_share_evidence(list(map(int, row)), weights) >= math.log(1 / 0.05) for row in seen
        )
    shifted = [round(20_000 * (share + 0.03 * (-1) ** at)) for at, share in enumerate(weights[:2])]

    assert alarms / runs <= 0.05
    rest = [20_000 - sum(shifted)] if len(weights) > 2 else []
    assert log_share_evidence([*shifted, *rest], weights) > math.log(1 / 0.001)
