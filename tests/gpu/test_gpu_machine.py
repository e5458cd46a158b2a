"""The machine as Stoker sees it: doctor, devices, NVML, and how much memory a training takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from children import Children
from tests.gpu.conftest import Device
from tests.gpu.pictures import TIMEOUT_S, Pictures

from stoker.cluster.doctor.gpus import read_gpus
from stoker.cluster.doctor.visible import watched_gpus

pytestmark = pytest.mark.gpu

DEVICES = """\
import json
import tensorflow as tf
from stoker.cluster.devices import find_devices
seen = tf.config.list_physical_devices("GPU")
details = [tf.config.experimental.get_device_details(gpu) for gpu in seen]
print(json.dumps({
    "stoker": [[gpu.name, list(gpu.compute_capability)] for gpu in find_devices().gpus],
    "tensorflow": [[d["device_name"], list(d["compute_capability"])] for d in details],
}))
"""

LIMIT_MB = 512


def test_doctor_finds_no_error_on_a_healthy_machine(device: Device, children: Children) -> None:
    output = children.json("doctor", "--no-disk", timeout_s=TIMEOUT_S)

    assert [each for each in output["findings"] if each["severity"] == "error"] == []
    assert len(output["gpus"]["states"]) == len(output["framework"]["gpus"])
    assert bool(output["gpus"]["states"]) == (device == "gpu")
    assert "machine code" not in json.dumps(output["findings"])


def test_stoker_and_tensorflow_see_the_same_devices(
    device: Device, children: Children, tmp_path: Path
) -> None:
    script = tmp_path / "devices.py"
    script.write_text(DEVICES)

    found = json.loads(children.python(script).done(TIMEOUT_S).splitlines()[-1])

    assert found["stoker"] == found["tensorflow"]
    assert bool(found["stoker"]) == (device == "gpu")


def test_memory_grows_with_need_and_nvml_shows_the_training(
    device: Device, pictures: Pictures
) -> None:
    with watched_gpus() as summary:
        trained = pictures.train("train.seed=1")

    assert trained.result["steps"] > 0
    if device == "cpu":
        assert (trained.facts["gpus"], summary(), read_gpus().states) == (0, [], ())
        return
    assert trained.facts["growth"] == [True]
    assert "GPU" in trained.facts["device"]
    (seen,) = summary()
    total = read_gpus().states[seen["index"]].memory_bytes
    assert 0 < trained.facts["peak_bytes"][0] < seen["used_bytes"] < total / 2
    assert seen["power_w"] > 0
    assert seen["clock_mhz"] > 0


@pytest.mark.slow
def test_a_memory_limit_holds(device: Device, pictures: Pictures) -> None:
    trained = pictures.train("train.seed=2", f"train.memory.limit_mb={LIMIT_MB}")

    assert trained.facts["limits_mb"] == [LIMIT_MB] * trained.facts["gpus"]
    assert all(peak <= LIMIT_MB << 20 for peak in trained.facts["peak_bytes"])
    assert bool(trained.facts["gpus"]) == (device == "gpu")
