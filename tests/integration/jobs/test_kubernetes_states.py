"""What a job on Kubernetes says while it does not run, in the user's words, and what gets it out of there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs.kubernetes_jobs import IMAGE, NAMESPACE, OVER, KubernetesJobs
from tests.kubernetes_api.resources import PODS, Object

from stoker.jobs.provider import Phase
from stoker.jobs.providers.kubernetes.names import object_name
from stoker.jobs.providers.kubernetes.settings import Volume

NONE_IMAGE = "registry.test/none:1"
HOLD = ("20", "hold", "8", "1")


def waiting(reason: str, message: str) -> Object:
    """The state of a pod whose container does not run."""
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"name": "tensorflow", "image": IMAGE, "state": state}]}


def evicted(message: str) -> Object:
    """The state of a pod that its node has evicted: its container was killed."""
    state = {"terminated": {"exitCode": 137, "reason": "Error"}}
    containers = [{"name": "tensorflow", "image": IMAGE, "state": state}]
    own = {"phase": "Failed", "reason": "Evicted", "message": message}
    return own | {"containerStatuses": containers}


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
        ("claim", {}, {}, ["claim of `volumes` cannot be used", "kubectl get"]),
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
    if name == "claim":
        runs = Volume(claim="runs", path=kubernetes.runs)
        settings = {"volumes": (runs, Volume(claim="none", path=Path("/mnt/none")))}
    job = kubernetes.submit(name, "3", settings=settings, workers=1, **more)
    provider = kubernetes.provider(**settings)

    kubernetes.wait_for_reason(job, *words, provider=provider)
    assert provider._state(job.id).phase is Phase.WAITING
    provider.stop(job.id)
    assert provider._state(job.id).phase is Phase.STOPPED
    assert kubernetes.pods(job) == []


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("kill_out_of_memory", ["memory_gib", "2048Mi"]),
        ("evict_for_disk", ["was evicted", "more local disk", "ephemeral_gib", "1024Mi"]),
    ],
)
def test_a_job_that_exceeds_its_limit_says_what_to_raise(
    kubernetes: KubernetesJobs, end: str, words: list[str]
) -> None:
    job = kubernetes.submit(end, *HOLD, settings={"max_restarts": 0}, workers=1)
    kubernetes.wait_for_number(job, 7)

    getattr(kubernetes.cluster, end)(kubernetes.pods(job)[0])

    state = kubernetes.wait(job, *OVER)
    assert state.phase is Phase.FAILED
    assert all(word in state.reason for word in words), state


SAID = [
    (waiting("CrashLoopBackOff", "back-off 5m0s restarting"), ["again and again", "stoker logs"]),
    (waiting("InvalidImageName", "couldn't parse it"), ["is not the name of an image"]),
    (waiting("CreateContainerError", "python3: not found"), ["python and image of the target"]),
    (evicted('Usage of EmptyDir volume "shm" exceeds the limit "1Gi". '), ["evicted", "shm_gib"]),
    (evicted("The node was low on resource: ephemeral-storage. "), ["node ran out of local disk"]),
    (evicted("The node was low on resource: memory. "), ["node ran out of memory", "memory_gib"]),
]
"""State of a pod -> what the job says."""


def test_the_reason_that_a_node_gives_for_a_pod_is_reported_with_its_remedy(
    kubernetes: KubernetesJobs,
) -> None:
    """Only the states are played: no pod of this job runs."""
    cluster = kubernetes.cluster
    cluster.paused.set()
    job = kubernetes.submit("said", "3", workers=1)
    name = object_name(job.id)
    labels = {"app.kubernetes.io/managed-by": "stoker", "stoker/job": name}
    template = kubernetes.job_set(job)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    metadata = {"name": f"{name}-0", "namespace": NAMESPACE, "labels": labels}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    made = cluster.api.create(PODS, pod)
    reasons = []
    try:
        for status, _ in SAID:

            def change(item: Object, status: Object = status) -> None:
                item["status"] = {"phase": "Pending", **status}

            cluster.storage.change(PODS, made, change, status=True)
            reasons.append(kubernetes.state(job).reason)
    finally:
        cluster.storage.delete(PODS, made, grace_s=0)
        cluster.paused.clear()
        kubernetes.provider().stop(job.id)
    for reason, (_, words) in zip(reasons, SAID, strict=True):
        assert all(word in reason for word in words), (reason, words)


def test_half_started_jobs_do_not_hold_each_other_for_ever(kubernetes: KubernetesJobs) -> None:
    """Each has one of its two GPUs, and neither gets the other."""
    for name in ("a", "b"):
        kubernetes.cluster.add_node(f"gpu-{name}", labels={"gpu": name}, gpus="1")
    kinds = {"a": "job", "b": "jobset"}
    own = [{"node_selector": {"gpu": name}, "kind": kind} for name, kind in kinds.items()]
    jobs = [
        kubernetes.submit(f"half-{number}", "3", gpus=1, settings=settings | {"start_s": 3})
        for number, settings in enumerate(own)
    ]

    for job in jobs:
        state = kubernetes.wait(job, *OVER)
        assert state.phase is Phase.FAILED
        assert "nothing from the pods of worker" in state.reason, (state, kubernetes.log(job))
        assert "request fewer workers, or set `queue`" in state.reason
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
