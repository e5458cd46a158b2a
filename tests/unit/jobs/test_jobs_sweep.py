"""Sweeps: combinations, and what is refused before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.cli.main import invoke
from stoker.core.errors import ConfigError
from stoker.jobs.job import Job, write_job
from stoker.jobs.providers.slurm.script import tasks
from stoker.jobs.submission import find_predecessors
from stoker.jobs.sweep import Element, Sweep, combinations, find_sweep, sweeps, write_sweep

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def stoker(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs a command in the experiment's folder; returns exit code, stdout and stderr."""
    monkeypatch.chdir(experiment)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = invoke(list(arguments), debug=False)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_each_combination_of_values_occurs_once_and_the_last_key_changes_first() -> None:
    assert combinations(["a=1,2", "b.c=x, y"]) == [
        ("a=1", "b.c=x"),
        ("a=1", "b.c=y"),
        ("a=2", "b.c=x"),
        ("a=2", "b.c=y"),
    ]
    assert combinations(["a=[1,2],[3]", "b={x: 1, y: 2},'p,[q'"]) == [
        ("a=[1,2]", "b={x: 1, y: 2}"),
        ("a=[1,2]", "b='p,[q'"),
        ("a=[3]", "b={x: 1, y: 2}"),
        ("a=[3]", "b='p,[q'"),
    ]


@pytest.mark.parametrize("wrong", ["", "a", "a=", "=1", "a=1,,2", "a=1,1", "a=1,"])
def test_a_sweep_that_is_not_key_and_values_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--sweep must"):
        combinations([wrong])
    with pytest.raises(ConfigError, match="each key"):
        combinations(["a=1", "a=2"])
    with pytest.raises(ConfigError, match="at most 1000 combinations"):
        combinations([f"{key}={','.join(map(str, range(32)))}" for key in "ab"])


def test_tasks_of_an_array_are_spans_with_their_limit() -> None:
    assert tasks([0, 1, 2, 5, 7, 8], 2) == "0-2,5,7-8%2"
    assert tasks([4], None) == "4"


def test_a_dry_run_lists_the_jobs_and_writes_nothing(
    stoker: Run, experiment: Path, home: Path
) -> None:
    before = sorted(experiment.rglob("*"))
    sweep = ("--sweep", "train.epochs=3,5", "--sweep", "train.batch_size=32,64")

    code, out, err = stoker("submit", ".", "--on", "local", *sweep, "--dry-run", "--json")

    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert [each["settings"] for each in facts["elements"]] == [
        ["train.epochs=3", "train.batch_size=32"],
        ["train.epochs=3", "train.batch_size=64"],
        ["train.epochs=5", "train.batch_size=32"],
        ["train.epochs=5", "train.batch_size=64"],
    ]
    assert len({each["job"] for each in facts["elements"]}) == 4
    _, again, _ = stoker("submit", ".", "--on", "local", *sweep, "--dry-run", "--at-once", "3")
    assert facts["sweep"] in again, "how many run at once changes no sweep"
    assert sorted(experiment.rglob("*")) == before
    assert not home.exists()


def test_a_sweep_is_named_by_the_beginning_of_its_id_and_stands_for_all_of_its_jobs(
    job: Job,
) -> None:
    jobs = [replace(job, command=("ingest", f"--set=data.seed={seed}")) for seed in (1, 2)]
    for each in jobs:
        write_job(each)
    elements = [Element(job=each.id, settings=each.command[1:]) for each in jobs]
    sweep = Sweep(name=job.name, runs=job.runs, elements=tuple(elements))
    sweep.place.mkdir()
    write_sweep(sweep)
    write_sweep(sweep)

    assert (sweep.place / "1").resolve() == jobs[1].place
    assert sweeps([job.runs]) == {sweep.id: sweep}
    assert find_sweep(sweep.id[:-2], [job.runs]) == sweep
    assert find_sweep("small", [job.runs]) is None, "it fits jobs, too"
    assert find_predecessors([sweep.id], job.runs) == tuple(sorted(each.id for each in jobs))
    assert find_predecessors([f"{sweep.id}/1"], job.runs) == (jobs[1].id,)
    for wrong in ("2", "-1", "x", ""):
        with pytest.raises(ConfigError, match=f"the elements of sweep {sweep.id} are 0 to 1"):
            find_predecessors([f"{sweep.id}/{wrong}"], job.runs)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--at-once", "2"], "--at-once needs --sweep. Received: 2."),
        (["--sweep", "train.epochs"], "--sweep must be KEY=VALUE,VALUE. Received: 'train.epochs'."),
        (["--sweep", "train.epoch=1,2"], "train.epoch is not a setting"),
        (["--sweep", "train.epochs=1,x"], "train.epochs"),
        (["--sweep", f"data.seed={','.join(map(str, range(101)))}"], "at most 100 combinations"),
        (["--sweep", "train.epochs=1,2", "--workers", "0"], "--workers must be from 1"),
    ],
)
def test_a_wrong_sweep_is_one_line_and_leaves_nothing(
    stoker: Run, experiment: Path, home: Path, arguments: list[str], said: str
) -> None:
    code, out, err = stoker("submit", ".", "--on", "local", *arguments)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert not (experiment / "runs").exists()
    assert not home.exists()
