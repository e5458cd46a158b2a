"""Health, memory and out of memory where a process of its own is needed; nothing ran on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SCENARIOS = Path(__file__).with_name("health_scenarios.py")


@pytest.fixture(scope="module")
def seen(in_soak: bool) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCENARIOS), *(["--all"] * in_soak)],
        env=os.environ
        | {
            # Freed tensors go back to the system at once, so that each peak is its own.
            "MALLOC_MMAP_THRESHOLD_": "65536",
            # Address space is what is limited, and each thread's own arena would reserve 64 MiB of it.
            "MALLOC_ARENA_MAX": "1",
            # oneDNN's allocator waits 10 s for memory that is never freed.
            "TF_ENABLE_ONEDNN_OPTS": "0",
        },
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_device_without_variables_is_reported_and_a_mirrored_model_is_not(
    seen: dict[str, Any],
) -> None:
    assert (
        seen["devices"]["idle"] == "2 accelerators are visible, and no variable is placed on CPU:1"
    )
    assert seen["devices"]["used"]


def test_what_was_made_outside_the_scope_is_named_and_only_that(seen: dict[str, Any]) -> None:
    assert seen["devices"]["outside"].endswith("sequential/dense/kernel, sequential/dense/bias")
    assert seen["devices"]["inside"]


def test_an_operation_that_does_not_run_on_the_accelerator_is_named_with_its_layer(
    seen: dict[str, Any],
) -> None:
    assert "Sin" in seen["on host"]
    assert "on_host" in seen["on host"]
    assert "MatMul" not in seen["on host"]
    assert seen["all on it"] is None


def test_the_first_bad_layer_of_a_mirrored_model_is_found(seen: dict[str, Any]) -> None:
    assert seen["bad on two"] == {"place": "gradient", "name": "root"}


def test_a_setting_that_comes_too_late_is_refused_in_one_line(seen: dict[str, Any]) -> None:
    assert seen["too late"].startswith("train.memory must be set before TensorFlow is used")


@pytest.mark.parametrize("mode", ["graph", pytest.param("xla", marks=pytest.mark.soak)])
def test_rematerialization_saves_memory(seen: dict[str, Any], mode: str) -> None:
    peaks = seen["remat"][mode]

    assert peaks["remat"] < 0.6 * peaks["plain"]


@pytest.mark.soak
def test_rematerialization_changes_no_gradient_on_any_replica(seen: dict[str, Any]) -> None:
    assert seen["remat on two"]["equal"]


def test_a_step_that_does_not_fit_is_halved_until_it_does_with_the_same_gradient(
    seen: dict[str, Any],
) -> None:
    assert "1 GiB for a float tensor of 32768 x 8192 on CPU:0" in seen["oom"]["said"][0]
    assert seen["oom"]["rows"] == 2**15
    assert seen["oom"]["close"]


@pytest.mark.soak
def test_xla_running_out_of_memory_is_recognized_too(seen: dict[str, Any]) -> None:
    [said] = seen["oom xla"]["said"]

    assert "32.00GiB" in said
    assert seen["oom xla"]["rows"] == 2**20
