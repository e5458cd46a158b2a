"""Loss curves against what seeds change."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.tune.compare import parity_of

STEPS = np.arange(10)


def curves(*, shift: float = 0.0, seeds: int = 3) -> list[list[float]]:
    return [list(np.exp(-STEPS / 4) + 0.02 * seed + shift) for seed in range(seeds)]


def test_curves_that_differ_no_more_than_seeds_are_alike() -> None:
    found = parity_of(curves(), curves(shift=0.03))

    assert found.alike
    assert found.seeds_differ_by == pytest.approx(0.04)
    assert found.differ_by == pytest.approx(0.03)


def test_curves_that_differ_more_than_seeds_are_not_alike() -> None:
    found = parity_of(curves(), curves(shift=0.05))

    assert not found.alike
    assert "more than" in found.why


def test_one_diverging_seed_is_enough_to_differ() -> None:
    after = curves()
    after[1] = [value + 1.0 for value in after[1]]

    assert not parity_of(curves(), after).alike


def test_a_loss_that_is_not_finite_is_not_alike() -> None:
    after = curves()
    after[2][9] = float("nan")

    assert parity_of(curves(), after).why == "a loss is not finite"


def test_the_first_half_does_not_count() -> None:
    after = [[9.0] * 5 + curve[5:] for curve in curves()]

    assert parity_of(curves(), after).alike


@pytest.mark.parametrize(
    "after",
    [curves(seeds=2), [curve[:9] for curve in curves()]],
    ids=["seeds", "points"],
)
def test_curves_of_other_lengths_are_refused(after: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        parity_of(curves(), after)
