"""`stoker jobs show` and `tensorboard`: the run of a job as far as it has come."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.app.job_run import run_of_job
from stoker.cli.main import invoke
from stoker.jobs.job import Job, Resources, write_job
from stoker.jobs.places import add_to_index

SCALARS = (
    {"step": 10, "busy_fraction": 0.93, "input_wait": 0.5},
    {"step": 20, "loss": "nan", "epoch": 2.0, "busy_fraction": "nan"},
    {"step": 30, "input_wait": 0.012},
)


@pytest.fixture
def trained(job: Job) -> Path:
    """The folder of a job whose run is under way; a line of its metrics is half written."""
    place = write_job(job)
    add_to_index(place)
    train = job.runs / "small" / "20261128T010203Z-0a1b" / "train"
    (train / "tensorboard").mkdir(parents=True)
    lines = [json.dumps(each) for each in SCALARS]
    (train / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 40, "inp')
    account = {
        "parts": {"start": 20.0, "steps": 60.0, "other_stages": 300.0},
        "input_wait_s": 6.0,
        "waiting_s": 40.0,
        "processes": 2,
        "repeated_steps": 0,
        "restarts": {"killed": 1},
        "step": 30,
        "alive": None,
        "end": "done",
    }
    (train / "wall_time.json").write_text(json.dumps(account))
    (place / "run").write_text(str(train.parent))
    return place


def test_a_job_shows_how_busy_its_training_is(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["jobs", "show", trained.name], debug=False) == 0
    lines = capsys.readouterr().out.splitlines()

    run = run_of_job(trained)
    assert run is not None
    assert f"run:          {run.folder}" in lines
    assert "step:         30, epoch 2" in lines
    assert "utilization:  U 93.0%, W 1.2%, goodput so far 50.0%" in lines
    assert f"TensorBoard:  stoker jobs tensorboard {trained.name}" in lines

    assert invoke(["jobs", "show", trained.name, "--json"], debug=False) == 0
    facts = json.loads(capsys.readouterr().out)["run"]
    assert facts == {
        "folder": str(run.folder),
        "step": 30,
        "epoch": 2.0,
        "busy_fraction": 0.93,
        "input_wait": 0.012,
        "mfu": None,
        "goodput": 0.5,
    }


def test_a_job_whose_run_is_missing_or_has_not_trained_shows_no_numbers(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path((trained / "run").read_text())
    for path in sorted(run.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert invoke(["jobs", "show", trained.name], debug=False) == 0
    shown = capsys.readouterr().out
    assert f"run:          {run}" in shown
    assert not any(word in shown for word in ("utilization", "TensorBoard", "step:"))
    assert invoke(["jobs", "tensorboard", trained.name], debug=False) == 2
    assert f"no {run}/train/tensorboard" in capsys.readouterr().err

    run.rmdir()
    assert run_of_job(trained) is None
    assert invoke(["jobs", "tensorboard", trained.name], debug=False) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "must have begun to train. Received: no run yet." in error


def test_a_job_shows_the_gpu_hours_of_each_start(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    needs = Resources(workers=4, gpus=2, time_limit_s=8 * 3600.0)
    limited = replace(job, resources=needs)
    for each in (job, limited):
        add_to_index(write_job(each))
        assert invoke(["jobs", "show", each.id], debug=False) == 0

    shown = capsys.readouterr().out
    assert shown.count("budget:") == 1
    assert "budget:       64 GPU hours for each start\n" in shown
