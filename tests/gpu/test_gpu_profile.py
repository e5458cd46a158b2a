"""`stoker profile` of an experiment and of a script, with the state of the card during it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from children import Children
from tests.gpu.conftest import Device
from tests.gpu.pictures import TIMEOUT_S, Pictures

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SCRIPT = """\
import keras
import numpy as np

layers = [keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)]
model = keras.Sequential([keras.Input((64,)), *layers])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x, y = np.random.rand(2048, 64).astype("float32"), np.random.randint(0, 10, 2048)
model.fit(x, y, epochs=12, batch_size=64, verbose=0)
"""


def require_device_time(found: Mapping[str, Any], device: Device) -> None:
    """A GPU's time by class of kernel, which adds up; without a GPU there is none."""
    if device == "cpu":
        assert found["device_time"] is None
        return
    assert found["device_time"] is not None, found["device_time_not_measured"]
    assert not found["device_time"]["of_cpu"]
    assert sum(found["device_time"]["shares"].values()) == pytest.approx(1.0)
    assert found["device_time"]["shares"]["products"] > 0


def test_a_script_is_profiled_with_its_gpus(
    device: Device, children: Children, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    # A script of plain Keras takes the whole card's memory, which other tests need.
    child = children.stoker(
        "profile", "--json", "--out", tmp_path / "p", "--", sys.executable, script,
        env={"TF_FORCE_GPU_ALLOW_GROWTH": "true"},
    )  # fmt: skip
    result = json.loads(child.done(TIMEOUT_S))

    assert result["exit_code"] == 0
    (loop,) = result["loops"]
    assert (loop["kind"], loop["line"]) == ("fit", 8)
    require_device_time(loop, device)
    assert result["gpus"] == len(result["gpu_states"]) == (device == "gpu")
    for state in result["gpu_states"]:
        assert state["power_w"] > 0
        assert state["used_bytes"] > 0


def test_an_experiment_is_profiled_with_its_share_of_the_peak(
    device: Device, pictures: Pictures
) -> None:
    child = pictures.children.stoker("profile", pictures.folder, "--budget", "80s", "--json")
    result = json.loads(child.done(TIMEOUT_S))

    assert result["busy_fraction"] > 0
    assert result["diagnosis"]["text"]
    assert 0 < result["machine"]["mfu"] < 1
    assert len(result["machine"]["gpus"]) == (device == "gpu")
    require_device_time(result, device)
