"""Buckets of numbers: in order, 3 % wide, and the same in every process."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.rollout.statistics.histogram import (
    aligned,
    buckets_of,
    count,
    count_above,
    quantile,
    upper_edge,
)

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
SECONDS = st.floats(1e-6, 1e4)


@given(st.lists(NUMBERS, min_size=2))
def test_buckets_are_in_the_order_of_their_numbers(numbers: list[float]) -> None:
    buckets = buckets_of(np.array(sorted(numbers)))

    assert (np.diff(buckets) >= 0).all()


@given(SECONDS)
def test_a_bucket_is_3_percent_wide_and_ends_at_its_edge(number: float) -> None:
    for value in (number, -number):
        bucket = int(buckets_of(np.array(value)))
        low, high = upper_edge(bucket - 1), upper_edge(bucket)

        assert low <= np.float32(value) <= high
        assert high - low <= abs(number) / 31


@given(st.lists(SECONDS, min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_is_bounded_from_above(numbers: list[float], share: float) -> None:
    found = quantile(count(np.array(numbers)), share)

    exact = sorted(numbers)[math.ceil(share * len(numbers) - 1e-9) - 1]
    assert exact * (1 - 1e-6) <= found <= exact * 1.033
    above = count_above(count(np.array(numbers)), found)
    assert above == sum(np.float32(each) >= found for each in numbers)


def test_counts_without_numbers_and_of_numbers_beyond_float32() -> None:
    assert math.isnan(quantile({}, 0.5))
    assert count(np.array([1e300, 3.4e38])) == count(np.array([3.4e38, 3.4e38]))
    one, other = aligned({5: 1, 3: 2}, {4: 7})
    assert (one.tolist(), other.tolist()) == ([2, 0, 1], [0, 7, 0])
