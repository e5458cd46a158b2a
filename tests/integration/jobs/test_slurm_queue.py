"""Jobs of a real Slurm in its queue and in its accounting; all are submitted at the start, and end one after the other."""

from __future__ import annotations

import json

import pytest
from tests.integration.jobs.conftest import Counting
from tests.slurm_cluster import wait_until

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
    for name in jobs:
        counting.wait_for_number(jobs[name], 5)
    counting.cluster.run("scontrol", "requeue", counting.state(jobs["again"]).scheduler_id)
    counting.cluster.run("scancel", counting.state(jobs["cancelled"]).scheduler_id)
    return jobs


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
