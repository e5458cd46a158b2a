"""Two logical GPUs of one card under MirroredStrategy: the same training as on one device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from children import Children
from tests.gpu.conftest import Device
from tests.gpu.pictures import TIMEOUT_S, Pictures

pytestmark = pytest.mark.gpu

TWO = """\
import json
import sys
import tensorflow as tf

for gpu in tf.config.list_physical_devices("GPU")[:1]:
    halves = [tf.config.LogicalDeviceConfiguration(memory_limit=2048) for _ in range(2)]
    tf.config.set_logical_device_configuration(gpu, halves)

from stoker.app.cli.main import invoke

sys.exit(invoke(["train", *sys.argv[1:]], debug=False))
"""


def test_two_logical_gpus_train_what_one_device_trains(
    device: Device, pictures: Pictures, children: Children, tmp_path: Path
) -> None:
    script, facts = tmp_path / "two.py", tmp_path / "facts.json"
    script.write_text(TWO)
    same = ("train.precision=float32", "train.tf32=false", "train.xla=false")
    two = ("train.strategy=mirrored", "train.replicas=2", "train.batch_size=16")

    sets = [part for setting in (*same, *two) for part in ("--set", setting)]
    child = children.python(script, pictures.folder, *sets, "--json", env={"FACTS": str(facts)})
    told = json.loads(child.done(TIMEOUT_S))
    one = pictures.train(*same)

    assert (told["resolved"]["strategy"], told["resolved"]["replicas"]) == ("mirrored", 2)
    assert json.loads(facts.read_text())["logical"] == (2 if device == "gpu" else 0)
    # BatchNormalization takes the mean of each replica's half, so the numbers are not the same.
    assert told["metrics"]["loss"] == pytest.approx(one.result["metrics"]["loss"], abs=0.1)
