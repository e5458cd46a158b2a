"""Jobs on a real Slurm that are ended at random instants, or at the begin of their script, lose no number."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.integration.jobs.conftest import Counting
from tests.slurm_cluster import wait_until

from stoker.core.errors import UserError
from stoker.jobs.job import Job
from stoker.jobs.provider import Phase
from stoker.jobs.providers.slurm.script import NOTICE

ENDS = int(os.environ.get("STOKER_ENDS", "20"))
OVER = (Phase.DONE, Phase.FAILED, Phase.STOPPED)


@pytest.mark.soak
def test_a_notice_at_the_begin_of_a_script_ends_no_job(counting: Counting) -> None:
    """It comes while Slurm starts bash, or before the script's first line."""
    environ = counting.cluster.environ
    jobs = [counting.job(f"begin-{number}", "3") for number in range(20)]
    provider = counting.provider(nodes=1)
    for job in jobs:
        number = provider.submit(job)
        state = ("squeue", "--noheader", f"--jobs={number}", "--format=%T")
        wait_until(lambda state=state: "PENDING" not in counting.cluster.run(*state), "start")
        call = ["scancel", "--batch", f"--signal={NOTICE}", number]
        subprocess.run(call, env=environ, check=False)  # it may have ended
    for job in jobs:
        assert counting.wait(job, *OVER).phase is Phase.DONE
        counting.require_whole_count(job, 3)


@pytest.mark.soak
def test_a_job_that_ends_while_the_controller_is_away_is_done(counting: Counting) -> None:
    """One of them fails meanwhile, and starts again when the controller is back.

    It is ended by TERM, as for an upgrade. A killed one has forgotten what happened a few seconds before, also starts of jobs.
    """
    job = counting.submit("alone", "100")
    fails = counting.submit("alone-fails", "100", "fail", "60", "1", "2")
    for each in (job, fails):
        counting.wait_for_number(each, 5)
    controller = counting.cluster.daemons["slurmctld"]
    controller.send(signal.SIGTERM)
    assert controller.end(20.0)

    counting.wait_for_number(job, 98)
    with pytest.raises(UserError, match=r"^Slurm's controller must answer"):
        counting.state(job)
    counting.cluster.start_controller()

    for each, failures in ((job, 0), (fails, 2)):
        state = counting.wait(each, *OVER)
        assert (state.phase, state.restarts) == (Phase.DONE, failures), counting.log(each)
        counting.require_whole_count(each, 100)


@pytest.mark.soak
def test_many_ends_of_many_jobs_lose_no_number(counting: Counting) -> None:
    """Each is another one at another moment; what ends first is chosen by chance."""
    chance = random.Random(29)
    jobs = [
        counting.submit(f"soak-{number}", "3000", settings={"max_restarts": 1000})
        for number in range(5)
    ]

    def kill(job: Job, number: str) -> None:
        for worker in workers_of(job):
            os.kill(worker, signal.SIGKILL)

    notice = ("scancel", "--batch", f"--signal={NOTICE}")
    ends = {
        "requeue": lambda _, number: counting.cluster.run("scontrol", "requeue", number),
        "limit": lambda _, number: counting.cluster.run(*notice, number),
        "kill": kill,
    }
    for _ in range(ENDS):
        running = [job for job in jobs if counting.state(job).phase is Phase.RUNNING]
        if running:
            job = chance.choice(running)
            with contextlib.suppress(AssertionError):  # it may have ended between the two calls
                ends[chance.choice(sorted(ends))](job, counting.state(job).scheduler_id)
        time.sleep(chance.uniform(0.5, 3.0))  # at any moment of a start
    for job in jobs:
        assert counting.wait(job, *OVER, timeout_s=600).phase is Phase.DONE
        counting.require_whole_count(job, 3000)
    assert sum(counting.state(job).restarts for job in jobs) >= ENDS / 4


def workers_of(job: Job) -> list[int]:
    """One process that counts, if there is one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().decode().split("\0")
            if "job-task" in words and str(job.place) in words and words[1:3] == ["-S", "-E"]:
                found.append(int(process.name))
    return found[:1]
