"""A submission is made once, or not at all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.app.experiment import load_experiment, with_absolute_paths
from stoker.app.submission import JobRequest, prepare_job, prepare_sweep
from stoker.cli.main import invoke
from stoker.cluster.processes.identity import identity_of
from stoker.core.errors import ConfigError, UserError
from stoker.jobs.job import Job, Resources, write_job
from stoker.jobs.overview import list_jobs, read_here
from stoker.jobs.places import Submitted, add_to_index, write_submitted
from stoker.jobs.provider import Phase
from stoker.jobs.providers.local.record import LocalRecord, write_record
from stoker.jobs.submission import submit
from stoker.jobs.targets import read_targets, targets_file

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


def running(job: Job, *, target: str = "local", phase: Phase = Phase.RUNNING) -> None:
    """Write what a supervisor that runs would: this process is it."""
    place = write_job(job)
    mine = identity_of(os.getpid())
    write_record(place, LocalRecord(supervisor=mine, phase=phase, submitted_s=time.time()))
    write_submitted(place, Submitted(target=target, scheduler_id=str(mine.pid), submitted_s=7.0))
    add_to_index(place)


@pytest.mark.parametrize("target", ["local", "cluster"])
def test_runs_in_a_bucket_are_one_line_and_make_nothing(
    stoker: Run, experiment: Path, target: str
) -> None:
    with (experiment / "stoker.yaml").open("a") as stream:
        stream.write("targets:\n  cluster: {provider: kubernetes, image: i}\n")
    before = sorted(experiment.rglob("*"))
    code, _, errors = stoker("submit", ".", "--on", target, "--set", "runs=s3://bucket/runs")
    assert code == 2
    (line,) = errors.splitlines()
    assert "runs must be a folder" in line
    assert "Received: 's3://bucket/runs'" in line
    assert sorted(experiment.rglob("*")) == before


def test_the_same_experiment_is_the_same_job_and_any_difference_another(experiment: Path) -> None:
    _, job, archive = prepare_job(JobRequest(folder=experiment))

    assert prepare_job(JobRequest(folder=experiment))[1].id == job.id
    assert job.runs == experiment / "runs"
    assert set(archive.sizes) == {
        f"experiment/{name}" for name in ("model.py", "layers.py", "stoker.yaml")
    }
    for other in (
        JobRequest(folder=experiment, overrides=["train.epochs=3"]),
        JobRequest(folder=experiment, resources=Resources(workers=2)),
        JobRequest(folder=experiment, resources=Resources(memory_gib=2.0)),
        JobRequest(folder=experiment, verb="run"),
    ):
        assert prepare_job(other)[1].id != job.id
    (experiment / "layers.py").write_text("UNITS = 9\n")
    assert prepare_job(JobRequest(folder=experiment))[1].id != job.id


def elastic_resources(experiment: Path, **needs: int) -> Resources:
    request = JobRequest(
        folder=experiment,
        overrides=["train.elastic={min: 2, max: 8}"],
        resources=Resources(**needs),
    )
    return prepare_job(request)[1].resources


def test_a_job_of_an_elastic_training_names_its_fewest_workers(experiment: Path) -> None:
    assert elastic_resources(experiment, workers=8).min_workers == 2
    assert elastic_resources(experiment, workers=4).min_workers == 2
    assert elastic_resources(experiment, workers=2).min_workers is None, (
        "fewer than two are not possible"
    )
    assert elastic_resources(experiment, workers=4, gpus=2).min_workers is None
    for needs in ({"workers": 6}, {"workers": 1}, {"workers": 8, "gpus": 2}):
        with pytest.raises(ConfigError, match=r"must have 2, 4, 8 (workers|replicas)"):
            elastic_resources(experiment, **needs)


def test_paths_of_a_submission_mean_the_same_on_the_machines_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    found = with_absolute_paths(["data={source: a.csv}", "runs=s3://b/c", "train.epochs=3"])

    assert found[:2] == ["data={source: a.csv}", "train.epochs=3"]
    assert found[2:] == [f'data.source="{tmp_path}/a.csv"', 'runs="s3://b/c"']


def test_each_setting_is_in_the_command_of_a_job_once_and_the_last_one_counts(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(experiment)
    sets = ["train.epochs=2", "data.source=b.csv", "train.epochs=3", "data. source = c.csv"]
    source = f'--set=data.source="{experiment}/c.csv"'

    def command(*overrides: str) -> tuple[str, ...]:
        return prepare_job(JobRequest(folder=experiment, overrides=overrides))[1].command

    assert command(*sets) == ("train", "--set=train.epochs=3", source)
    assert command("train.epochs=3", "train={epochs: 4}", "train.epochs=3") == (
        *("train", "--set=train={epochs: 4}", "--set=train.epochs=3"),
    )
    request = JobRequest(folder=experiment, overrides=["train.epochs=2", "runs=r"])
    *_, jobs, _ = prepare_sweep(request, ["train.epochs=5,6"])
    runs = f'--set=runs="{experiment}/r"'
    assert [each.command for each in jobs] == [
        ("train", f"--set=train.epochs={epochs}", runs) for epochs in (5, 6)
    ]


def test_targets_of_an_experiment_are_not_settings_of_its_runs(experiment: Path) -> None:
    before = load_experiment(experiment).to_json()
    with (experiment / "stoker.yaml").open("a") as stream:
        stream.write("targets: {desk: {provider: local}}\n")

    loaded = load_experiment(experiment)

    assert loaded.targets == {"desk": {"provider": "local"}}
    assert loaded.to_json() == before


def test_a_dry_run_lists_the_code_and_writes_nothing(
    stoker: Run, experiment: Path, home: Path
) -> None:
    before = sorted(experiment.rglob("*"))

    options = ("--cpus", "1", "--memory", "0.5")
    code, out, _ = stoker("submit", ".", "--on", "local", "--dry-run", "--json", *options)

    facts = json.loads(out)
    assert code == 0
    needs = facts["description"]["resources"]
    assert (needs["cpus"], needs["memory_gib"]) == (1, 0.5)
    assert facts["submitted"] is False
    assert "experiment/model.py" in facts["code"]
    assert sorted(experiment.rglob("*")) == before
    assert not home.exists()


def test_a_job_that_runs_is_found_and_not_submitted_again(stoker: Run, experiment: Path) -> None:
    _, job, _ = prepare_job(JobRequest(folder=experiment))
    running(job)

    code, out, _ = stoker("submit", ".", "--on", "local")

    assert code == 0
    assert f"job {job.id} is there already on local" in out
    assert "nothing was submitted a second time" in out


def test_labels_reach_the_job_and_its_description(stoker: Run, experiment: Path) -> None:
    labels = ("--label", "team=search", "--label", "cost=42", "--label", "team=ads")

    code, out, err = stoker("submit", ".", "--on", "local", *labels, "--dry-run", "--json")

    assert code == 0, err
    assert json.loads(out)["description"]["labels"] == {"cost": "42", "team": "ads"}


def test_a_job_that_may_run_elsewhere_is_not_submitted_to_another_target(experiment: Path) -> None:
    _, job, archive = prepare_job(JobRequest(folder=experiment))
    running(job, target="gone")
    targets = read_targets({}, file=experiment / "stoker.yaml")

    with pytest.raises(UserError, match="must be over at target 'gone'"):
        submit(job, archive, target=targets["local"], targets=targets)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--on", "locla"],
            "--on must be the name of a target. Received: 'locla'. Did you mean 'local'?",
        ),
        (["--on", "local", "--workers", "0"], "--workers must be from 1 to 1024"),
        (["--on", "local", "--gpus", "8000"], "--gpus must be small enough"),
        (["--on", "local", "--cpus", "9000"], "--cpus must be small enough"),
        (["--on", "local", "--workers", "2", "--memory", "60000"], "2 workers with 60000 each"),
        (["--on", "local", "--memory", "nan"], "--memory must be from 0.125 to 65536 GiB"),
        (["--on", "local", "--memory", "0"], "--memory must be from 0.125 to 65536 GiB"),
        (["--on", "local", "--time-limit", "soon"], "--time-limit must be a duration"),
        (["--on", "local", "--time-limit", ""], "--time-limit must be a duration"),
        (["--on", "local", "--secret", ""], "--secret must be the name of an environment variable"),
        (
            ["--on", "local", "--secret", "KEY=value"],
            "variable. Received: 'KEY'. Give only the name",
        ),
        (["--on", "local", "--label", "team"], "--label must be KEY=VALUE"),
        (["--on", "local", "--label", "team=a b"], "--label must be KEY=VALUE"),
        (["--on", "local", "--label", "stoker/job=x"], "--label must be KEY=VALUE"),
        (["--on", "local", "--set", "train.epoch=3"], "train.epoch is not a setting"),
        (["--on", "local", "--set", "name=a b"], "the name of a job must be"),
        (["--on", "local", "--after", "tiny-1"], "no job has this ID"),
    ],
)
def test_a_wrong_submission_is_one_line_and_leaves_nothing(
    stoker: Run, experiment: Path, home: Path, arguments: list[str], said: str
) -> None:
    code, out, err = stoker("submit", ".", *arguments)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert not (experiment / "runs").exists()
    assert not home.exists()


@pytest.mark.parametrize(
    ("target", "phase", "said"),
    [
        ("gone", Phase.RUNNING, "of target 'local'. Received: ID, which is at 'gone'"),
        ("local", Phase.FAILED, "done, running or waiting. Received: ID is failed."),
        ("local", Phase.STOPPED, "done, running or waiting. Received: ID is stopped."),
        ("local", Phase.UNKNOWN, "done, running or waiting. Received: ID is unknown."),
    ],
)
def test_a_job_that_would_wait_forever_is_one_line_and_leaves_nothing(
    stoker: Run, experiment: Path, target: str, phase: Phase, said: str
) -> None:
    _, first, _ = prepare_job(JobRequest(folder=experiment))
    running(first, target=target, phase=phase)
    before = sorted(experiment.rglob("*"))

    code, out, err = stoker("submit", ".", "--on", "local", "--verb", "run", "--after", first.id)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"--after must name jobs {'that are ' * ('done' in said)}" in err
    assert said.replace("ID", first.id) in err
    assert sorted(experiment.rglob("*")) == before


@pytest.mark.parametrize("verb", [["logs"], ["stop"], ["jobs", "show"]])
@pytest.mark.parametrize("named", ["nosuchjob", "a" * 200, "a\nb", "../../etc"])
def test_a_wrong_job_is_one_line(stoker: Run, verb: list[str], named: str) -> None:
    code, out, err = stoker(*verb, named)

    assert (code, out, err.count("\n")) == (2, "", 1)


def test_the_list_is_newest_first_and_shows_jobs_that_no_target_knows(
    stoker: Run, experiment: Path
) -> None:
    _, old, _ = prepare_job(JobRequest(folder=experiment))
    lost = replace(old, command=("run",))
    running(lost, target="gone")
    running(old, phase=Phase.DONE)
    write_job(replace(old, command=("ingest",)))

    listed, problems = list_jobs(read_here(experiment))

    assert [each.state.phase for each in listed] == [Phase.DONE, Phase.UNKNOWN, Phase.UNKNOWN]
    assert listed[0].state.id == old.id
    assert "'gone' is not in targets.yaml" in listed[1].state.reason
    assert "submit it again" in listed[2].state.reason
    assert problems == []
    code, out, _ = stoker("jobs", "--json")
    assert code == 0
    assert next(row["id"] for row in json.loads(out)) == old.id
    code, out, _ = stoker("jobs", "show", old.id)
    assert "state:        done" in out
    assert f"logs:         stoker logs {old.id}" in out


def test_a_target_without_an_answer_and_a_wrong_one_are_named_and_the_others_listed(
    stoker: Run, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "PATH", str(experiment)
    )  # without Slurm's commands the target does not answer
    targets_file().parent.mkdir(parents=True)
    targets_file().write_text("bad: {provider: locl}\nfar: {provider: slurm}\n")
    _, job, _ = prepare_job(JobRequest(folder=experiment))
    running(job, phase=Phase.DONE)
    lost = replace(job, command=("run",))
    running(lost, target="far")

    code, out, err = stoker("jobs", "--json")

    assert code == 2
    rows = {row["id"]: row for row in json.loads(out)}
    assert rows[job.id]["phase"] == "done"
    assert rows[lost.id]["phase"] == "unknown"
    silent, wrong = sorted(err.splitlines(), reverse=True)
    assert silent == f"stoker: target far: {rows[lost.id]['reason']}"
    assert "bad.provider names a kind of target. Received: 'locl'" in wrong
    code, out, _ = stoker("jobs")
    assert (code, job.id in out, lost.id in out) == (2, True, True)
    assert stoker("jobs", "show", job.id)[0] == 0
    code, _, err = stoker("submit", ".", "--on", "bad")
    assert (code, err.count("\n"), f"{targets_file()}, line 1" in err) == (2, 1, True)


def test_a_target_of_the_jobs_own_experiment_is_known_everywhere(
    experiment: Path, tmp_path: Path
) -> None:
    with (experiment / "stoker.yaml").open("a") as stream:
        stream.write("targets: {desk: {provider: local}}\n")
    _, job, _ = prepare_job(JobRequest(folder=experiment))
    running(job, target="desk", phase=Phase.DONE)

    listed, _ = list_jobs(read_here(tmp_path))

    assert [(each.target, each.state.phase) for each in listed] == [("desk", Phase.DONE)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/x"], "WORKER in JOB/WORKER must be a number"),
        (["/-1"], "WORKER in JOB/WORKER must be a number"),
        (["/7"], "Received: 7; workers with logs: 0."),
        (["/7", "-f"], "are 0 to 0. Received: 7."),
    ],
)
def test_a_wrong_worker_is_one_line(
    stoker: Run, experiment: Path, arguments: list[str], said: str
) -> None:
    _, job, _ = prepare_job(JobRequest(folder=experiment))
    running(job, phase=Phase.DONE)
    (job.place / "logs").mkdir()
    (job.place / "logs" / "task-0.log").write_text("a line\n")
    worker, *more = arguments

    code, out, err = stoker("logs", f"{job.id}{worker}", *more)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert stoker("logs", "-f", f"{job.id}/0") == (0, "a line\n", "")
