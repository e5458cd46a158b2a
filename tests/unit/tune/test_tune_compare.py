"""Pairs of windows -> is it faster?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.tune.compare import (
    MAX_PAIRS,
    MIN_GAIN,
    MIN_PAIRS,
    SAME,
    Gain,
    compare,
    gain_of,
    interval,
    threshold_of,
)

speeds = st.floats(0.1, 1e6)


@given(st.lists(st.tuples(speeds, speeds), min_size=MIN_PAIRS, max_size=MAX_PAIRS))
def test_the_interval_holds_the_median(pairs: list[tuple[float, float]]) -> None:
    gain = gain_of(pairs)

    assert gain.low <= gain.ratio <= gain.high
    assert gain.pairs == len(pairs)


@given(st.lists(st.tuples(speeds, speeds), min_size=MIN_PAIRS, max_size=MAX_PAIRS))
def test_the_gain_does_not_depend_on_the_order_of_the_two(
    pairs: list[tuple[float, float]],
) -> None:
    gain, other = gain_of(pairs), gain_of([(two, one) for one, two in pairs])

    assert other.low == pytest.approx(1 / gain.high)
    assert other.high == pytest.approx(1 / gain.low)


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    draw = np.random.default_rng(0)
    for count in range(MIN_PAIRS, MAX_PAIRS + 1):
        ratios = np.exp(draw.standard_cauchy(size=(4000, count)).clip(-20, 20))
        held = [
            gain.low <= 1.0 <= gain.high
            for gain in (gain_of([(1.0, ratio) for ratio in row]) for row in ratios)
        ]
        assert np.mean(held) > 0.94, count


def test_six_pairs_give_the_widest_interval() -> None:
    gain = gain_of([(1.0, ratio) for ratio in (1, 2, 3, 4, 5, 6)])

    assert gain == Gain(ratio=3.5, low=1.0, high=6.0, pairs=6)


def test_many_pairs_give_the_interval_of_a_normal_distribution() -> None:
    low, high = interval([float(number) for number in range(3000)])

    half = 1.96 * math.sqrt(3000) / 2
    assert low == pytest.approx(1500 - half, abs=2)
    assert high == pytest.approx(1500 + half, abs=2)


def test_five_pairs_are_too_few() -> None:
    with pytest.raises(ValueError, match="at least 6 pairs, got 5"):
        gain_of([(1.0, 1.0)] * 5)


def given_speeds(values: list[float]) -> Callable[[], float]:
    return itertools.cycle(values).__next__


def test_a_clear_gain_is_known_after_the_fewest_pairs() -> None:
    gain, pairs = compare(given_speeds([10, 11]), given_speeds([20, 22]), threshold=1.05)

    assert len(pairs) == MIN_PAIRS
    assert gain.low > 1.05


def test_an_unclear_gain_is_measured_for_longer() -> None:
    gain, pairs = compare(given_speeds([10]), given_speeds([9, 12]), threshold=1.05)

    assert len(pairs) == MAX_PAIRS
    assert gain.low < 1.05 < gain.high


def test_each_is_first_in_every_other_pair() -> None:
    order: list[str] = []

    def recorder(name: str) -> Callable[[], float]:
        def speed() -> float:
            order.append(name)
            return 1.0

        return speed

    _, pairs = compare(recorder("a"), recorder("b"), threshold=0.5)

    assert order == ["a", "b", "b", "a"] * (len(pairs) // 2)


@given(st.floats(0.5, 2.0))
def test_noise_raises_the_bar_in_both_directions(ratio: float) -> None:
    bar = threshold_of(Gain(ratio=ratio, low=ratio, high=ratio, pairs=6))

    assert bar >= 1 + MIN_GAIN
    assert math.isclose(bar, max(1 + MIN_GAIN, ratio, 1 / ratio))
    assert threshold_of(SAME) == 1 + MIN_GAIN
