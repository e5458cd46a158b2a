"""A sweep as one job array of a real Slurm: its jobs start, restart and end each for itself."""

from __future__ import annotations

import pytest
from tests.integration.jobs.conftest import Counting, comments
from tests.slurm_cluster import wait_until

from stoker.jobs.archive import Archive
from stoker.jobs.job import Job
from stoker.jobs.overview import Here, find_job
from stoker.jobs.places import read_submitted
from stoker.jobs.provider import Phase
from stoker.jobs.sweep import Element, Sweep
from stoker.jobs.sweep_overview import find_element, list_with_sweeps, state_of_sweep, stop_sweep
from stoker.jobs.sweep_submission import SweepReceipt, submit_sweep
from stoker.jobs.targets import Target

OVER = (Phase.DONE, Phase.FAILED, Phase.STOPPED)
ENDS = (260, 261, 100_000, 100_001, 6)
"""Numbers that each job counts: two run, the others wait, and two are to be stopped."""


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
    assert set(comments(counting.cluster)) == {swept.sweep.id}


def test_jobs_of_a_sweep_restart_and_stop_each_for_itself(counting: Counting, swept: Swept) -> None:
    first, second, third, fourth, fifth = swept.jobs
    counting.cluster.run("scontrol", "requeue", swept.number(0))
    counting.provider().stop(fourth.id)
    assert counting.state(fourth).phase is Phase.STOPPED
    assert counting.state(fifth).phase in (Phase.WAITING, Phase.RUNNING, Phase.DONE)

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
    stop_sweep(swept.sweep, swept.here)
    assert swept.counts() == "3 done, 2 stopped"
    numbers = counting.numbers(third, 0)
    assert numbers == list(range(len(numbers))), "it goes on from where it was stopped"
