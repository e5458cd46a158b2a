"""Callbacks and a user's own step with variables that lie on two devices."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.train.killed import Trainer


@pytest.fixture(scope="module")
def child(trainer: Trainer) -> dict[str, Any]:
    printed = trainer.script(Path(__file__).with_name("keras_mirrored_child.py"))
    answer: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return answer


def test_an_own_train_step_gives_the_one_device_weights_on_both_replicas(
    child: dict[str, Any],
) -> None:
    for alone, replicas in zip(*child["own_step"].values(), strict=True):
        assert replicas[0] == replicas[1]
        np.testing.assert_allclose(replicas[0], alone, rtol=1e-5, atol=1e-6)


def test_several_outputs_train_to_the_same_weights_on_two_replicas(child: dict[str, Any]) -> None:
    """Losses, metrics and weights too, where replicas have 3 and 2 rows, then 2 and 1."""
    alone, mirrored = child["several_outputs"]["alone"], child["several_outputs"]["mirrored"]
    for (ours,), theirs in zip(alone["weights"], mirrored["weights"], strict=True):
        assert theirs[0] == theirs[1]
        np.testing.assert_allclose(theirs[0], ours, rtol=1e-4, atol=1e-6)
    assert mirrored["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert {"kind_accuracy", "size_mae"} <= alone["metrics"].keys()
    assert mirrored["metrics"] == pytest.approx(alone["metrics"], rel=1e-5)


def test_a_callback_sets_the_rate_of_both_replicas(child: dict[str, Any]) -> None:
    assert child["callbacks"]["rate"] == [0.25, 0.25]


def test_the_best_weights_outlive_a_resume_and_go_back_to_both_replicas(
    child: dict[str, Any],
) -> None:
    seen = child["callbacks"]

    assert seen["stopped"] is True
    assert seen["restored"] == seen["after"]
