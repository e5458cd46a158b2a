"""Without `train.deterministic`, a resumed training differs no more than two uninterrupted ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.gpu.killing import weights_of
from tests.gpu.pictures import Pictures

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TIMES = 4.0
"""Two trainings are one sample of how far apart they are: the third may be so many times as far."""

ROUNDING = 1e-5
"""Smallest relative distance that counts as different."""


def distance(one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]) -> float:
    """How far apart all float variables are, relative to their size."""
    names = [name for name in one if one[name].dtype == np.float32]
    a, b = (np.concatenate([each[name].ravel() for name in names]) for each in (one, other))
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def test_a_killed_training_lies_within_the_spread_of_two_that_were_not(
    pictures: Pictures, tmp_path: Path
) -> None:
    first, second, killed = (
        weights_of(pictures, tmp_path / str(number), kill=number == 2) for number in range(3)
    )

    spread = max(distance(first, second), ROUNDING)
    assert min(distance(first, killed), distance(second, killed)) <= TIMES * spread
