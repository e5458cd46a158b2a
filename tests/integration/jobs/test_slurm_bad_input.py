"""What a real Slurm does with hostile names, and with a full disk under the folder of runs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.jobs.conftest import Counting
from tests.small_disk import mounted

from stoker.core.errors import ConfigError, UserError
from stoker.jobs.archive import Archive
from stoker.jobs.job import Job, write_job
from stoker.jobs.overview import Here, list_jobs
from stoker.jobs.places import add_to_index
from stoker.jobs.provider import Phase
from stoker.jobs.providers.slurm.client import Slurm
from stoker.jobs.providers.slurm.machine import Here as OfThisMachine
from stoker.jobs.submission import submit
from stoker.jobs.sweep import Element, Sweep
from stoker.jobs.sweep_submission import submit_sweep
from stoker.jobs.targets import Target

OVER = (Phase.DONE, Phase.FAILED, Phase.STOPPED)
ARCHIVE = Archive(content=b"code", sizes={})
CODE = '-\'; touch "$HOME/owned" $(touch owned) `touch owned` \\ %j \u00e9'
"""Text that a shell, or sbatch, would take for something else."""

LONG = "a " * 120
PAGES = 16
"""Size of the small disk, in pages of 4 KiB, of which each file takes one at least."""


@pytest.fixture(scope="module")
def target(counting: Counting) -> Target:
    """The cluster, where a job starts when the test wants it."""
    settings = counting.provider(sbatch=("--hold",)).settings
    return Target(name="test", provider="slurm", settings=settings)


@pytest.fixture
def disk(counting: Counting) -> Iterator[Path]:
    """A small disk of its own."""
    folder = counting.runs.parent / "disk"
    with mounted(folder, size=f"{4 * PAGES}k") as why_not:
        if why_not:
            pytest.skip(why_not)
        yield folder


def queue_of(counting: Counting) -> list[str]:
    """Numbers of the jobs that wait or run."""
    return counting.cluster.run("squeue", "--noheader", "--format=%i").split()


def test_names_and_values_that_are_code_reach_the_workers_as_they_are(
    counting: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    secret = f"{CODE}\n#SBATCH --hold\n\t{LONG}"
    monkeypatch.setenv("TOKEN_OF_TEST", secret)
    folder = tmp_path / re.sub(r"[/%\\]", "|", CODE) / LONG
    folder.mkdir(parents=True)
    job = Job(
        name="hostile",
        command=("count", "3", "needs", "TOKEN_OF_TEST,VALUE", f"--set=a={CODE}\n{LONG}"),
        folder=folder,
        runs=folder / "runs",
        code="0" * 64,
        labels={CODE: f"{CODE}\n{LONG}", "-": "}"},
        secrets=("TOKEN_OF_TEST",),
        environment={"VALUE": CODE + LONG},
    )
    provider = counting.provider()
    for name in ("a\nb", "a\\b", "50%"):
        with pytest.raises(ConfigError, match=r"the folder of runs .*must"):
            provider.validate(replace(job, runs=tmp_path / name))
    add_to_index(write_job(job))
    provider.validate(job)
    number = provider.submit(job)

    assert counting.wait(job, *OVER).phase is Phase.DONE, counting.log(job)
    log = (job.place / "logs" / "task-0.log").read_text().splitlines()
    assert f"TOKEN_OF_TEST has {len(secret)} characters" in log
    assert f"VALUE has {len(CODE + LONG)} characters" in log
    comment = counting.cluster.run(
        "squeue", "--noheader", "--states=all", "--format=%k", f"-j{number}"
    )
    assert json.loads(comment)["labels"] == job.labels
    assert not list(tmp_path.rglob("owned"))
    assert list(home.iterdir()) == []

    (job.place / "submitted.json").unlink()
    assert provider.submit(job) == number, "its answer was lost"
    shutil.rmtree(job.place)
    write_job(job)
    other = counting.provider(sbatch=("--hold",)).submit(job)
    assert other != number, "its folder was deleted, so it starts from the beginning"
    counting.cluster.run("scancel", other)


@pytest.mark.parametrize("value", [CODE, "-p", "a b", "a\nb", "$(touch owned)", LONG + LONG])
def test_a_name_that_the_cluster_does_not_have_is_one_line(
    counting: Counting, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = counting.job("misnamed", "3", resources={"gpus": 1})
    before = queue_of(counting)
    for setting in ("partition", "gpu_type"):
        with pytest.raises(UserError) as caught:
            counting.provider(**{setting: value}).validate(job)
        assert "\n" not in str(caught.value), setting
    assert queue_of(counting) == before
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_no_job_in_the_queue(
    counting: Counting, target: Target, disk: Path
) -> None:
    made = replace(counting.job("filled", "60", resources={"workers": 1}), runs=disk / "runs")
    jobs = [replace(made, command=("count", each)) for each in ("3", "4")]
    elements = tuple(Element(job=each.id, settings=each.command[1:]) for each in jobs)
    sweep = Sweep(name="filled", runs=made.runs, elements=elements)
    targets = {"test": target}

    def submit_all() -> None:
        submit_sweep(sweep, jobs, ARCHIVE, at_once=1, target=target, targets=targets)

    def submit_one() -> None:
        submit(made, ARCHIVE, target=target, targets=targets)

    files = {"code.tar.gz", "job.json", "job.sbatch", "submitted.json"}
    assert full_at(counting, disk, submit_all) >= files
    counting.cluster.run("scancel", f"--name={sweep.id}")
    assert full_at(counting, disk, submit_one) >= files
    (disk / "fill").unlink()
    release(counting, made)
    counting.wait_for_number(made, 3)

    fill(disk, free=0)
    state = counting.wait(made, *OVER)

    assert (state.phase, state.restarts) == (Phase.FAILED, 0), counting.log(made)
    assert state.reason.startswith("its folder could not be written (a full disk)")
    (disk / "fill").unlink()
    submit_one()
    release(counting, made)
    assert counting.wait(made, *OVER).phase is Phase.DONE, counting.log(made)
    counting.require_whole_count(made, 60)


def release(counting: Counting, job: Job) -> None:
    """Let a job start."""
    counting.cluster.run("scontrol", "release", counting.state(job).scheduler_id)


def full_at(counting: Counting, disk: Path, call: Callable[[], None]) -> set[str]:
    """Submit with more and more room until it works; the files for which there was none."""
    before = queue_of(counting)
    files: set[str] = set()
    for pages in range(PAGES):
        shutil.rmtree(disk / "runs", ignore_errors=True)
        fill(disk, free=pages)
        error = error_of(call)
        if error is None:
            return files
        words = error.line().partition(" must have room")[0]
        assert words.startswith(f"the disk that holds {disk}")
        files.add(words.rpartition("/")[2])
        assert queue_of(counting) == before, error
    raise AssertionError(files)


def error_of(call: Callable[[], None]) -> UserError | None:
    try:
        call()
    except UserError as error:
        return error
    return None


def fill(disk: Path, *, free: int) -> None:
    """Fill a disk until only some pages are free; files of the last attempt stay."""
    (disk / "fill").unlink(missing_ok=True)
    with (disk / "fill").open("wb") as stream:
        left = shutil.disk_usage(disk).free - 4096 * free
        stream.write(bytes(max(0, left)))


def write_program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_jobs_are_listed_where_a_program_of_slurm_is_missing_or_fails(
    counting: Counting, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counting.job("listed", "100000", resources={"workers": 1})
    submit(job, ARCHIVE, target=target, targets={"test": target})
    release(counting, job)
    counting.wait(job, Phase.RUNNING)
    here = Here(targets={"test": target}, runs=(counting.runs,))
    real = shutil.which("squeue")
    path = os.environ["PATH"]

    def listed() -> tuple[Phase, str, list[str]]:
        lines, problems = list_jobs(here)
        (found,) = [each.state for each in lines if each.state.id == job.id]
        return found.phase, found.reason, problems

    write_program(tmp_path / "no-accounting", "squeue", f'exec {real} "$@"')
    monkeypatch.setenv("PATH", str(tmp_path / "no-accounting"))
    assert listed() == (Phase.RUNNING, "", []), "without sacct and scontrol"

    message = "slurm_load_jobs error: Unexpected message received"
    write_program(tmp_path / "fails", "squeue", f"echo '{message}' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "fails"))
    phase, reason, (problem,) = listed()
    assert phase is Phase.UNKNOWN
    assert problem == f"target test: {reason}"
    assert message in reason

    write_program(tmp_path / "slow", "squeue", "exec sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path / 'slow'}:{path}")
    with pytest.raises(UserError, match=r"^squeue must answer within 0\.2 s\. Received: no answer"):
        Slurm(OfThisMachine(), answer_s=0.2).queue()

    write_program(tmp_path / "no-scontrol", "squeue", f'exec {real} "$@"')
    write_program(
        tmp_path / "no-scontrol", "scancel", f'exec {shutil.which("scancel", path=path)} "$@"'
    )
    monkeypatch.setenv("PATH", str(tmp_path / "no-scontrol"))
    target.open().stop(job.id)
    assert counting.state(job).phase is Phase.STOPPED
