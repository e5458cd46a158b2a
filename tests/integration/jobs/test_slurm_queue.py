"""Jobs of a real Slurm in its queue and in its accounting, alone and as the array of a sweep.

All are submitted at the start, and end while the tests look at them, in the order of the tests.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from tests.integration.jobs.conftest import Counting, comments
from tests.slurm_cluster import NODES, wait_until

from stoker.core.errors import ConfigError
from stoker.jobs.archive import Archive
from stoker.jobs.job import Job
from stoker.jobs.overview import Here, find_job
from stoker.jobs.places import read_submitted
from stoker.jobs.provider import Phase
from stoker.jobs.providers.slurm.script import NOTICE
from stoker.jobs.sweep import Element, Sweep
from stoker.jobs.sweep_overview import find_element, list_with_sweeps, state_of_sweep, stop_sweep
from stoker.jobs.sweep_submission import SweepReceipt, submit_sweep
from stoker.jobs.targets import Target

OVER = (Phase.DONE, Phase.FAILED, Phase.STOPPED)
HELD = ("40", "hold", "10", "1")
"""Numbers to count to; the first start waits at 10 until it is put into the queue again."""

ENDS = (260, 261, 100_000, 100_001, 6)
"""Numbers that each job of the sweep counts: two run, the others wait, and two are to be stopped."""


class Swept:
    """A sweep on the cluster."""

    def __init__(self, counting: Counting) -> None:
        self.counting = counting
        self.jobs = [
            counting.job(f"swept-{end}", str(end), resources={"workers": 1}) for end in ENDS
        ]
        self.target = Target(name="test", provider="slurm", settings=counting.provider().settings)
        elements = [Element(job=job.id, settings=(f"end={end}",)) for job, end in self.pairs()]
        self.sweep = Sweep(name="swept", runs=counting.runs, elements=tuple(elements))
        self.here = Here(targets={"test": self.target}, runs=(counting.runs,))

    def pairs(self) -> list[tuple[Job, int]]:
        return list(zip(self.jobs, ENDS, strict=True))

    def submit(self) -> SweepReceipt:
        archive = Archive(content=b"code", sizes={})
        targets = {"test": self.target}
        return submit_sweep(
            self.sweep, self.jobs, archive, at_once=2, target=self.target, targets=targets
        )

    def number(self, element: int) -> str:
        found = read_submitted(self.jobs[element].place)
        assert found is not None
        return found.scheduler_id

    def counts(self) -> str:
        return state_of_sweep(self.sweep, self.here)[0].counts()


@pytest.fixture(scope="module")
def submitted(counting: Counting, swept: Swept) -> dict[str, Job]:
    """Jobs by name."""
    gpus = {"resources": {"workers": 1, "gpus": 2, "time_limit_s": 1800.0}}
    jobs = {
        "again": counting.submit("again", *HELD, labels={"team": 'vision "1"'}, **gpus),
        "cancelled": counting.submit("cancelled", "100000", resources={"workers": 1}),
    }
    for job in list(jobs.values()):
        counting.wait_for_number(job, 5)
    one = {"resources": {"workers": 1}}
    for name, before in (("next", "again"), ("never", "cancelled")):
        jobs[name] = counting.submit(name, "3", after=(jobs[before].id,), **one)
    jobs["last"] = counting.submit("last", "3", after=(jobs["never"].id, jobs["next"].id), **one)
    counting.cluster.run("scontrol", "requeue", counting.state(jobs["again"]).scheduler_id)
    counting.cluster.run("scancel", counting.state(jobs["cancelled"]).scheduler_id)
    return jobs


@pytest.fixture(scope="module")
def swept(counting: Counting) -> Swept:
    """Submitted; the first two run."""
    made = Swept(counting)
    receipt = made.submit()
    assert receipt.submitted == tuple(job.id for job in made.jobs)
    for job in made.jobs[:2]:
        counting.wait_for_number(job, 3)
    return made


def test_a_sweep_is_one_array_of_jobs_with_folders_of_their_own(
    counting: Counting, swept: Swept
) -> None:
    numbers = [swept.number(element) for element in range(5)]
    array = numbers[0].partition("_")[0]
    assert numbers == [f"{array}_{element}" for element in range(5)]
    assert swept.counts() == "2 running, 3 waiting"
    words = "waits until other jobs of its sweep are over (JobArrayTaskLimit)"
    wait_until(lambda: counting.state(swept.jobs[4]).reason == words, words)
    (line,) = [each for each in list_with_sweeps(swept.here)[0] if not hasattr(each, "state")]
    assert line.counts() == "2 running, 3 waiting"
    assert find_element(f"{swept.sweep.id[:-3]}/4/0", swept.here) == (None, f"{swept.jobs[4].id}/0")
    codes = {(job.place / "code.tar.gz").stat().st_ino for job in swept.jobs}
    assert len(codes) == 1, "one archive for all"


def test_the_same_sweep_again_submits_nothing_even_after_a_lost_answer(
    counting: Counting, swept: Swept
) -> None:
    receipt = swept.submit()
    assert (receipt.submitted, receipt.live) == ((), tuple(job.id for job in swept.jobs))

    number = swept.number(4)
    (swept.jobs[4].place / "submitted.json").unlink()
    swept.submit()

    assert swept.number(4) == number
    chosen = ("--states=all", f"--name={swept.sweep.id}", "--format=%F")
    arrays = counting.cluster.run("squeue", "--noheader", *chosen).split()
    assert set(arrays) == {number.partition("_")[0]}
    assert swept.sweep.id in comments(counting.cluster)


def test_a_job_of_a_sweep_is_requeued_and_another_stopped_alone(
    counting: Counting, swept: Swept
) -> None:
    *_, fourth, fifth = swept.jobs
    counting.cluster.run("scontrol", "requeue", swept.number(0))
    counting.provider().stop(fourth.id)
    assert counting.state(fourth).phase is Phase.STOPPED
    assert counting.state(fifth).phase in (Phase.WAITING, Phase.RUNNING, Phase.DONE)


def write_noting_scancel(folder: Path) -> Path:
    """Write a `scancel` that notes its arguments, and calls that of Slurm."""
    program = folder / "scancel"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\nexec {shutil.which("scancel")} "$@"\n'
    )
    program.chmod(0o755)
    return folder / "calls"


def test_a_job_waits_until_the_one_before_it_is_done_through_its_restarts(
    counting: Counting, submitted: dict[str, Job]
) -> None:
    first, second = submitted["again"], submitted["next"]
    seen = set()

    def is_over() -> bool:
        states = counting.state(second), counting.state(first)
        seen.add((states[1].phase, states[0].phase, states[0].reason))
        if not (first.place / "outcome").exists():  # a state may be read up to two seconds late
            assert states[0].phase is Phase.WAITING
        return states[1].phase in OVER

    wait_until(is_over, "end of the first job", 120)
    words = f"waits until {first.id} is done (Dependency)"
    assert (Phase.RESTARTING, Phase.WAITING, words) in seen, seen
    end, start = counting.state(first), counting.wait(second, *OVER)
    assert (end.phase, end.restarts, start.phase) == (Phase.DONE, 1, Phase.DONE)
    assert (start.started_s or 0) >= (end.ended_s or 1e99)


def never_started(counting: Counting, submitted: dict[str, Job]) -> None:
    """Jobs behind one that was cancelled say so."""
    fix = "Submit that job again, then this one"
    why = f"job {submitted['cancelled'].id}, which must be done before it, is stopped: by scancel"
    state = counting.wait(submitted["never"], *OVER)
    assert (state.phase, state.reason) == (Phase.FAILED, f"{why}. {fix}")
    state = counting.wait(submitted["last"], *OVER)
    assert state.phase is Phase.FAILED
    assert state.reason.startswith(f"job {submitted['never'].id}, which must be done before it")
    assert counting.numbers(submitted["never"], 0) == counting.numbers(submitted["last"], 0) == []


def test_a_job_whose_predecessor_has_failed_ends_and_names_it(
    counting: Counting, submitted: dict[str, Job]
) -> None:
    never_started(counting, submitted)

    refused = counting.job("refused", "3", after=(submitted["cancelled"].id,))
    with pytest.raises(
        ConfigError, match=r"--after must name jobs that are done, running or waiting"
    ):
        counting.provider().submit(refused)
    assert refused.id not in comments(counting.cluster)


def test_the_accounting_keeps_the_job_and_the_run_in_the_comment(
    counting: Counting, submitted: dict[str, Job]
) -> None:
    counting.cluster.require_accounting()
    job = submitted["again"]
    state = counting.wait(job, *OVER)

    def comment() -> str:
        fields = ("--noheader", "--parsable2", "--format=Comment", "--allocations")
        return counting.cluster.run("sacct", f"--jobs={state.scheduler_id}", *fields)

    run = (job.place / "run").read_text().rpartition("/")[2]
    wait_until(lambda: run in comment(), "comment with the run of the second start")
    assert run.endswith("0002"), "that of the second start"
    expected = {"stoker": job.id, "gpu_hours": 1.0, "labels": job.labels, "run": run}
    assert json.loads(comment()) == expected


def test_jobs_of_a_sweep_restart_and_end_each_for_itself(
    counting: Counting, swept: Swept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third, fourth, fifth = swept.jobs
    for job, end, restarts in ((first, 260, 1), (second, 261, 0), (fifth, 6, 0)):
        state = counting.wait(job, *OVER, timeout_s=120)
        assert (state.phase, state.restarts) == (Phase.DONE, restarts), counting.log(job)
        counting.require_whole_count(job, end)
    assert counting.saved(first) == {"1-0"}
    assert counting.numbers(fourth, 0) == []
    counting.wait_for_number(third, 3)

    stop_sweep(swept.sweep, swept.here)
    assert swept.counts() == "3 done, 2 stopped"
    assert "1-0" in counting.saved(third)
    assert find_job(third.id, swept.here).state.restarts == 0

    receipt = swept.submit()
    assert receipt.submitted == (third.id, fourth.id)
    assert receipt.done == (first.id, second.id, fifth.id)
    reached = len(counting.numbers(third, 0))
    counting.wait_for_number(third, reached + 3)
    counting.wait_for_number(fourth, 3)
    calls = write_noting_scancel(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    stop_sweep(swept.sweep, swept.here)
    array = swept.number(3).partition("_")[0]
    assert calls.read_text().splitlines() == [
        f"--state=PENDING {array}",
        f"--batch --signal={NOTICE} {array}_2 {array}_3",
    ]
    assert swept.counts() == "3 done, 2 stopped"
    numbers = counting.numbers(third, 0)
    assert numbers == list(range(len(numbers))), "it goes on from where it was stopped"


def test_the_accounting_answers_when_the_controller_has_forgotten_the_job(
    counting: Counting, submitted: dict[str, Job]
) -> None:
    counting.cluster.require_accounting()
    before = {name: counting.wait(job, *OVER) for name, job in submitted.items()}
    wait_until(lambda: counting.cluster.run("squeue", "--noheader") == "", "empty queue")
    counting.cluster.forget_jobs()
    assert counting.cluster.run("squeue", "--noheader", "--states=all") == ""

    after = {state.id: state for state in counting.provider().jobs()}
    for name, job in submitted.items():
        found, known = after[job.id], before[name]
        assert (found.phase, found.reason) == (known.phase, known.reason)
        assert (found.started_s, found.ended_s) == (known.started_s, known.ended_s)
    assert after[submitted["again"].id].restarts == 1
    assert after[submitted["cancelled"].id].reason == "by scancel"
    assert (after[submitted["again"].id].gpu_seconds or 0) > 0
    # Slurm's accounting has nothing of jobs that never started.
    never_started(counting, submitted)
    late = counting.submit("late", "3", after=(submitted["again"].id,), resources={"workers": 1})
    assert counting.wait(late, *OVER).phase is Phase.DONE


@pytest.mark.soak
def test_a_job_that_a_killed_controller_has_forgotten_is_submitted_again(
    counting: Counting, tmp_path: Path
) -> None:
    cluster, saved = counting.cluster, tmp_path / "state"
    cluster.require_accounting()
    shutil.copytree(cluster.folder / "state", saved)
    job = counting.submit("forgotten", "30", resources={"workers": 1})
    counting.wait_for_number(job, 3)
    cluster.daemons["slurmctld"].send(signal.SIGKILL)
    cluster.daemons["slurmctld"].end(10.0)
    # What it saves after some seconds is lost, too, on a slow machine.
    shutil.rmtree(cluster.folder / "state")
    shutil.copytree(saved, cluster.folder / "state")
    cluster.start_controller()
    wait_until(lambda: cluster.idle() == set(NODES), "idle nodes")

    state = counting.wait(job, Phase.UNKNOWN)
    assert "submit it again" in state.reason
    counting.provider(nodes=1).submit(job)

    assert counting.wait(job, *OVER).phase is Phase.DONE
    counting.require_whole_count(job, 30)
