"""Two logical GPUs of one card under MirroredStrategy."""

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

from stoker.cli.main import invoke

sys.exit(invoke(["train", *sys.argv[1:]], debug=False))
"""


def test_two_logical_gpus_train_together(
    device: Device, pictures: Pictures, children: Children, tmp_path: Path
) -> None:
    script, facts = tmp_path / "two.py", tmp_path / "facts.json"
    script.write_text(TWO)
    same = ("train.precision=float32", "train.tf32=false", "train.xla=false")
    two = ("train.strategy=mirrored", "train.replicas=2", "train.batch_size=16")

    sets = [part for setting in (*same, *two) for part in ("--set", setting)]
    child = children.python(script, pictures.folder, *sets, "--json", env={"FACTS": str(facts)})
    result = json.loads(child.done(TIMEOUT_S))

    assert (result["resolved"]["strategy"], result["resolved"]["replicas"]) == ("mirrored", 2)
    assert json.loads(facts.read_text())["logical"] == (2 if device == "gpu" else 0)
    # 32 rows a step as on one device; the loss begins at log(2) = 0.69.
    assert result["steps"] == 4 * 5
    assert result["metrics"]["loss"] < 0.4
