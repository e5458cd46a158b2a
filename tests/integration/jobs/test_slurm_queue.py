"""Jobs of a real Slurm in its queue and in its accounting; all are submitted at the start, and end one after the other."""

from __future__ import annotations

import json

import pytest
from tests.integration.jobs.conftest import Counting, comments
from tests.slurm_cluster import wait_until

from stoker.core.errors import ConfigError
from stoker.jobs.job import Job
from stoker.jobs.provider import Phase

OVER = (Phase.DONE, Phase.FAILED, Phase.STOPPED)


@pytest.fixture(scope="module")
def submitted(counting: Counting) -> dict[str, Job]:
    """Jobs by name."""
    gpus = {"resources": {"workers": 1, "gpus": 2}}
    jobs = {
        "again": counting.submit("again", "60", labels={"team": 'vision "1"'}, **gpus),
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


def test_a_job_waits_until_the_one_before_it_is_done_through_its_restarts(
    counting: Counting, submitted: dict[str, Job]
) -> None:
    first, second = submitted["again"], submitted["next"]
    seen = set()

    def is_over() -> bool:
        states = counting.state(second), counting.state(first)
        seen.add((states[1].phase, states[0].phase, states[0].reason))
        return states[1].phase in OVER

    wait_until(is_over, "end of the first job", 120)
    words = f"waits until {first.id} is done (Dependency)"
    assert (Phase.RESTARTING, Phase.WAITING, words) in seen, seen
    assert {phase for before, phase, _ in seen if before is not Phase.DONE} == {Phase.WAITING}
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
    with pytest.raises(ConfigError, match=r"--after must name jobs that are done, run or wait"):
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

    wait_until(lambda: "run" in comment(), "comment with the run")
    run = (job.place / "run").read_text().rpartition("/")[2]
    assert run.endswith("0002"), "that of the second start"
    assert json.loads(comment()) == {"stoker": job.id, "labels": job.labels, "run": run}


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
