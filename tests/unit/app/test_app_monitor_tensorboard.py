"""`stoker monitor tensorboard`: TensorBoard itself, with the runs of an experiment."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from stoker.jobs.job import Job, write_job
from stoker.telemetry.writers.tensorboard import TensorBoard

COMMAND = [sys.executable, "-m", "stoker", "monitor", "tensorboard"]

STOKER_YAML = """\
name: small
data: {source: data.csv}
model: model:build
label: y
"""


def test_an_experiment_without_runs_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "stoker.yaml").write_text(STOKER_YAML)

    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, timeout=120)

    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "needs a run that has begun to train. Received: none in " in done.stderr
    assert done.stderr.endswith("Run `stoker train` first.\n")


def test_a_missing_tensorboard_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs" / "small" / "r1" / "train" / "tensorboard").mkdir(parents=True)
    (tmp_path / "stoker.yaml").write_text(STOKER_YAML)
    (tmp_path / "path" / "tensorboard").mkdir(parents=True)
    (tmp_path / "path" / "tensorboard" / "__init__.py").write_text("")

    done = subprocess.run(
        [*COMMAND, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "path")},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 2
    assert done.stderr.startswith("stoker: TensorBoard must be installed. Received: ")
    assert done.stderr.endswith("Run `pip install tensorboard`.\n")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("of", ["experiment", "job"])
def test_tensorboard_answers_with_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """A job's: only the run of its newest start."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "stoker.yaml").write_text(STOKER_YAML)
    runs = tmp_path / "runs"
    command = [*COMMAND, str(tmp_path)]
    if of == "job":
        job = Job(name="small", command=("train",), folder=tmp_path, runs=runs, code="0" * 64)
        (write_job(job) / "run").write_text(str(runs / "small" / "r1"))
        command = [*COMMAND[:3], "jobs", "tensorboard", job.id, "--runs", str(runs)]
    for run in ("r1", "r2"):
        board = TensorBoard(tmp_path / "runs" / "small" / run / "train" / "tensorboard")
        board.write(1, {"loss": 0.5})
        board.close()

    with subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True) as process:
        hangs = threading.Timer(120, process.kill)
        hangs.start()
        try:
            assert process.stderr is not None
            address = next(
                match[0]
                for line in process.stderr
                if (match := re.search(r"http://127\.0\.0\.1:\d+/", line))
            )
            with urllib.request.urlopen(f"{address}data/runs", timeout=60) as answer:
                found = json.load(answer)
        finally:
            hangs.cancel()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:  # seen once: TensorBoard went on after the signal
                process.kill()

    name = "train/tensorboard/train"
    wanted = {name} if of == "job" else {f"r1/{name}", f"r2/{name}"}
    assert wanted <= set(found)
    assert of == "experiment" or not any("r2" in each for each in found)
