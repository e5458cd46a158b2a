"""`stoker monitor tensorboard`: TensorBoard itself, with the runs of an experiment."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

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
    assert "must have a run that has begun to train. Received: none in " in done.stderr
    assert done.stderr.endswith("Run `stoker train` first.\n")


def test_tensorboard_answers_with_the_runs(tmp_path: Path) -> None:
    (tmp_path / "stoker.yaml").write_text(STOKER_YAML)
    for run in ("r1", "r2"):
        board = TensorBoard(tmp_path / "runs" / "small" / run / "train" / "tensorboard")
        board.write(1, {"loss": 0.5})
        board.close()

    with subprocess.Popen(
        [*COMMAND, str(tmp_path), "--port", "0"], stderr=subprocess.PIPE, text=True
    ) as process:
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
            process.send_signal(signal.SIGTERM)
            hangs.cancel()

    assert {"r1/train/tensorboard/train", "r2/train/tensorboard/train"} <= set(found)
