"""Jobs on this machine, through the verbs and with real processes: `stoker ingest` is what they run.

A worker waits before it unpacks its code as long as a test holds the lock of the unpacked copy: so it can be ended at a
known place.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.cli.main import invoke
from stoker.cluster.processes.identity import began
from stoker.jobs import places

WAIT_S = 120.0
"""Longest wait, seconds: a busy machine."""

Run = Callable[..., str]

MODEL_PY = """\
import helper_of_small

def build(features, transform):
    pass
"""

ROWS_PY = """\
def write(path):
    path.write_text("x,y\\n" + "".join(f"{row},{row % 2}\\n" for row in range(200)))
"""


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small table, and a home without jobs; the current folder is the experiment's."""
    for name in ("state", "config", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(places, "_found", {})
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "stoker.yaml").write_text(
        "name: small\ndata: {source: rows.csv, prepare: rows:write}\n"
        "model: model:build\nlabel: y\n"
        "targets:\n  quick: {provider: local, max_restarts: 1, grace_s: 5}\n"
        "  watchful: {provider: local, max_restarts: 1, grace_s: 1, hang_s: 2}\n"
    )
    (folder / "model.py").write_text(MODEL_PY)
    (folder / "rows.py").write_text(ROWS_PY)
    (tmp_path / "helper_of_small.py").write_text("UNITS = 8\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def stoker(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process; returns its stdout."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        code = invoke(list(arguments), debug=False)
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return printed.out

    return run


def submit(*more: str) -> dict[str, object]:
    """Submit by a process of its own, which ends: as a terminal does that is closed."""
    command = [sys.executable, "-P", "-m", "stoker", "submit", ".", "--verb", "ingest", "--json"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    facts: dict[str, object] = json.loads(done.stdout)
    return facts


@contextmanager
def code_is_held(folder: Path, digest: str) -> Iterator[None]:
    """No worker gets its unpacked code until the block ends."""
    copies = folder.parent / "tmp" / f"stoker-code-{os.getuid()}"
    copies.mkdir(mode=0o700, exist_ok=True)
    with (copies / f".{digest}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def digest_of(stoker: Run) -> str:
    facts = json.loads(stoker("submit", ".", "--on", "quick", "--dry-run", "--json"))
    assert set(facts["code"]) == {
        "experiment/model.py", "experiment/rows.py", "experiment/stoker.yaml",
        "packages/helper_of_small.py",
    }  # fmt: skip
    assert not Path("rows.csv").exists(), "a dry run writes nothing"
    return str(facts["description"]["code"])


def wait_for(claim: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not claim():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def state(stoker: Run, job: object) -> dict[str, object]:
    facts: dict[str, object] = json.loads(stoker("jobs", "show", str(job), "--json"))["state"]
    return facts


def workers_of(supervisor: int) -> list[int]:
    """Process numbers of the job's tasks."""
    found = []
    for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        try:
            if b"job-task" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
        except FileNotFoundError:
            continue
    return found


def test_a_killed_worker_starts_again_and_the_job_is_submitted_once(
    experiment: Path, stoker: Run
) -> None:
    digest = digest_of(stoker)
    with code_is_held(experiment, digest):
        receipt = submit("--on", "quick")
        assert (experiment / "rows.csv").is_file(), "data.prepare runs before the submission"
        job, folder = receipt["job"], Path(str(receipt["folder"]))
        supervisor = int(str(state(stoker, job)["scheduler_id"]))
        log = folder / "logs" / "task-0.log"
        wait_for(lambda: log.is_file() and "start 1" in log.read_text())
        assert os.getsid(supervisor) == supervisor

        again = json.loads(stoker("submit", ".", "--verb", "ingest", "--on", "local", "--json"))
        assert (again["job"], again["already"], again["target"]) == (job, True, "quick"), again

        second = submit("--on", "quick", "--time-limit", "1h", "--after", str(job)[:-2])["job"]
        os.kill(workers_of(supervisor)[0], signal.SIGKILL)
        wait_for(lambda: "start 2" in log.read_text())
        assert state(stoker, job)["restarts"] == 1
        waits = state(stoker, second)
        assert (waits["phase"], waits["reason"]) == ("waiting", f"waits until {job} is done")
    followed = stoker("logs", "-f", str(job))
    stoker("logs", "-f", str(second))
    begin = float(str(state(stoker, second)["started_s"]))
    assert begin >= float(str(state(stoker, job)["ended_s"]))
    assert state(stoker, second)["phase"] == "done"
    assert Path((folder / "run").read_text()).parent == experiment / "runs" / "small"

    assert state(stoker, job)["phase"] == "done"
    assert "was killed by SIGKILL" in followed
    assert "[worker 0]" in followed
    assert "start 2: the command ended with exit code 0" in stoker("logs", f"{job}/0")
    assert {each.name for each in (folder / "incarnations").iterdir()} >= {"1", "2"}
    assert list((experiment / "runs" / "small").glob("*/data/manifest.json"))
    assert str(job) in stoker("jobs")


def test_a_job_that_hangs_starts_again_and_then_fails(experiment: Path, stoker: Run) -> None:
    with code_is_held(experiment, digest_of(stoker)):
        job = submit("--on", "watchful")["job"]
        wait_for(lambda: state(stoker, job)["phase"] == "failed")

    found = state(stoker, job)
    assert (found["reason"], found["restarts"]) == ("no progress for 2 s (after 1 restarts)", 1)


def test_the_jobs_of_a_sweep_run_one_after_another(experiment: Path, stoker: Run) -> None:
    sweep = ("--on", "quick", "--sweep", "data.seed=1,2", "--sweep", "data.max_bad_rows=0")
    with code_is_held(experiment, digest_of(stoker)):
        receipt = submit(*sweep)
        name, jobs = str(receipt["sweep"]), list(map(str, receipt["submitted"]))  # type: ignore[call-overload]  # JSON
        assert len(set(jobs)) == 2
        wait_for(lambda: "1 running, 1 waiting" in stoker("jobs"))
        assert (
            json.loads(stoker("submit", ".", "--verb", "ingest", *sweep, "--json"))["live"] == jobs
        )
        shown = stoker("jobs", "show", name[:-2])
        assert "data.seed=2 data.max_bad_rows=0" in shown
        assert "waits until other jobs of its sweep are over" in shown
        assert state(stoker, f"{name}/0")["id"] == jobs[0]
    for job in jobs:
        stoker("logs", "-f", job)
    assert "2 done" in stoker("jobs")
    first, second = (state(stoker, job) for job in jobs)
    assert float(str(second["started_s"])) >= float(str(first["ended_s"]))
    assert "start 1: the command ended with exit code 0" in stoker("logs", f"{name}/1/0")
    assert len(list((experiment / "runs" / "small").glob("*/data/manifest.json"))) == 2
    again = json.loads(stoker("submit", ".", "--verb", "ingest", *sweep, "--json"))
    assert (again["submitted"], again["done"]) == ([], jobs)


def test_a_stopped_or_abandoned_job_starts_again_where_it_was_submitted_again(
    experiment: Path, stoker: Run
) -> None:
    limit = ("--on", "quick", "--time-limit", "1s")
    with code_is_held(experiment, digest_of(stoker)):
        receipt = submit(*limit)
        job, folder = receipt["job"], Path(str(receipt["folder"]))
        wait_for(
            lambda: int(str(state(stoker, job)["restarts"])) > 1
        )  # not limited by max_restarts
        waiting = [
            submit("--on", "quick", "--time-limit", hours, "--after", str(job))["job"]
            for hours in ("1h", "2h")
        ]
        stoker("stop", str(waiting[0]))
        assert state(stoker, waiting[0])["phase"] == "stopped"
        stoker("stop", str(job))
        wait_for(lambda: state(stoker, waiting[1])["phase"] == "failed")
        why = f"job {job}, which must be done before it, is stopped"
        assert str(state(stoker, waiting[1])["reason"]).startswith(why)
        assert state(stoker, job)["phase"] == "stopped"
        assert "is over: stopped" in stoker("stop", str(job))
        starts = {each.name for each in (folder / "incarnations").iterdir() if each.name.isdigit()}

        again = submit(*limit)
        assert (again["job"], again["already"]) == (job, False)
        supervisor = int(str(state(stoker, job)["scheduler_id"]))
        wait_for(lambda: workers_of(supervisor))
        workers = workers_of(supervisor)
        os.kill(supervisor, signal.SIGKILL)
        wait_for(lambda: not began(supervisor) and not any(map(began, workers)))

    abandoned = state(stoker, job)
    assert abandoned["phase"] == "failed"
    assert "submit it again to go on" in str(abandoned["reason"])
    newest = {each.name for each in (folder / "incarnations").iterdir() if each.name.isdigit()}
    assert max(map(int, newest)) > max(map(int, starts))
