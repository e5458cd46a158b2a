"""Explains why a job waits, restarts or has failed, from its pods, its events and Kueue's workload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stoker.core.errors import EXIT_DONE, EXIT_PREEMPTED
from stoker.jobs.providers.kubernetes.problems import message_problem

Object = Mapping[str, Any]

EXIT_KILLED = 137

_PULL = "the image {image} cannot be pulled; check its name, and image_pull_secrets of the target"
_WAITING = {
    "ErrImagePull": _PULL,
    "ImagePullBackOff": _PULL,
    "ErrImageNeverPull": _PULL,
    "InvalidImageName": "{image} is not the name of an image; correct image of the target",
    "RegistryUnavailable": "the registry of {image} does not answer; the cluster tries again",
    "CreateContainerConfigError": "its container cannot be made; create what is missing, or correct `secrets` and "
    "`run_as_user` of the target",
    "CreateContainerError": "its container cannot be made; see python and image of the target",
    "RunContainerError": "its container cannot be started; see python and image of the target",
    "CrashLoopBackOff": "starts and ends again and again; `stoker logs` shows why",
}
"""Kubernetes's reason why a container does not run -> explanation for the user. Source: Kubernetes, pkg/kubelet
(container and images)."""

_UNSCHEDULABLE = (
    (
        "persistentvolumeclaim",
        "a claim of `volumes` cannot be used; list them: kubectl get persistentvolumeclaims",
    ),
    ("PersistentVolumeClaims", "a claim of `volumes` has no volume yet; see kubectl get pvc"),
    (
        "Insufficient",
        "no node has enough free {resource}; it waits until one is free, or request less if no node has so much",
    ),
    (
        "untolerated taint",
        "nodes that fit have a taint; add it to `tolerations` of the target",
    ),
    (
        "didn't match Pod's node affinity",
        "no node has the labels of node_selector; correct it: kubectl get nodes --show-labels",
    ),
)
"""Part of the scheduler's message -> explanation for the user."""

_DISRUPTED = {
    "PreemptionByScheduler": "was preempted by a pod of higher priority; it continues when a node is free",
    "PreemptionByKubeScheduler": "was preempted by a pod of higher priority; it continues when a node is free",
    "DeletionByTaintManager": "lost its node, which got a taint; it continues on another one",
    "EvictionByEvictionAPI": "was evicted, e.g. by the drain of its node; it continues on another one",
    "DeletionByPodGC": "lost its node; it continues on another one",
    "TerminationByKubelet": "was evicted by its node; it continues when a node has room",
}
"""Reason of the condition DisruptionTarget -> explanation for the user. Source: Kubernetes, "Disruptions"."""

_EVICTED = (
    (
        "low on resource: ephemeral",
        "the node ran out of local disk; raise ephemeral_gib of the target to what it really uses",
    ),
    ("ephemeral", "it used more local disk than allowed; raise ephemeral_gib of the target"),
    ("EmptyDir", "it used more of /dev/shm than allowed; raise shm_gib of the target"),
    ("memory", "the node ran out of memory; raise memory_gib of the target to what it really uses"),
)
"""Part of the kubelet's message about an eviction -> explanation for the user. Of the pod's emptyDir volumes, only
/dev/shm has a limit.

Source: Kubernetes, pkg/kubelet/eviction/helpers.go. An eviction because the pod exceeds its own limit is not a
disruption, but a failure.
"""

_REFUSED = ("FailedCreate", "JobCreationFailed", "HeadlessServiceCreationFailed")
"""Reasons of events: the cluster rejects the objects that a controller creates for a job. Source: Kubernetes; JobSet,
pkg/constants."""

OOM = "used more memory than its limit {limit}; raise memory_gib of the target, or shm_gib if /dev/shm is full"


def rank_of(pod: Object) -> str:
    """Return the rank of a pod, as text; the pod's name if it has no rank."""
    meta = pod["metadata"]
    named = {**(meta.get("annotations") or {}), **(meta.get("labels") or {})}
    for name in ("batch.kubernetes.io/job-completion-index", "training.kubeflow.org/replica-index"):
        if name in named:
            return str(named[name])
    return str(meta["name"])


def waiting_reason(pods: Iterable[Object]) -> str:
    """Return why pods do not run yet; empty if they will run in seconds."""
    for pod in pods:
        if said := (_container_waits(pod) or _scheduler_waits(pod)):
            return f"worker {rank_of(pod)}: {said}"
    return ""


def failure_reason(pods: Iterable[Object]) -> str:
    """Return why a pod failed: the most specific reason, of equally specific ones the first; else empty."""
    found: list[tuple[int, str, str]] = []
    for pod in pods:
        if weighed := _failure(pod):
            weight, said = weighed
            found.append((-weight, _ended_at(pod), f"worker {rank_of(pod)} {said}"))
    return min(found)[-1] if found else ""


def disruption_reason(pods: Iterable[Object]) -> str:
    """Return why a pod was removed; empty if no pod was removed."""
    for pod in pods:
        if said := _disruption(pod):
            return f"worker {rank_of(pod)} {said}"
    return ""


def event_reason(events: Sequence[Object]) -> str:
    """Return why the cluster cannot create pods, or has restarted them: the newest event with a reason."""
    for event in reversed(events):
        reason, message = str(event.get("reason", "")), str(event.get("message", ""))
        if reason in _REFUSED:
            if known := message_problem(message):
                return f"{known[0]}; {_short(message)}. {known[1]}"
            return f"the cluster cannot make its pods: {_short(message)}"
        if reason == "FailedMount":
            return f"a volume cannot be mounted: {_short(message)}"
        if reason == "Preempted":
            return f"a worker {_DISRUPTED['PreemptionByScheduler']} ({_short(message)})"
        if reason == "Evicted":
            return f"a worker was evicted: {_short(message)}"
    return ""


def kueue_reason(workload: Object | None) -> str:
    """Return why Kueue has not admitted a job.

    Args:
        workload: Kueue's Workload object of the job; None if there is none, or the user may not read it.
    """
    if workload is None:
        return "waits for Kueue, which has not looked at it yet"
    found = {each["type"]: each for each in (workload.get("status") or {}).get("conditions") or []}
    evicted = found.get("Evicted")
    if evicted is not None and evicted.get("status") == "True":
        why = f"Kueue took its quota away ({evicted.get('reason')}); it continues when there is quota again"
        return f"{why}: {_short(evicted.get('message', ''))}"
    reserved = found.get("QuotaReserved")
    if reserved is not None and reserved.get("status") == "False":
        message = _short(reserved.get("message", ""))
        if reserved.get("reason") == "Inadmissible":
            return (
                f"Kueue cannot admit it: {message}. See kubectl get localqueues and clusterqueues"
            )
        return f"waits in Kueue's queue: {message}"
    if reserved is None:
        return "waits in Kueue's queue"
    return "waits until Kueue's admission checks are done"


def _container_waits(pod: Object) -> str:
    for each in _statuses(pod):
        waiting = (each.get("state") or {}).get("waiting") or {}
        words = _WAITING.get(str(waiting.get("reason")))
        if words is not None:
            message = _short(waiting.get("message", ""))
            said = words.format(image=each.get("image") or _image(pod))
            return f"{said} ({message or waiting['reason']})"
    return ""


def _scheduler_waits(pod: Object) -> str:
    condition = _condition(pod, "PodScheduled")
    if condition is None or condition.get("status") != "False":
        return ""
    message = str(condition.get("message", ""))
    if condition.get("reason") == "SchedulingGated":
        return "waits for its queue"
    # Name all reasons: nodes may be unsuitable for different reasons, and the user may be able to remove any of them.
    found = [words for part, words in _UNSCHEDULABLE if part in message] or ["no node fits"]
    return f"{'; or '.join(found).format(resource=_resource(message))} ({_short(message)})"


def _failure(pod: Object) -> tuple[int, str] | None:
    """Return how specific the failure reason of a pod is, and the reason."""
    status = pod.get("status") or {}
    if status.get("reason") == "Evicted":  # the container itself shows only that it was killed
        return 4, _disruption(pod)
    for each in _statuses(pod):
        ended = (each.get("state") or {}).get("terminated") or {}
        ended = ended or (each.get("lastState") or {}).get("terminated") or {}
        code = ended.get("exitCode")
        if ended.get("reason") == "OOMKilled":
            return 4, OOM.format(limit=_memory_limit(pod))
        if code not in (None, EXIT_DONE, EXIT_PREEMPTED):
            return 3, _exit_words(code, str(ended.get("message", "")))
    if status.get("reason") == "DeadlineExceeded":
        return 2, "ran longer than the cluster allows"
    return None


def _ended_at(pod: Object) -> str:
    """Return when a pod's container ended, as a string that sorts by time."""
    ends = [(each.get("state") or {}).get("terminated") or {} for each in _statuses(pod)]
    return max((str(each.get("finishedAt", "")) for each in ends), default="")


def _exit_words(code: int, message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("stoker: ")] or lines
    words = f"ended with exit code {code}"
    if code == EXIT_KILLED:
        words = "was killed"
    return f"{words}: {said[-1].removeprefix('stoker: ')}" if said else words


def _disruption(pod: Object) -> str:
    status = pod.get("status") or {}
    if status.get("reason") == "Evicted":
        message = str(status.get("message", ""))
        fix = next(
            (words for part, words in _EVICTED if part in message), "its node ran out of a resource"
        )
        return f"was evicted: {fix} ({_short(message)})"
    condition = _condition(pod, "DisruptionTarget")
    if condition is None or condition.get("status") != "True":
        return ""
    reason = str(condition.get("reason"))
    return _DISRUPTED.get(reason, f"was taken away ({reason}); it continues on another node")


def _statuses(pod: Object) -> list[dict[str, Any]]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _condition(pod: Object, kind: str) -> dict[str, Any] | None:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return next((each for each in conditions if each.get("type") == kind), None)


def _container(pod: Object) -> dict[str, Any]:
    containers = (pod.get("spec") or {}).get("containers") or [{}]
    return dict(containers[0])


def _image(pod: Object) -> str:
    return str(_container(pod).get("image", ""))


def _memory_limit(pod: Object) -> str:
    limits = (_container(pod).get("resources") or {}).get("limits") or {}
    return str(limits.get("memory", ""))


def _resource(message: str) -> str:
    """Return the resource that is missing, e.g. `nvidia.com/gpu` from `2 Insufficient nvidia.com/gpu`."""
    rest = message.partition("Insufficient ")[2]
    return rest.partition(",")[0].split(" ")[0].rstrip(".")


def _short(message: object) -> str:
    """Return a message on one line, shortened if it is long."""
    text = " ".join(str(message).split())
    return text if len(text) <= 200 else f"{text[:200]}..."
