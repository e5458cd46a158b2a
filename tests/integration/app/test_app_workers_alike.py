"""`stoker train --workers N` trains to the weights of one process with the same global batch."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.cli.main import invoke
from stoker.train.checkpoints.store import best

pytestmark = [pytest.mark.multiworker, pytest.mark.slow]

HANG_S = 600.0
"""Longest wait for a process: it ends one that hangs, not one on a slow machine."""

GLOBAL_BATCH = 24
"""Of 300 rows, the last batch is a short one, which 3 workers share unevenly."""

STOKER_YAML = """\
name: alike
data: {source: data.csv, split_by: id}
model: model:build
label: bought
train: {epochs: 1, steps_per_call: 4}
"""

MODEL_PY = """\
import keras
from keras import layers


def build(features):
    x = layers.Concatenate()([keras.ops.expand_dims(features[n], -1) for n in ("age", "spent")])
    x = layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))(x / 50.0)
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy")
    return model
"""

WITH_ALL = ["train.clip_norm=0.05", "train.ema=0.9"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alike")
    (folder / "stoker.yaml").write_text(STOKER_YAML)
    (folder / "model.py").write_text(MODEL_PY)
    rows = ["id,age,spent,bought"]
    rows += [f"{n},{20 + n % 50}.5,{(n * 37) % 90}.5,{int(n % 50 > 25)}" for n in range(400)]
    (folder / "data.csv").write_text("\n".join(rows) + "\n")
    return folder


def trained(folder: Path, *, workers: int, passes: int = 1, settings: list[str]) -> dict[str, Any]:
    """The arrays of the state that is exported; this process is the one of a single worker."""
    sizes = [f"train.batch_size={GLOBAL_BATCH // workers // passes}", f"train.accumulate={passes}"]
    command = ["train", str(folder), "--json", "--again"]
    command += [part for setting in (*sizes, *settings) for part in ("--set", setting)]
    found = by_launcher(command, workers) if workers > 1 else in_this_process(command)
    assert found["resolved"]["strategy"] == ("multi_worker" if workers > 1 else "one_device")
    assert found["resolved"]["workers"] == workers
    return best(Path(found["run"]) / "train" / "checkpoints").arrays()


def by_launcher(command: list[str], workers: int) -> dict[str, Any]:
    started = [sys.executable, "-m", "stoker", *command, "--workers", str(workers)]
    done = subprocess.run(started, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def in_this_process(command: list[str]) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert invoke(command, debug=False) == 0
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def assert_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    # Each replica has sums of metrics of its own.
    floats = [name for name, value in one.items() if np.issubdtype(value.dtype, np.floating)]
    weights = [name for name in floats if not name.startswith("metrics/")]
    assert len(weights) >= 4
    for name in weights:
        np.testing.assert_allclose(other[name], one[name], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return trained(folder, workers=1, settings=[])


@pytest.mark.soak
def test_three_workers_end_where_one_process_does(folder: Path, alone: dict[str, Any]) -> None:
    assert_alike(alone, trained(folder, workers=3, settings=[]))


def test_two_workers_clip_average_and_accumulate_as_one_process_does(
    folder: Path, alone: dict[str, Any]
) -> None:
    one = trained(folder, workers=1, passes=2, settings=WITH_ALL)
    two = trained(folder, workers=2, passes=2, settings=WITH_ALL)

    assert_alike(one, two)
    kernels = [name for name in one if name.endswith("kernel")]
    assert kernels
    assert any(not np.allclose(one[name], alone[name], rtol=1e-2) for name in kernels)
