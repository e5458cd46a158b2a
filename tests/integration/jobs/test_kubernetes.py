"""Jobs on Kubernetes: no number is lost or written twice, whatever ends their pods."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
from tests.integration.jobs.kubernetes_jobs import OVER, KubernetesJobs

from stoker.jobs.job import Job
from stoker.jobs.provider import JobState, Phase

ENDS = int(os.environ.get("STOKER_ENDS", "20"))
SEED = int(os.environ.get("STOKER_SEED", "30"))
MAX_S = 20.0
"""Longest that the soak takes for an end, seconds."""

LONG = 60 * ENDS
"""Numbers that a worker of the soak counts, at most 20 a second: more than there is time for between the ends."""

END = 20
"""Numbers that a worker counts."""

HOLD = (str(END), "hold", "8", "1")
"""The first start stays at 8 until it is ended."""


@dataclass
class Disturbed:
    """Jobs whose pods are ended in the middle, all at the same time."""

    jobs: KubernetesJobs
    made: dict[str, Job]
    followed: list[str]
    """Lines of `stoker logs --follow` of the job `evicted`, during which the API server restarted."""

    follower: threading.Thread

    def over(self, name: str) -> tuple[Job, JobState]:
        """One of them when it is over, and its state then."""
        job = self.made[name]
        return job, self.jobs.wait(job, *OVER, timeout_s=240)


ENDED_BY = {
    "evicted": "evict",
    "memory": "kill_out_of_memory",
    "indexed": "evict",
    "preempted": "preempt",
    "pressed": "evict_for_memory",
    "killed": "kill_task",
    "lost": "lose_node",
    "operator": "preempt",
}
"""Job -> what the cluster does to its second worker. `indexed` is an Indexed Job, `operator` a TFJob, the others are
JobSets."""

COUNTED = {"memory": 1, "killed": 1, "fails": 2}
"""Job -> how many of its restarts count towards `max_restarts`."""

WANTED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    **dict.fromkeys(ENDED_BY, (HOLD, {})),
    "indexed": (HOLD, {"settings": {"kind": "job"}}),
    "operator": (HOLD, {"settings": {"kind": "tfjob"}}),
    "mistake": ((str(END), "fail", "3", "2", "9"), {}),
    "operator-mistake": ((str(END), "fail", "3", "2", "9"), {"settings": {"kind": "tfjob"}}),
    "stopped": (HOLD, {}),
    "saved": ((str(END), "fail", "9", "75", "1"), {}),
    "fails": ((str(END), "fail", "9", "1", "2"), {}),
    "hopeless": ((str(END), "fail", "3", "1", "9"), {"settings": {"max_restarts": 0}}),
}
"""Job -> command, settings of the target."""

ALWAYS = (
    *("evicted", "preempted", "memory", "killed", "indexed", "operator"),
    *("mistake", "operator-mistake", "stopped"),
)
"""Those that run in `make test`; the others run in `make soak`."""


def named(*names: str) -> list[Any]:
    """Parameters, those of `make soak` with its mark."""
    return [
        name if name in ALWAYS else pytest.param(name, marks=pytest.mark.soak) for name in names
    ]


@pytest.fixture(scope="module")
def disturbed(kubernetes: KubernetesJobs, request: pytest.FixtureRequest) -> Disturbed:
    """Submit jobs, and end their pods each in another way."""
    chosen = request.config.getoption("markexpr")
    names = [name for name in WANTED if name in ALWAYS or "not soak" not in chosen]
    made = {}
    for name in names:
        command, more = WANTED[name]
        made[name] = kubernetes.submit(name, *command, **more)
    followed: list[str] = []

    def follow() -> None:
        lines = kubernetes.provider().log_lines(made["evicted"].id, worker=None, follow=True)
        followed.extend(lines)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    kubernetes.wait_for_number(made["stopped"], 7, rank=0)
    kubernetes.wait_for_number(made["stopped"], 7, rank=1)
    kubernetes.provider().stop(made["stopped"].id)
    kubernetes.wait_for_number(made["evicted"], 7, rank=1)
    kubernetes.cluster.restart_server()
    for name in filter(made.__contains__, ENDED_BY):
        kubernetes.wait_for_number(made[name], 7, rank=0)
        kubernetes.wait_for_number(made[name], 7, rank=1)
        getattr(kubernetes.cluster, ENDED_BY[name])(kubernetes.pods(made[name])[1])
    return Disturbed(kubernetes, made, followed, follower)


@pytest.mark.parametrize("name", named(*ENDED_BY, "saved", "fails"))
def test_the_count_of_a_job_that_starts_again_is_whole(disturbed: Disturbed, name: str) -> None:
    job, state = disturbed.over(name)

    assert state.phase is Phase.DONE, (state, disturbed.jobs.log(job))
    assert state.restarts >= 1
    disturbed.jobs.require_whole_count(job, END)


@pytest.mark.parametrize(
    "name", named("evicted", "preempted", "memory", "killed", "lost", "saved", "fails")
)
def test_only_failures_count_as_restarts_that_are_limited(disturbed: Disturbed, name: str) -> None:
    job, _ = disturbed.over(name)

    status = disturbed.jobs.job_set(job)["status"]
    assert status["restartsCountTowardsMax"] == COUNTED.get(name, 0), disturbed.jobs.log(job)


@pytest.mark.parametrize("name", named("evicted", "preempted"))
def test_all_workers_save_before_a_pod_goes(disturbed: Disturbed, name: str) -> None:
    job, _ = disturbed.over(name)

    assert {"1-0", "1-1"} <= disturbed.jobs.saved(job), disturbed.jobs.log(job)


def test_logs_are_followed_over_a_restart_of_the_server_and_an_eviction(
    disturbed: Disturbed,
) -> None:
    disturbed.over("evicted")
    disturbed.follower.join(60.0)

    assert not disturbed.follower.is_alive()
    for rank in range(2):
        prefix = f"[worker {rank}] "
        lines = [each for each in disturbed.followed if each.startswith(prefix)]
        counted = [int(each.rpartition(" ")[2]) for each in lines if " counts " in each]
        assert counted == list(range(END)), "\n".join(disturbed.followed)


def test_events_of_the_job_and_its_pods_come_in_order(disturbed: Disturbed) -> None:
    job, _ = disturbed.over("evicted")

    events = disturbed.jobs.provider().events(job.id)

    assert [each.at_s for each in events] == sorted(each.at_s for each in events)
    reasons = [each.reason for each in events]
    for pod in {each.about for each in events if each.about.startswith("Pod ")}:
        own = [each.reason for each in events if each.about == pod]
        assert own[:3] == ["Scheduled", "Pulled", "Started"], own
    assert {"Scheduled", "Started", "Killing", "Completed", "SuccessfulCreate"} <= set(reasons)
    assert {each.about.partition(" ")[0] for each in events} == {"JobSet", "Job", "Pod"}


@pytest.mark.parametrize("name", ["mistake", "operator-mistake"])
def test_a_mistake_of_the_user_is_not_repeated(disturbed: Disturbed, name: str) -> None:
    job, state = disturbed.over(name)

    assert (state.phase, state.restarts) == (Phase.FAILED, 0), disturbed.jobs.log(job)
    assert "exit code 2" in state.reason
    assert disturbed.jobs.starts(job) == 1


@pytest.mark.soak
def test_a_job_that_fails_too_often_says_so(disturbed: Disturbed) -> None:
    _, state = disturbed.over("hopeless")

    assert (state.phase, state.restarts) == (Phase.FAILED, 0)
    assert "exit code 1" in state.reason
    assert "max_restarts" in state.reason


def test_a_job_that_is_stopped_saves_and_does_not_start_again(disturbed: Disturbed) -> None:
    job, state = disturbed.over("stopped")

    assert (state.phase, state.reason) == (Phase.STOPPED, "by stoker stop")
    assert disturbed.jobs.saved(job) == {"1-0", "1-1"}
    assert disturbed.jobs.numbers(job, 0) == list(range(len(disturbed.jobs.numbers(job, 0))))
    assert disturbed.jobs.pods(job) == []
    disturbed.jobs.provider().stop(job.id)  # of one that is over: nothing
    (listed,) = (each for each in disturbed.jobs.provider().jobs() if each.id == job.id)
    assert (listed.phase, listed.reason) == (Phase.STOPPED, "by stoker stop")


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_many_ends_of_many_jobs_lose_no_number(
    kubernetes: KubernetesJobs, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is another one at another moment; what ends first is chosen by chance."""
    chance = random.Random(SEED)
    jobs = [
        kubernetes.submit(
            f"soak-{number}", str(LONG), settings={"max_restarts": 1000, "kind": kind}
        )
        for number, kind in enumerate(("jobset", "jobset", "job", "tfjob"))
    ]
    ended = 0
    until_s = time.monotonic() + ENDS * MAX_S
    while ended < ENDS and time.monotonic() < until_s:
        time.sleep(chance.uniform(1.0, 4.0))  # at any moment of a start
        alive = [job for job in jobs if kubernetes.state(job).phase not in OVER]
        if not alive:
            break
        running = [
            pod
            for pod in kubernetes.pods(chance.choice(alive))
            if pod["status"]["phase"] == "Running"
        ]
        if running:
            action = chance.choice(sorted(set(ENDED_BY.values())))
            with contextlib.suppress(
                AssertionError, ProcessLookupError
            ):  # it ended between the two calls
                getattr(kubernetes.cluster, action)(chance.choice(running))
                ended += 1
    for job in jobs:
        state = kubernetes.wait(job, *OVER, timeout_s=1200)
        assert state.phase is Phase.DONE, (state, kubernetes.log(job))
        kubernetes.require_whole_count(job, LONG)
    starts = sum(kubernetes.starts(job) - 1 for job in jobs)
    with capsys.disabled():
        print(
            f"\n{ended} ends (seed {SEED}) of {len(jobs)} jobs, {starts} restarts, no number lost or twice"
        )
    assert ended == ENDS
    assert starts >= ENDS / 4
