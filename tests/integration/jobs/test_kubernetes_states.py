"""What a job on Kubernetes says while it does not run, in the user's words, and what gets it out of there."""

from __future__ import annotations

from typing import Any

import pytest
from tests.integration.jobs.kubernetes_jobs import OVER, KubernetesJobs

from stoker.jobs.provider import Phase

NONE_IMAGE = "registry.test/none:1"
HOLD = ("20", "hold", "8", "1")


@pytest.fixture(scope="module", autouse=True)
def _surroundings(kubernetes: KubernetesJobs) -> None:
    """What the jobs of this module run into."""
    cluster = kubernetes.cluster
    cluster.add_namespace("small")
    cluster.add_claim("runs", "small", directory=kubernetes.runs)
    cluster.add_quota("compute", "small", pods="0")
    cluster.add_queue("queue", cpu="200m", preempts=True)


@pytest.mark.parametrize(
    ("name", "settings", "more", "words"),
    [
        ("pull", {"image": NONE_IMAGE}, {}, ["registry.test/none:1 cannot be pulled", "image_pull_secrets"]),
        ("gpus", {}, {"gpus": 8}, ["no node has enough free nvidia.com/gpu", "request less"]),
        ("labels", {"node_selector": {"pool": "none"}}, {}, ["labels of node_selector"]),
        ("secret", {"secrets": {"TOKEN": "vault/token"}}, {"secrets": ("TOKEN",)}, ["cannot be made", "vault"]),
        ("quota", {"namespace": "small"}, {}, ["exceeded quota"]),
        ("queued", {"queue": "queue", "cpus": 2.0}, {}, ["Kueue", "insufficient quota for cpu"]),
        ("taint", {"node_selector": {"pool": "spot"}}, {}, ["taint", "tolerations"]),
    ],
)  # fmt: skip
def test_a_job_says_why_it_waits(
    kubernetes: KubernetesJobs,
    name: str,
    settings: dict[str, Any],
    more: dict[str, Any],
    words: list[str],
) -> None:
    if name == "taint":  # its node would be one that the others could mean
        kubernetes.cluster.add_node("spot-1", labels={"pool": "spot"}, taint="spot")
    job = kubernetes.submit(name, "3", settings=settings, workers=1, **more)
    provider = kubernetes.provider(**settings)

    kubernetes.wait_for_reason(job, *words, provider=provider)
    assert provider._state(job.id).phase is Phase.WAITING
    provider.stop(job.id)
    assert provider._state(job.id).phase is Phase.STOPPED
    assert kubernetes.pods(job) == []


def test_a_job_killed_for_memory_says_what_to_raise(kubernetes: KubernetesJobs) -> None:
    job = kubernetes.submit("memory", *HOLD, settings={"max_restarts": 0}, workers=1)
    kubernetes.wait_for_number(job, 7)

    kubernetes.cluster.kill_out_of_memory(kubernetes.pods(job)[0])

    state = kubernetes.wait(job, *OVER)
    assert state.phase is Phase.FAILED
    assert "memory_gib" in state.reason, state
    assert "2048Mi" in state.reason


def test_half_started_jobs_do_not_hold_each_other_for_ever(kubernetes: KubernetesJobs) -> None:
    """Each has one of its two GPUs, and neither gets the other."""
    for name in ("a", "b"):
        kubernetes.cluster.add_node(f"gpu-{name}", labels={"gpu": name}, gpus="1")
    own = [{"node_selector": {"gpu": name}, "kind": "job"} for name in ("a", "b")]
    jobs = [
        kubernetes.submit(f"half-{number}", "3", gpus=1, settings=settings | {"start_s": 3})
        for number, settings in enumerate(own)
    ]

    for job in jobs:
        state = kubernetes.wait(job, *OVER)
        assert state.phase is Phase.FAILED
        assert "nothing from the pods of worker" in state.reason, (state, kubernetes.log(job))
        assert kubernetes.pods(job) == []
        assert kubernetes.numbers(job, 0) == kubernetes.numbers(job, 1) == []
    # The GPUs are free, and with a second one the same submission starts it again.
    kubernetes.cluster.add_node("gpu-c", labels={"gpu": "a"}, gpus="1")
    kubernetes.provider(**own[0]).submit(jobs[0])
    assert kubernetes.wait(jobs[0], *OVER).phase is Phase.DONE, kubernetes.log(jobs[0])
    kubernetes.require_whole_count(jobs[0], 3)


@pytest.mark.soak
def test_a_job_that_kueue_suspends_saves_and_goes_on_and_no_restart_counts(
    kubernetes: KubernetesJobs,
) -> None:
    job = kubernetes.submit("suspended", *HOLD, settings={"queue": "queue"})
    for rank in range(2):
        kubernetes.wait_for_number(job, 7, rank)

    kubernetes.cluster.preempt_workload(kubernetes.job_set(job)["metadata"]["name"])

    state = kubernetes.wait(job, *OVER)
    assert state.phase is Phase.DONE, (state, kubernetes.log(job))
    kubernetes.require_whole_count(job, 20)
    assert kubernetes.job_set(job)["status"]["restartsCountTowardsMax"] == 0
