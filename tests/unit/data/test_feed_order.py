from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.feed.order import shuffled_indices

GOLDEN = Path(__file__).parent / "golden_order.json"


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 10_000))
def test_every_sample_stands_exactly_once_in_an_epoch(size: int, seed: int, epoch: int) -> None:
    order = shuffled_indices(np.arange(size), size=size, seed=seed, epoch=epoch)

    assert sorted(order) == list(range(size))


@given(size=st.integers(2, 10**12), position=st.integers(0, 10**12), seed=st.integers(0, 10**6))
def test_one_position_computed_alone_is_the_same_as_among_others(
    size: int, position: int, seed: int
) -> None:
    position %= size
    near = np.array([p for p in range(position - 2, position + 3) if 0 <= p < size])
    together = shuffled_indices(near, size=size, seed=seed, epoch=1)
    alone = shuffled_indices(np.array([position]), size=size, seed=seed, epoch=1)

    assert alone[0] == together[list(near).index(position)]


@pytest.mark.parametrize("size", [100, 1437, 12_000])
def test_epochs_and_seeds_are_unlike_one_another_and_unlike_the_source(size: int) -> None:
    everything = np.arange(size)
    orders = [
        shuffled_indices(everything, size=size, seed=seed, epoch=epoch)
        for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]
    ]
    for index, order in enumerate(orders):
        # Of two independent permutations about one place in `size` agrees.
        assert (order == everything).sum() <= 8
        assert all((order == other).sum() <= 8 for other in orders[index + 1 :])
        assert abs(np.corrcoef(order, everything)[0, 1]) < 4 / np.sqrt(size)


def test_the_order_is_the_one_of_earlier_versions() -> None:
    golden = json.loads(GOLDEN.read_text())
    for case in golden:
        order = shuffled_indices(
            np.arange(case["size"])[:16], size=case["size"], seed=case["seed"], epoch=case["epoch"]
        )
        assert order.tolist() == case["order"]
