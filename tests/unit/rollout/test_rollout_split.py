"""Shares of a split, and which keys move when they change."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.core.errors import UserError
from stoker.rollout.split import TrafficSplit

KEYS = [f"user-{number}".encode() for number in range(10_000)]


def bound(share: float) -> float:
    """Four standard errors of a share of 10,000."""
    return 4 * math.sqrt(share * (1 - share) / len(KEYS))


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("salt", ["a", "b", "taxi/7"])
def test_shares_of_keys_and_of_requests_are_the_weights(share: float, salt: str) -> None:
    split = TrafficSplit({1: 1 - share, 2: share}, salt=salt)

    keyed = Counter(map(split.version_of, KEYS))[2] / len(KEYS)
    drawn = Counter(split.any_version() for _ in KEYS)[2] / len(KEYS)

    assert keyed == pytest.approx(share, abs=bound(share))
    assert drawn == pytest.approx(share, abs=bound(share))


def test_only_the_changed_share_moves_and_the_first_keys_stay() -> None:
    stages = [
        TrafficSplit({1: 1 - share, 2: share}, salt="taxi") for share in (0.01, 0.1, 0.5, 1.0)
    ]

    taken = [{key for key in KEYS if stage.version_of(key) == 2} for stage in stages]

    for few, many in itertools.pairwise(taken):
        assert few <= many
    assert len(taken[-1]) == len(KEYS)


def test_of_three_versions_a_key_leaves_only_the_one_that_shrinks() -> None:
    before = TrafficSplit({1: 0.5, 2: 0.3, 3: 0.2}, salt="taxi")
    after = TrafficSplit({1: 0.3, 2: 0.3, 3: 0.4}, salt="taxi")

    moves = Counter((before.version_of(key), after.version_of(key)) for key in KEYS)

    moved = sum(count for (old, new), count in moves.items() if old != new)
    assert moves[2, 1] == moves[3, 1] == moves[3, 2] == 0
    assert moved / len(KEYS) == pytest.approx(0.26, abs=0.05)


def test_two_rollouts_assign_keys_independently() -> None:
    one, two = (TrafficSplit({1: 0.5, 2: 0.5}, salt=salt) for salt in ("a", "b"))

    both = sum(one.version_of(key) == two.version_of(key) == 2 for key in KEYS) / len(KEYS)

    assert both == pytest.approx(0.25, abs=bound(0.25))


@given(st.binary(max_size=80))
def test_a_key_has_one_version_whatever_it_holds(key: bytes) -> None:
    split = TrafficSplit({3: 0.9, 4: 0.1, 5: 0.0}, salt="taxi")

    assert split.version_of(key) == TrafficSplit({4: 0.1, 3: 0.9}, salt="taxi").version_of(key)


def test_assignments_are_those_of_earlier_releases() -> None:
    split = TrafficSplit({1: 0.5, 2: 0.5}, salt="taxi")

    assert [split.version_of(key) for key in KEYS[:12]] == [2, 2, 1, 2, 1, 1, 1, 1, 1, 2, 2, 1]


@pytest.mark.parametrize("weights", [{}, {1: 0.5, 2: 0.6}, {1: 1.5, 2: -0.5}, {1: math.nan}])
def test_weights_that_are_not_shares_are_refused(weights: dict[int, float]) -> None:
    with pytest.raises(UserError, match="add up to 1"):
        TrafficSplit(weights, salt="taxi")


def test_the_shares_are_those_of_the_table() -> None:
    split = TrafficSplit({1: 0.7, 2: 0.2, 3: 0.1, 4: 0.0}, salt="m/1")
    seen = Counter(split.version_of(b"user-%d" % number) for number in range(50_000))

    assert sum(split.shares().values()) == pytest.approx(1.0)
    for version, share in split.shares().items():
        assert share == pytest.approx(split.weights[version], abs=0.004)
        assert seen[version] / 50_000 == pytest.approx(share, abs=0.008)
