"""What a cluster answers, in the user's words: states, reasons with their remedies, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.core.errors import ConfigError, UserError
from stoker.jobs.provider import Phase
from stoker.jobs.providers.kubernetes.pod_logs import _Last
from stoker.jobs.providers.kubernetes.problems import (
    AnswerLost,
    Conflict,
    Gone,
    NotFound,
    problem,
)
from stoker.jobs.providers.kubernetes.reasons import event_reason, failure_reason, kueue_reason
from stoker.jobs.providers.kubernetes.state import Seen, known_state

ANNOTATIONS = {"stoker/job-id": "Trip-1234abcd", "stoker/workers": "2", "stoker/submitted": "100"}

Object = dict[str, Any]


def pod(rank: int, **status: Any) -> Object:
    container = {
        "name": "tensorflow",
        "image": "r.io/x:1",
        "resources": {"limits": {"memory": "4096Mi"}},
    }
    label = {"batch.kubernetes.io/job-completion-index": str(rank)}
    return {
        "metadata": {"name": f"trip-1234abcd-{rank}-x", "labels": label},
        "spec": {"containers": [container], "nodeName": f"node-{rank}"},
        "status": {"phase": "Pending", **status},
    }


def container(**state: Any) -> Object:
    return {"containerStatuses": [{"name": "tensorflow", "image": "r.io/x:1", "state": state}]}


def condition(kind: str, status: str = "True", reason: str = "", message: str = "") -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def workload(*conditions: Object, suspend: bool = False, queue: str = "", **status: Any) -> Object:
    labels = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    return {
        "metadata": {"name": "trip-1234abcd", "annotations": ANNOTATIONS, "labels": labels},
        "spec": {"suspend": suspend},
        "status": {"conditions": list(conditions), **status},
    }


def seen(*pods: Object, kind: str = "jobset", **more: Any) -> Seen:
    return Seen(kind=kind, workload=more.pop("workload", workload()), pods=pods, **more)


RUNS = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            container(waiting={"reason": "ImagePullBackOff", "message": "Back-off pulling"}),
            "worker 1: the image r.io/x:1 cannot be pulled; check its name, and image_pull_secrets of the target",
        ),
        (
            container(waiting={"reason": "InvalidImageName"}),
            "r.io/x:1 is not the name of an image; correct image of the target",
        ),
        (
            container(
                waiting={
                    "reason": "CreateContainerConfigError",
                    "message": 'secret "wandb" not found',
                }
            ),
            'create what is missing, or correct `secrets` and `run_as_user` of the target (secret "wandb" not found)',
        ),
        (
            container(waiting={"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}),
            "starts and ends again and again; `stoker logs` shows why (back-off 5m0s)",
        ),
        (
            {
                "conditions": [
                    condition(
                        "PodScheduled",
                        "False",
                        "Unschedulable",
                        "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: no victims.",
                    )
                ]
            },
            "no node has enough free nvidia.com/gpu; it waits until one is free, or request less",
        ),
        (
            {
                "conditions": [
                    condition(
                        "PodScheduled",
                        "False",
                        "Unschedulable",
                        "0/2 nodes are available: 2 node(s) had untolerated taint {spot: true}.",
                    )
                ]
            },
            "nodes that fit have a taint; add it to `tolerations` of the target",
        ),
        (
            {
                "conditions": [
                    condition(
                        "PodScheduled",
                        "False",
                        "Unschedulable",
                        "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.",
                    )
                ]
            },
            "no node has the labels of node_selector; correct it",
        ),
        (
            {
                "conditions": [
                    condition(
                        "PodScheduled",
                        "False",
                        "Unschedulable",
                        "0/2 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, "
                        "1 node(s) had untolerated taint {spot: }.",
                    )
                ]
            },
            "add it to `tolerations` of the target; or no node has the labels of node_selector",
        ),
        (
            {
                "conditions": [
                    condition(
                        "PodScheduled",
                        "False",
                        "Unschedulable",
                        '0/2 nodes are available: persistentvolumeclaim "runs" not found.',
                    )
                ]
            },
            "a claim of `volumes` cannot be used; list them: kubectl get persistentvolumeclaims",
        ),
    ],
)
def test_a_pod_that_cannot_start_says_why_and_what_to_do(status: Object, words: str) -> None:
    state = known_state(seen(pod(0, **RUNS), pod(1, **status)), None)
    assert state.phase is Phase.WAITING
    assert words in state.reason


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            container(terminated={"exitCode": 137, "reason": "OOMKilled"}),
            "worker 1 used more memory than its limit 4096Mi; raise memory_gib of the target",
        ),
        (
            container(
                terminated={"exitCode": 2, "message": "a\nstoker: label must be a column.\n"}
            ),
            "worker 1 ended with exit code 2: label must be a column.",
        ),
        (
            {"reason": "Evicted", "message": "The node was low on resource: ephemeral-storage."},
            "worker 1 was evicted: the node ran out of local disk; raise ephemeral_gib",
        ),
    ],
)
def test_a_job_that_failed_says_why_and_what_to_do(status: Object, words: str) -> None:
    failed = workload(condition("Failed", message="jobset failed due to reaching max restarts"))
    ended = pod(1, **status | {"phase": "Failed"})
    saved = pod(0, phase="Failed", **container(terminated={"exitCode": 75}))
    state = known_state(seen(saved, ended, workload=failed), None)
    assert state.phase is Phase.FAILED
    assert state.reason.startswith(words)
    assert state.reason.endswith("(max_restarts reached)")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("PreemptionByScheduler", "was preempted by a pod of higher priority; it continues when"),
        ("EvictionByEvictionAPI", "was evicted, e.g. by the drain of its node"),
        ("DeletionByTaintManager", "lost its node"),
    ],
)
def test_a_job_that_lost_a_pod_says_that_it_goes_on(reason: str, words: str) -> None:
    gone = pod(1, phase="Failed", conditions=[condition("DisruptionTarget", reason=reason)])
    state = known_state(seen(gone, workload=workload(restarts=1)), None)
    assert state.phase is Phase.RESTARTING
    assert words in state.reason
    assert state.restarts == 1


def test_a_job_runs_once_all_its_pods_run() -> None:
    one = known_state(seen(pod(0, **RUNS)), None)
    assert (one.phase, one.reason) == (Phase.WAITING, "waits for the pods of 2 worker(s); 1 run")
    both = known_state(seen(pod(0, **RUNS), pod(1, **RUNS)), None)
    assert (both.phase, both.reason) == (Phase.RUNNING, "")
    assert both.nodes == ("node-0", "node-1")
    assert (both.id, both.submitted_s, both.started_s) == ("Trip-1234abcd", 100.0, 1767225600.0)


@pytest.mark.parametrize(
    ("kind", "name"), [("job", "Complete"), ("jobset", "Completed"), ("tfjob", "Succeeded")]
)
def test_each_kind_of_job_ends(kind: str, name: str) -> None:
    ended = condition(name) | {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    state = known_state(seen(kind=kind, workload=workload(ended)), None)
    assert (state.phase, state.ended_s) == (Phase.DONE, 1767225600.0)


def test_restarts_of_an_indexed_job_are_its_starts(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / "incarnations").mkdir(exist_ok=True)
        (tmp_path / "incarnations" / str(number)).touch()
    (tmp_path / "incarnations" / "3.pods").mkdir()
    assert known_state(seen(kind="job"), tmp_path).restarts == 2
    assert known_state(seen(kind="job", workload=workload(failed=3)), None).restarts == 2


def test_a_job_in_a_queue_says_why_it_waits() -> None:
    pending = {
        "status": {
            "conditions": [
                condition(
                    "QuotaReserved",
                    "False",
                    "Pending",
                    "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu",
                )
            ]
        }
    }
    queued = workload(suspend=True, queue="team")
    state = known_state(seen(workload=queued, queued=pending), None)
    assert state.phase is Phase.WAITING
    assert state.reason.startswith("waits in Kueue's queue: couldn't assign flavors")

    wrong = {
        "status": {
            "conditions": [
                condition("QuotaReserved", "False", "Inadmissible", "LocalQueue team doesn't exist")
            ]
        }
    }
    assert "cannot admit it: LocalQueue team doesn't exist" in kueue_reason(wrong)

    evicted = {"status": {"conditions": [condition("Evicted", reason="Preempted", message="x")]}}
    state = known_state(seen(workload=queued, queued=evicted), None)
    assert state.phase is Phase.RESTARTING
    assert "took its quota away (Preempted)" in state.reason

    alone = known_state(seen(workload=workload(suspend=True)), None)
    assert alone.reason.startswith("is suspended: submit it again")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            'pods "trip-0" is forbidden: exceeded quota: team, requested: limits.memory=4Gi',
            "the job must be within the quota of its namespace",
        ),
        (
            'pods "trip-0" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot',
            "pods must keep to the security level of the namespace",
        ),
        (
            'pods "trip-0" is forbidden: no PriorityClass with name high was found',
            "priority_class must exist in the cluster",
        ),
        (
            'pods "trip-0" is forbidden: error looking up service account team/train',
            "service_account must exist in the namespace",
        ),
    ],
)
@pytest.mark.parametrize("reason", ["FailedCreate", "JobCreationFailed"])
def test_pods_that_are_refused_are_explained_by_an_event(
    reason: str, message: str, words: str
) -> None:
    events = [
        {"reason": "SuccessfulCreate", "message": "Created"},
        {"reason": reason, "message": f"Error creating: {message}"},
    ]
    state = known_state(seen(events=events), None)
    assert state.reason.startswith(words)
    assert message[:60] in state.reason
    assert event_reason([]) == ""


def ended(code: int, at: str) -> Object:
    """The state of a container that has ended."""
    return {"exitCode": code, "finishedAt": at}


def test_the_most_telling_failure_counts() -> None:
    other = pod(0, phase="Failed", **container(terminated={"exitCode": 1, "message": "peer"}))
    memory = pod(1, phase="Failed", **container(terminated={"reason": "OOMKilled"}))
    assert failure_reason([other, memory]).startswith("worker 1 used more memory")
    late = pod(0, phase="Failed", **container(terminated=ended(137, "2026-11-28T01:00:50Z")))
    first = pod(1, phase="Failed", **container(terminated=ended(2, "2026-11-28T01:00:00Z")))
    assert failure_reason([late, first]).startswith("worker 1 ended with exit code 2")
    assert failure_reason([pod(0, **RUNS)]) == ""


@pytest.mark.parametrize(
    ("status", "message", "kind", "words"),
    [
        (401, "Unauthorized", UserError, "log in to the cluster again"),
        (403, "jobs is forbidden: User x cannot create", UserError, "the smallest Role that works"),
        (403, "exceeded quota: team", ConfigError, "within the quota of its namespace"),
        (404, 'namespaces "teem" not found', ConfigError, "kubectl create namespace team"),
        (404, 'jobs "trip" not found', NotFound, "the cluster must know"),
        (409, 'jobs "trip" already exists', Conflict, "already exists"),
        (410, "too old resource version", Gone, "too old"),
        (422, "spec.completions: Invalid value", UserError, "--dry-run"),
        (429, "too many requests", AnswerLost, "not submitted twice"),
        (503, "apiserver is shutting down", AnswerLost, "not submitted twice"),
    ],
)
def test_errors_of_the_api_are_one_line(
    status: int, message: str, kind: type[UserError], words: str
) -> None:
    body = json.dumps({"kind": "Status", "message": message, "code": status})
    error = problem(status, body, what="POST jobs", namespace="team")
    assert type(error) is kind
    assert words in str(error)
    assert "\n" not in str(error)
    proxy = problem(502, "<html>\nbad gateway\n</html>", what="POST jobs", namespace="team")
    assert "\n" not in str(proxy)


def test_a_log_that_is_read_again_gives_each_line_once() -> None:
    last = _Last()
    at = "2026-01-01T00:00:0"
    first = [f"{at}1.5Z a", f"{at}1.50000001Z b", f"{at}2Z same", f"{at}2Z same"]
    assert list(last.new(iter(first))) == first
    assert last.query == {"sinceTime": f"{at}2Z"}
    again = [*first, f"{at}2Z same", f"{at}2.1Z c"]
    assert list(last.new(iter(again))) == again[4:]
