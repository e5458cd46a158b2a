"""XLA compiles in the background while a training goes on: both use the card."""

from __future__ import annotations

import pytest
from tests.gpu.pictures import Pictures

from stoker.train.config import TEST_SWITCH

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_training_goes_on_with_what_it_has(pictures: Pictures) -> None:
    """Whether the compiler ends in time, and which form of the step is faster, is open."""
    trained = pictures.train(
        *("train.precision=float32", "train.xla=auto", "train.epochs=60"),
        env={TEST_SWITCH: "0"},
    )

    assert "XLA: " in trained.said, trained.result["xla"]
    assert trained.result["steps"] == 60 * 5
    assert trained.result["metrics"]["loss"] < 0.4
