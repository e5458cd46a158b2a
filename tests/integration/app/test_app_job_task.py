"""`stoker job-task` runs a command of a job, on the unpacked code, with the paths of the job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.job_folder import submitted

from stoker.app.task.job_start import start_job

HANG_S = 600.0
"""Longest wait for a process: it ends one that hangs, not one on a slow machine."""


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "local").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "local"))
    monkeypatch.setenv("TOKEN", "t0ken-of-the-user")
    folder = tmp_path / "trip"
    folder.mkdir()
    (folder / "stoker.yaml").write_text(
        "name: trip\ndata: {source: trips.csv}\nmodel: model:build\nlabel: tip\n"
    )
    (folder / "model.py").write_text("def build(features):\n    return None\n")
    (folder / "trips.csv").write_text("km,tip\n" + "".join(f"{n},{n % 3}\n" for n in range(90)))
    return folder


def task(job: Path) -> subprocess.Popen[str]:
    """Start the only task of the next start."""
    start = ["job-task", str(job), "--incarnation", str(start_job(job))]
    return subprocess.Popen(
        [sys.executable, "-m", "stoker", *start],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=job,
    )


def test_a_task_runs_the_command_on_the_paths_of_the_job(experiment: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs of all"
    job = submitted(experiment, runs, "ingest", "--set", "data.seed=3", secrets=("TOKEN",))
    (experiment / "stoker.yaml").write_text("it has changed since the submission")

    with task(job) as process:
        said, error = process.communicate(timeout=HANG_S)

    assert (process.returncode, error) == (0, ""), said
    (run,) = (path for path in (runs / "trip").iterdir() if (path / "run.json").is_file())
    assert (run / "data" / "manifest.json").is_file()
    assert '"seed": 3' in (run / "run.json").read_text()
    first, *lines, last = (job / "logs" / "task-0.log").read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines] == said.splitlines()
    assert re.search(r"ingest +\d", said)
    assert "start 1 on " in first
    assert last.endswith("start 1: the command ended with exit code 0")
    assert sorted(path.name for path in experiment.iterdir()) == [
        *("model.py", "stoker.yaml", "trips.csv")
    ]


def test_a_task_that_an_elastic_job_does_not_need_says_so_and_ends_at_once(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submitted(experiment, tmp_path / "runs", "train", workers=4)
    description = json.loads((job / "job.json").read_text())
    description["resources"]["min_workers"] = 2
    (job / "job.json").write_text(json.dumps(description))
    monkeypatch.setenv("STOKER_RANK", "2")
    monkeypatch.setenv("STOKER_TASKS", "3")

    with task(job) as process:
        said, error = process.communicate(timeout=HANG_S)

    assert (process.returncode, error) == (0, "")
    assert said == "task 2 is not needed: 2 workers share the work evenly, not more\n"
    assert said.strip() in (job / "logs" / "task-2.log").read_text()


def test_a_mistake_of_the_user_and_a_request_to_end_have_codes_of_their_own(
    experiment: Path, tmp_path: Path
) -> None:
    wrong = submitted(
        experiment,
        tmp_path / "runs",
        *("ingest", "--set", "train.epochs=t0ken-of-the-user"),
        secrets=("TOKEN",),
    )
    with task(wrong) as process:
        said, _ = process.communicate(timeout=HANG_S)

    assert process.returncode == 2, said
    assert "stoker: " in said
    log = (wrong / "logs" / "task-0.log").read_text()
    assert re.search(r"stoker: train.epochs must be .* Received: '\*\*\*'", log), log
    assert "t0ken" not in log

    job = submitted(experiment, tmp_path / "runs", "ingest")
    with task(job) as process:
        until_s = time.monotonic() + HANG_S
        while not (job / "logs" / "task-0.log").exists() and time.monotonic() < until_s:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        said, error = process.communicate(timeout=HANG_S)

    assert process.returncode == 75, said + error
    assert not [name for name in os.listdir(tmp_path / "runs") if name.startswith(".cluster")]
