"""Two workers, a parameter server and a chief, as processes: no update is lost, none comes twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.transform import Transform

LR = 2.0**-10
PER_EPOCH = 210
ROWS_A_STEP = 3
"""Of the scenarios of `make test`, whose epochs have 70 steps."""

EVAL_ROWS = 90

pytestmark = [pytest.mark.multiworker, pytest.mark.timeout(1800)]


SCENARIOS = ("counted", "learned", "gone_on", "refused", "sent_twice", "stays", "server_gone")

SOAK = ("counted_long", "stopped_by_signal", "not_finite", "half_precision", "stopped", "back")
"""Scenarios of `make soak` alone."""


@pytest.fixture(scope="module")
def answers(
    in_soak: bool,
    dataset: Dataset,
    transform: Transform,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What every scenario found; all ran on one cluster."""
    out = tmp_path_factory.mktemp("parameter_server")
    ended = subprocess.run(
        [
            sys.executable,
            Path(__file__).with_name("parameter_server_scenarios.py"),
            dataset.root,
            transform.root,
            out,
            *SCENARIOS,
            *(SOAK if in_soak else ()),
        ],
        capture_output=True,
        text=True,
        timeout=1500,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}


def one_after_the_other(steps: int) -> float:
    """Where SGD with momentum takes the weight whose gradient is always 1, in float32."""
    weight, velocity = np.float32(0), np.float32(0)
    for _ in range(steps):
        velocity = velocity * np.float32(0.5) - np.float32(LR)
        weight += velocity
    return float(weight)


COUNTED = pytest.mark.parametrize(
    ("name", "updates"),
    [
        ("counted", 3 * PER_EPOCH // ROWS_A_STEP),
        pytest.param("counted_long", 3 * PER_EPOCH, marks=pytest.mark.soak),
    ],
)


@COUNTED
def test_of_the_updates_by_two_workers_none_is_lost(
    answers: dict[str, Any], name: str, updates: int
) -> None:
    found = answers[name]

    assert found["steps"] == updates
    assert found["iterations"] == [updates]
    assert found["weight"] == -updates * LR
    assert found["metrics"]["val_loss"] == pytest.approx(-updates * LR)


@COUNTED
def test_batchnorms_moving_average_and_the_metrics_count_each_batch_once(
    answers: dict[str, Any], name: str, updates: int
) -> None:
    found = answers[name]

    assert found["moving_means"] == [pytest.approx(2 * (1 - 0.999**updates), rel=1e-4)]
    assert EVAL_ROWS in found["eval_counts"]


@pytest.mark.parametrize(
    ("worker", "updates"),
    [
        pytest.param("back", 2 * PER_EPOCH, marks=pytest.mark.soak),
        ("stays", 2 * PER_EPOCH // ROWS_A_STEP),
    ],
)
def test_a_worker_killed_by_kill_9_loses_no_update_and_doubles_none(
    answers: dict[str, Any], worker: str, updates: int
) -> None:
    """Whether it comes back, or stays away and the other one does its work."""
    found = answers[worker]

    assert len(found["kills"]) == 1
    assert found["steps"] == updates
    assert found["iterations"] == [updates]
    assert found["weight"] == one_after_the_other(updates)


def test_a_step_that_arrives_twice_or_too_late_is_applied_once_and_counted(
    answers: dict[str, Any],
) -> None:
    found = answers["sent_twice"]

    assert (found["batches"], found["repeated"]) == (3, 3)
    assert found["iterations"] == 3
    assert found["weight"] == one_after_the_other(3)


def test_loss_falls_on_data_and_the_metrics_are_those_of_the_exported_average(
    answers: dict[str, Any],
) -> None:
    """BatchNorm, Dropout, an Embedding, a moving average of the weights, AUC."""
    found = answers["learned"]
    epochs = [line for line in found["lines"] if "val_loss" in line]

    assert len(epochs) == 8
    assert epochs[-1]["loss"] < 0.5 * epochs[0]["loss"]
    assert found["metrics"]["val_auc"] > 0.95
    assert found["accuracy_here"] > 0.85


@pytest.mark.soak
def test_mixed_float16_scales_its_loss_and_learns(answers: dict[str, Any]) -> None:
    found = answers["half_precision"]

    assert found["all_finite"]
    assert found["metrics"]["val_accuracy"] > 0.85


def test_a_second_run_goes_on_after_the_last_epoch_of_the_first(answers: dict[str, Any]) -> None:
    first, again, over = (answers["gone_on"][name] for name in ("first", "again", "over"))

    assert (first["steps"], again["steps"]) == (30, 60)
    assert (over["steps"], over["weight"]) == (60, again["weight"])
    assert first["weight"] == one_after_the_other(30)
    assert again["weight"] == one_after_the_other(60)


@pytest.mark.soak
def test_after_a_signal_it_saves_the_applied_updates_and_goes_on_from_there(
    answers: dict[str, Any],
) -> None:
    first, again = answers["stopped_by_signal"]["first"], answers["stopped_by_signal"]["again"]

    assert first["exit_code"] == 75
    assert 0 < first["saved_step"] < 2 * PER_EPOCH
    assert first["iterations"] == [first["saved_step"]]
    assert again["weight"] == one_after_the_other(2 * PER_EPOCH)


@pytest.mark.soak
def test_a_gradient_that_is_not_finite_is_not_applied_and_names_its_step(
    answers: dict[str, Any],
) -> None:
    found = answers["not_finite"]

    assert "the loss and the gradients of step" in found["error"]
    assert np.isfinite(found["weight"])
    assert found["all_finite"]
    assert not found["left_under_way"]


def test_what_needs_one_step_after_the_other_is_refused_in_one_line(
    answers: dict[str, Any],
) -> None:
    lines = list(answers["refused"].values())

    assert len(lines) == 3
    assert all("train.strategy: parameter_server computes gradients" in line for line in lines)
    assert any("a callback with a hook for batches" in line for line in lines)


@pytest.mark.soak
def test_a_worker_that_hangs_is_reported_and_its_step_is_not_given_to_another(
    answers: dict[str, Any],
) -> None:
    """It may be about to send its gradients: only its end would say that they do not come."""
    found = answers["stopped"]

    assert any("no worker has answered for 2 s" in line for line in found["said"])
    assert found["weight"] == one_after_the_other(2 * PER_EPOCH)


def test_a_server_that_is_gone_ends_the_run_in_one_line(answers: dict[str, Any]) -> None:
    found = answers["server_gone"]

    assert "a parameter server is lost" in found["error"]
    assert found["saved_step"] is not None
