"""The job controller: pods by index, failures, deadlines, suspension and the end of a job."""

from __future__ import annotations

import time
from calendar import timegm
from typing import Any

from tests.kubernetes_api.controllers.pod_failures import judge
from tests.kubernetes_api.events import record
from tests.kubernetes_api.problems import Refusal
from tests.kubernetes_api.resources import (
    JOBS,
    PODS,
    Object,
    condition_of,
    copied,
    is_true,
    owned_by,
    owner_reference,
)
from tests.kubernetes_api.server.api import Api
from tests.kubernetes_api.storage import now, suffix

TRACKING = "batch.kubernetes.io/job-tracking"
"""Finalizer of a pod that has not been counted."""

INDEX = "batch.kubernetes.io/job-completion-index"
RETRY_S = 1.0
"""Interval of attempts to create pods that were refused, seconds."""

_SOURCE = "job-controller"


def seconds(time_of_object: str) -> float:
    """Return a time of an object as seconds since the epoch."""
    return float(timegm(time.strptime(time_of_object, "%Y-%m-%dT%H:%M:%SZ")))


class JobController:
    """Brings every job forward."""

    def __init__(self, api: Api, *, backoff_s: float) -> None:
        """Do nothing yet.

        Args:
            api: The cluster.
            backoff_s: Delay of the first replacement of a failed pod, seconds; it doubles each time.
        """
        self._api, self._storage = api, api.storage
        self._backoff_s = backoff_s
        self._not_before: dict[str, float] = {}

    def sync(self) -> None:
        """Look at all jobs."""
        pods: dict[str, list[Object]] = {}
        for pod in self._storage.items(PODS):
            for owner in pod["metadata"].get("ownerReferences") or []:
                pods.setdefault(owner["uid"], []).append(pod)
        uids = set()
        for job in self._storage.items(JOBS):
            uids.add(job["metadata"]["uid"])
            self._sync(job, pods.get(job["metadata"]["uid"], []))
        for uid, orphans in pods.items():
            for pod in orphans if uid not in uids else ():
                self._untrack(pod)

    def _sync(self, job: Object, pods: list[Object]) -> None:
        if is_true(job, "Complete") or is_true(job, "Failed"):
            self._expire(job)
            return
        if "deletionTimestamp" in job["metadata"]:
            for pod in pods:
                self._untrack(pod)
            return
        with self._storage.changed:
            status = copied(job.get("status") or {})
            self._suspension(job, status)
            self._count(job, status, pods)
            self._verdict(job, status, pods)
            live = [pod for pod in pods if _is_live(pod)]
            ends = _true(status, "FailureTarget") or _true(status, "SuccessCriteriaMet")
            if job["spec"].get("suspend") or ends:
                self._end_pods(job, live)
            else:
                live += self._start_pods(job, status, live)
            if ends and not live:
                self._finish(job, status)
            _numbers(status, live)
            if status != job.get("status"):
                self._storage.change(
                    JOBS, job, lambda each: each.update(status=status), status=True
                )

    def _suspension(self, job: Object, status: Object) -> None:
        suspended = bool(job["spec"].get("suspend"))
        is_known = bool(_condition(status, "Suspended"))
        if suspended and not _true(status, "Suspended"):
            _set(status, "Suspended", "True", "JobSuspended", "Job suspended")
            status.pop("startTime", None)
            self._event(job, "Suspended", "Job suspended")
        if not suspended and is_known and _true(status, "Suspended"):
            _set(status, "Suspended", "False", "JobResumed", "Job resumed")
            self._event(job, "Resumed", "Job resumed")
        if not suspended:
            status.setdefault("startTime", now())

    def _count(self, job: Object, status: Object, pods: list[Object]) -> None:
        replaced_early = job["spec"]["podReplacementPolicy"] == "TerminatingOrFailed"
        for pod in pods:
            phase = pod["status"]["phase"]
            is_leaving = replaced_early and "deletionTimestamp" in pod["metadata"]
            if TRACKING not in pod["metadata"].get("finalizers", []):
                continue
            if phase == "Succeeded":
                done = _indexes(status, "completedIndexes") | {_index(pod)}
                status["completedIndexes"] = _listed(done)
                status["succeeded"] = status.get("succeeded", 0) + 1
            elif phase == "Failed" or is_leaving:
                self._count_failure(job, status, pod)
            else:
                continue
            self._untrack(pod)

    def _count_failure(self, job: Object, status: Object, pod: Object) -> None:
        verdict = judge(job, pod) if pod["status"]["phase"] == "Failed" else None
        if (
            verdict is not None
            and verdict.action == "FailJob"
            and not _true(status, "FailureTarget")
        ):
            _set(status, "FailureTarget", "True", "PodFailurePolicy", verdict.message)
        if verdict is None or verdict.action != "Ignore":
            status["failed"] = status.get("failed", 0) + 1
        delay_s = self._backoff_s * 2 ** min(status.get("failed", 0), 6) / 2
        self._not_before[job["metadata"]["uid"]] = time.monotonic() + delay_s

    def _verdict(self, job: Object, status: Object, pods: list[Object]) -> None:
        spec = job["spec"]
        if _true(status, "FailureTarget") or _true(status, "SuccessCriteriaMet"):
            return
        completions = spec.get("completions")
        if status.get("succeeded", 0) >= (completions if completions is not None else 1):
            _set(
                status,
                "SuccessCriteriaMet",
                "True",
                "CompletionsReached",
                "Reached expected number of succeeded pods",
            )
        elif status.get("failed", 0) > spec["backoffLimit"]:
            words = "Job has reached the specified backoff limit"
            _set(status, "FailureTarget", "True", "BackoffLimitExceeded", words)
        elif self._is_late(spec, status):
            words = "Job was active longer than specified deadline"
            _set(status, "FailureTarget", "True", "DeadlineExceeded", words)

    def _is_late(self, spec: Object, status: Object) -> bool:
        longest_s = spec.get("activeDeadlineSeconds")
        if longest_s is None or "startTime" not in status:
            return False
        return time.time() - seconds(status["startTime"]) >= longest_s

    def _start_pods(self, job: Object, status: Object, live: list[Object]) -> list[Object]:
        spec = job["spec"]
        if time.monotonic() < self._not_before.get(job["metadata"]["uid"], 0.0):
            return []
        taken = {_index(pod) for pod in live} | _indexes(status, "completedIndexes")
        count = spec.get("completions")
        free = [
            index
            for index in range(count if count is not None else len(live) + 1)
            if index not in taken
        ]
        if spec["completionMode"] != "Indexed":
            left = (count if count is not None else 1) - status.get("succeeded", 0) - len(live)
            free = list(range(max(left, 0)))
        started = []
        for index in free[: max(0, spec["parallelism"] - len(live))]:
            try:
                pod = self._api.create(PODS, _pod(job, index), checked=True)
            except Refusal as refusal:
                self._not_before[job["metadata"]["uid"]] = time.monotonic() + RETRY_S
                self._event(job, "FailedCreate", f"Error creating: {refusal.message}", warning=True)
                break
            started.append(pod)
            self._event(job, "SuccessfulCreate", f"Created pod: {pod['metadata']['name']}")
        return started

    def _end_pods(self, job: Object, live: list[Object]) -> None:
        for pod in live:
            if "deletionTimestamp" not in pod["metadata"]:
                self._api.delete(PODS, pod, {})
                self._event(job, "SuccessfulDelete", f"Deleted pod: {pod['metadata']['name']}")

    def _finish(self, job: Object, status: Object) -> None:
        if _true(status, "SuccessCriteriaMet"):
            words = "Reached expected number of succeeded pods"
            _set(status, "Complete", "True", "CompletionsReached", words)
            status["completionTime"] = now()
            self._event(job, "Completed", "Job completed")
            return
        target = _condition(status, "FailureTarget")
        _set(status, "Failed", "True", target["reason"], target["message"])
        self._event(job, target["reason"], target["message"], warning=True)

    def _expire(self, job: Object) -> None:
        left_s = job["spec"].get("ttlSecondsAfterFinished")
        ended = condition_of(job, "Complete") or condition_of(job, "Failed")
        if left_s is None or "deletionTimestamp" in job["metadata"]:
            return
        if time.time() - seconds(ended["lastTransitionTime"]) >= left_s:
            self._api.delete(JOBS, job, {"propagationPolicy": "Foreground"})

    def _untrack(self, pod: Object) -> None:
        def change(each: Object) -> None:
            kept = [name for name in each["metadata"].get("finalizers", []) if name != TRACKING]
            each["metadata"]["finalizers"] = kept

        if TRACKING in pod["metadata"].get("finalizers", []):
            self._storage.change(PODS, pod, change)

    def _event(self, job: Object, reason: str, message: str, *, warning: bool = False) -> None:
        record(self._storage, job, reason, message, source=_SOURCE, warning=warning)


def pods_of(api: Api, job: Object) -> list[Object]:
    """Return the pods of a job."""
    pods = api.storage.items(PODS, job["metadata"]["namespace"])
    return [pod for pod in pods if owned_by(pod, job)]


def _pod(job: Object, index: int) -> Object:
    template = copied(job["spec"]["template"])
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    labels = {"controller-uid": uid, "job-name": name}
    labels |= {f"batch.kubernetes.io/{key}": value for key, value in labels.items()}
    metadata: dict[str, Any] = template.get("metadata") or {}
    metadata["labels"] = (metadata.get("labels") or {}) | labels
    metadata |= {
        "namespace": job["metadata"]["namespace"],
        "ownerReferences": [owner_reference(job)],
        "finalizers": [TRACKING],
        "name": f"{name}-{suffix()}",
    }
    if job["spec"]["completionMode"] == "Indexed":
        metadata["name"] = f"{name}-{index}-{suffix()}"
        metadata["labels"][INDEX] = str(index)
        metadata["annotations"] = (metadata.get("annotations") or {}) | {INDEX: str(index)}
        template["spec"].setdefault("hostname", f"{name}-{index}")
        own = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}
        for container in template["spec"]["containers"]:
            env = container.setdefault("env", [])
            if all(each["name"] != "JOB_COMPLETION_INDEX" for each in env):
                env.append({"name": "JOB_COMPLETION_INDEX", "valueFrom": own})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _is_live(pod: Object) -> bool:
    return pod["status"]["phase"] not in ("Succeeded", "Failed")


def _index(pod: Object) -> int:
    return int(pod["metadata"].get("labels", {}).get(INDEX, -1))


def _indexes(status: Object, name: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, status.get(name, "").split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _listed(indexes: set[int]) -> str:
    """As `1,3-5`."""
    parts: list[list[int]] = []
    for index in sorted(each for each in indexes if each >= 0):
        if parts and parts[-1][-1] == index - 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return ",".join(f"{each[0]}-{each[-1]}" if len(each) > 1 else str(each[0]) for each in parts)


def _numbers(status: Object, live: list[Object]) -> None:
    leaving = [pod for pod in live if "deletionTimestamp" in pod["metadata"]]
    ready = [pod for pod in live if is_true(pod, "Ready")]
    status |= {"terminating": len(leaving), "ready": len(ready)}
    status["active"] = len(live) - len(leaving)


def _condition(status: Object, kind: str) -> Object:
    return condition_of({"status": status}, kind)


def _true(status: Object, kind: str) -> bool:
    return is_true({"status": status}, kind)


def _set(status: Object, kind: str, value: str, reason: str, message: str) -> None:
    conditions = status.setdefault("conditions", [])
    conditions[:] = [each for each in conditions if each["type"] != kind]
    conditions.append(
        {
            "type": kind,
            "status": value,
            "reason": reason,
            "message": message,
            "lastTransitionTime": now(),
            "lastProbeTime": now(),
        }
    )
