"""Trainings that are killed after a checkpoint, and the weights that they end with."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.gpu.pictures import TIMEOUT_S, Pictures

DTYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I64": np.int64, "I32": np.int32}
"""Names in a safetensors file."""

SLOW = {"SLOW_S": "0.2"}
"""Set in all trainings alike: environment variables that the user's code reads are inputs."""

SETTINGS = ("train.epochs=12", "train.steps_per_call=2", "train.checkpoint.every_steps=4")


def weights_of(
    pictures: Pictures, runs: Path, *settings: str, kill: bool
) -> dict[str, NDArray[Any]]:
    """Train, killed once and resumed or not; the float variables of the last checkpoint.

    Args:
        pictures: The experiment.
        runs: Folder of this training's runs.
        settings: More settings.
        kill: SIGKILL after the first checkpoint, and the same command again.
    """
    # The stages before training are done already, with the experiment's settings.
    shutil.copytree(pictures.ingested, runs)
    every = (*SETTINGS, *settings, f"runs={runs}")
    if kill:
        child = pictures.start(*every, env=SLOW)
        _wait_for_checkpoint(runs)
        child.kill()
        code = child.wait(TIMEOUT_S)
        assert code < 0, f"it was not killed in its middle: {child}"
    child = pictures.start(*every, env=SLOW)
    result = json.loads(child.done(TIMEOUT_S))
    if kill:
        assert "continued" in child.err.read_text()
    return _weights(Path(result["output"]) / "checkpoints")


def _wait_for_checkpoint(runs: Path) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not any(_step(path) for path in runs.glob("*/*/train/checkpoints/step-*/manifest.json")):
        assert time.monotonic() < until_s, "no checkpoint came"
        time.sleep(0.005)


def _step(manifest: Path) -> int:
    return int(manifest.parent.name.removeprefix("step-"))


def _weights(checkpoints: Path) -> dict[str, NDArray[Any]]:
    """Source: the safetensors format: a length of 8 bytes, a header of JSON, the data."""
    newest = max(checkpoints.glob("step-*"), key=lambda path: path.name)
    data = (newest / "state.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        if entry["dtype"] in DTYPES:
            values = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]])
            found[name] = values.reshape(entry["shape"])
    return found
