"""The JobSet controller: child jobs, the headless service, restarts by the failure policy, suspension.

Written after its source (kubernetes-sigs/jobset at 08dfbdfd, pkg/controllers): order of the steps, reasons, messages.
Left out: startup order, dependencies, in-place restarts and restarts of single jobs, elastic sizes, claims.
"""

from __future__ import annotations

import hashlib
import re
import time

from tests.kubernetes_api.controllers.jobs import seconds
from tests.kubernetes_api.events import record
from tests.kubernetes_api.problems import Refusal
from tests.kubernetes_api.resources import (
    JOB_SETS,
    JOBS,
    SERVICES,
    Object,
    condition_of,
    copied,
    is_true,
    owned_by,
    owner_reference,
)
from tests.kubernetes_api.server.api import Api
from tests.kubernetes_api.storage import now

PREFIX = "jobset.sigs.k8s.io"
ATTEMPT = f"{PREFIX}/restart-attempt"

_RESTARTS = ("RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
_DEFAULT: Object = {"name": "", "action": "RestartJobSet"}


class JobSetController:
    """Brings every JobSet forward."""

    def __init__(self, api: Api) -> None:
        self._api, self._storage = api, api.storage

    def sync(self) -> None:
        """Look at all JobSets."""
        for each in self._storage.items(JOB_SETS):
            if "deletionTimestamp" not in each["metadata"]:
                with self._storage.changed:
                    status = copied(each.get("status") or {})
                    self._sync(each, status)
                    self._store(each, status)

    def _store(self, item: Object, status: Object) -> None:
        if status != item.get("status"):
            self._storage.change(
                JOB_SETS, item, lambda each: each.update(status=status), status=True
            )

    def _sync(self, item: Object, status: Object) -> None:
        namespace = item["metadata"]["namespace"]
        children = [job for job in self._storage.items(JOBS, namespace) if owned_by(job, item)]
        attempt = status.setdefault("restarts", 0)
        status.setdefault("restartsCountTowardsMax", 0)
        current = [job for job in children if int(job["metadata"]["labels"][ATTEMPT]) >= attempt]
        status["replicatedJobsStatus"] = [
            _counts(each, current) for each in item["spec"]["replicatedJobs"]
        ]
        failed = [job for job in current if is_true(job, "Failed")]
        active = [job for job in current if not is_true(job, "Complete") and job not in failed]
        if status.get("terminalState"):
            self._delete(active)
            self._expire(item)
            return
        self._delete([job for job in children if job not in current])
        if failed:
            self._fail(item, status, failed)
            return
        if current and not active and len(current) == _replicas(item):
            self._set(
                item, status, "Completed", "AllJobsCompleted", "jobset completed successfully"
            )
            status["terminalState"] = "Completed"
            return
        self._service(item)
        self._create(item, status, children)
        self._suspend(item, status, active)

    def _fail(self, item: Object, status: Object, failed: list[Object]) -> None:
        policy = item["spec"].get("failurePolicy")
        if policy is None:
            words = f"jobset failed due to one or more job failures {_first(_earliest(failed))}"
            self._end(item, status, "FailedJobs", words)
            return
        rule, job = _matching(policy.get("rules") or [], failed)
        action = rule["action"]
        applying = f"applying {action} failure policy action {_first(job)}"
        if action == "FailJobSet":
            self._end(item, status, "FailJobSetFailurePolicyAction", applying)
            return
        assert action in _RESTARTS, f"{action} is not built"
        counts = action == "RestartJobSet"
        if counts and status["restartsCountTowardsMax"] >= policy.get("maxRestarts", 0):
            words = f"jobset failed due to reaching max number of restarts {_first(job)}"
            self._end(item, status, "ReachedMaxRestarts", words)
            return
        status["restarts"] += 1
        status["restartsCountTowardsMax"] += int(counts)
        reason = f"FailurePolicy_{rule['name']}" if rule["name"] else "DefaultFailurePolicy"
        _put(status, "Restarting", "True", reason, applying)
        self._event(item, f"{action}FailurePolicyAction", applying)

    def _end(self, item: Object, status: Object, reason: str, message: str) -> None:
        self._set(item, status, "Failed", reason, message)
        status["terminalState"] = "Failed"

    def _set(self, item: Object, status: Object, kind: str, reason: str, message: str) -> None:
        _put(status, kind, "True", reason, message)
        self._event(item, reason, message, warning=kind == "Failed")

    def _service(self, item: Object) -> None:
        network, name = item["spec"]["network"], item["metadata"]["name"]
        subdomain = network.get("subdomain") or name
        namespace = item["metadata"]["namespace"]
        if not network["enableDNSHostnames"] or self._storage.find(SERVICES, namespace, subdomain):
            return
        spec = {
            "clusterIP": "None",
            "selector": {f"{PREFIX}/jobset-name": name},
            "publishNotReadyAddresses": network["publishNotReadyAddresses"],
        }
        self._make(item, SERVICES_OF | {"metadata": {"name": subdomain}, "spec": spec})

    def _create(self, item: Object, status: Object, children: list[Object]) -> None:
        taken = {job["metadata"]["name"] for job in children}
        old = [
            job for job in children if int(job["metadata"]["labels"][ATTEMPT]) < status["restarts"]
        ]
        policy = item["spec"].get("failurePolicy") or {}
        if old and policy.get("restartStrategy") == "BlockingRecreate":
            return
        for replicated in item["spec"]["replicatedJobs"]:
            for index in range(replicated["replicas"]):
                job = _child(item, replicated, index, status["restarts"])
                if job["metadata"]["name"] not in taken:
                    self._make(item, job)

    def _make(self, item: Object, child: Object) -> None:
        child["metadata"] |= {
            "namespace": item["metadata"]["namespace"],
            "ownerReferences": [owner_reference(item)],
        }
        is_job = child["kind"] == "Job"
        try:
            self._api.create(JOBS if is_job else SERVICES, child)
        except Refusal as refusal:
            reason = "JobCreationFailed" if is_job else "HeadlessServiceCreationFailed"
            self._event(item, reason, refusal.message, warning=True)

    def _suspend(self, item: Object, status: Object, active: list[Object]) -> None:
        wanted = bool(item["spec"].get("suspend"))
        for job in active:
            if bool(job["spec"].get("suspend")) is wanted:
                continue
            if not wanted:
                self._storage.change(JOBS, job, _forget_start, status=True)
            self._storage.change(JOBS, job, lambda each: each["spec"].update(suspend=wanted))
        if wanted and not is_true({"status": status}, "Suspended"):
            self._set(item, status, "Suspended", "SuspendedJobs", "jobset is suspended")
        if not wanted and is_true({"status": status}, "Suspended"):
            _put(status, "Suspended", "False", "ResumeJobs", "jobset is resumed")
            self._event(item, "ResumeJobs", "jobset is resumed")

    def _delete(self, jobs: list[Object]) -> None:
        for job in jobs:
            if "deletionTimestamp" not in job["metadata"]:
                self._api.delete(JOBS, job, {"propagationPolicy": "Foreground"})

    def _expire(self, item: Object) -> None:
        left_s = item["spec"].get("ttlSecondsAfterFinished")
        ended = condition_of(item, "Completed") or condition_of(item, "Failed")
        if (
            left_s is not None
            and ended
            and time.time() - seconds(ended["lastTransitionTime"]) >= left_s
        ):
            self._api.delete(JOB_SETS, item, {"propagationPolicy": "Foreground"})

    def _event(self, item: Object, reason: str, message: str, *, warning: bool = True) -> None:
        record(self._storage, item, reason, message, source="jobset", warning=warning)


SERVICES_OF: Object = {"apiVersion": "v1", "kind": "Service"}


def _matching(rules: list[Object], failed: list[Object]) -> tuple[Object, Object]:
    for rule in rules:
        fitting = [job for job in failed if _fits(rule, job)]
        if fitting:
            return rule, _earliest(fitting)
    return _DEFAULT, _earliest(failed)


def _fits(rule: Object, job: Object) -> bool:
    condition = condition_of(job, "Failed")
    reasons, patterns = rule.get("onJobFailureReasons"), rule.get("onJobFailureMessagePatterns")
    targets = rule.get("targetReplicatedJobs")
    if reasons and condition["reason"] not in reasons:
        return False
    if patterns and not any(re.search(each, condition["message"]) for each in patterns):
        return False
    return not targets or job["metadata"]["labels"][f"{PREFIX}/replicatedjob-name"] in targets


def _earliest(failed: list[Object]) -> Object:
    return min(failed, key=lambda job: str(condition_of(job, "Failed")["lastTransitionTime"]))


def _first(job: Object) -> str:
    return f"(first failed job: {job['metadata']['name']})"


def _replicas(item: Object) -> int:
    return sum(each["replicas"] for each in item["spec"]["replicatedJobs"])


def _child(item: Object, replicated: Object, index: int, attempt: int) -> Object:
    name, template = item["metadata"]["name"], copied(replicated["template"])
    job_name = f"{name}-{replicated['name']}-{index}"
    own = {
        ATTEMPT: str(attempt),
        f"{PREFIX}/jobset-name": name,
        f"{PREFIX}/jobset-uid": item["metadata"]["uid"],
        f"{PREFIX}/replicatedjob-name": replicated["name"],
        f"{PREFIX}/replicatedjob-replicas": str(replicated["replicas"]),
        f"{PREFIX}/job-index": str(index),
        f"{PREFIX}/job-key": hashlib.sha1(job_name.encode(), usedforsecurity=False).hexdigest(),
    }
    spec = template["spec"]
    pod = spec["template"]
    for holder in (template, pod):
        metadata = holder.setdefault("metadata", {})
        for kind in ("labels", "annotations"):
            metadata[kind] = (metadata.get(kind) or {}) | own
    if item["spec"]["network"]["enableDNSHostnames"]:
        pod["spec"]["subdomain"] = item["spec"]["network"].get("subdomain") or name
    spec["suspend"] = bool(item["spec"].get("suspend"))
    metadata = template["metadata"] | {"name": job_name}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _counts(replicated: Object, current: list[Object]) -> Object:
    name = replicated["name"]
    jobs = [
        each
        for each in current
        if each["metadata"]["labels"][f"{PREFIX}/replicatedjob-name"] == name
    ]
    counts: Object = {
        "name": name,
        "active": 0,
        "failed": 0,
        "ready": 0,
        "succeeded": 0,
        "suspended": 0,
    }
    for job in jobs:
        status = job.get("status") or {}
        counts["failed"] += is_true(job, "Failed")
        counts["succeeded"] += is_true(job, "Complete")
        counts["suspended"] += bool(job["spec"].get("suspend"))
        counts["active"] += status.get("active", 0) > 0
        counts["ready"] += (
            status.get("ready", 0) + status.get("succeeded", 0) >= job["spec"]["parallelism"]
        )
    return counts


def _forget_start(job: Object) -> None:
    job.setdefault("status", {}).pop("startTime", None)


def _put(status: Object, kind: str, value: str, reason: str, message: str) -> None:
    conditions = status.setdefault("conditions", [])
    conditions[:] = [each for each in conditions if each["type"] != kind]
    entry = {"type": kind, "status": value, "reason": reason, "message": message}
    conditions.append(entry | {"lastTransitionTime": now()})
