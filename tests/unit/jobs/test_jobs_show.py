"""`stoker jobs show` and `tensorboard`: the run of a job as far as it has come."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.app.job_run import run_of_job
from stoker.cli.main import invoke
from stoker.cluster.processes.identity import identity_of
from stoker.core.errors import ConfigError
from stoker.jobs.forward import PortPair, parse_ports
from stoker.jobs.job import Job, Resources, write_job
from stoker.jobs.places import Submitted, add_to_index, write_submitted
from stoker.jobs.provider import Phase
from stoker.jobs.providers.local.record import LocalRecord, write_record
from stoker.telemetry.targets import published

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
    assert "utilization:  U 93% busy, W 1.2%, goodput so far 50.0%" in lines
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


def running_here(place: Path) -> None:
    mine = identity_of(os.getpid())
    write_record(place, LocalRecord(supervisor=mine, phase=Phase.RUNNING, submitted_s=time.time()))
    write_submitted(place, Submitted(target="local", scheduler_id=str(mine.pid), submitted_s=7.0))


def test_ports_of_a_job_on_this_machine_are_printed(
    trained: Path, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    running_here(trained)
    assert invoke(["jobs", "port-forward", trained.name, "8080:6006"], debug=False) == 0
    assert capsys.readouterr().out.endswith(": 127.0.0.1:6006\n")

    assert invoke(["jobs", "port-forward", trained.name], debug=False) == 2
    assert "its run announced no port" in capsys.readouterr().err
    run = run_of_job(trained)
    assert run is not None
    with published(job.runs, run.folder.name, "127.0.0.1:9123"):
        assert invoke(["jobs", "port-forward", trained.name], debug=False) == 0
    assert capsys.readouterr().out.endswith(": 127.0.0.1:9123\n")


@pytest.mark.parametrize("text", ["", ":", "x", "0", "1:0", "70000", "1:2:3", "-1", "80:"])
def test_what_is_not_a_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a port is"):
        parse_ports(text)


def test_ports_are_local_and_remote() -> None:
    assert parse_ports("9100") == PortPair(local=9100, remote=9100)
    assert parse_ports("0:9100") == PortPair(local=0, remote=9100)


def test_a_job_whose_folder_of_runs_is_elsewhere_says_where_its_progress_is(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    place = write_job(job)
    add_to_index(place)
    running_here(place)
    assert invoke(["jobs", "show", place.name], debug=False) == 0
    assert f"{job.runs} of the workers is not seen from here; its" in capsys.readouterr().out
