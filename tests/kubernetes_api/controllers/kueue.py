"""Kueue, as far as it holds and admits jobs: workloads, a quota for each ClusterQueue, preemption by priority.

A job with a queue's label is created suspended. Its Workload waits with a message until the queue's quota has room
for all its pods; then the job is resumed. One ClusterQueue has one flavor, without cohorts and borrowing.
"""

from __future__ import annotations

import hashlib

from tests.kubernetes_api import quantities
from tests.kubernetes_api.events import record
from tests.kubernetes_api.resources import (
    CLUSTER_QUEUES,
    JOB_SETS,
    JOBS,
    LOCAL_QUEUES,
    PODS,
    PRIORITIES,
    WORKLOADS,
    Object,
    Resource,
    is_true,
    owned_by,
    owner_reference,
)
from tests.kubernetes_api.server.admission import QUEUE
from tests.kubernetes_api.server.api import Api
from tests.kubernetes_api.storage import now

_ENDS = ("Complete", "Completed", "Failed")


class Kueue:
    """Admits workloads."""

    def __init__(self, api: Api) -> None:
        self._api, self._storage = api, api.storage

    def sync(self) -> None:
        """Look at all jobs with a queue, and at all workloads."""
        with self._storage.changed:
            owners = {}
            for resource in (JOBS, JOB_SETS):
                for item in self._storage.items(resource):
                    has_queue = QUEUE in (item["metadata"].get("labels") or {})
                    if has_queue and not item["metadata"].get("ownerReferences"):
                        owners[item["metadata"]["uid"]] = resource, item
                        self._workload(resource, item)
            workloads = self._storage.items(WORKLOADS)
            ordered = sorted(
                workloads, key=lambda each: (-each["spec"].get("priority", 0), _age(each))
            )
            for workload in ordered:
                owner = owners.get(workload["metadata"]["ownerReferences"][0]["uid"])
                if owner is not None:
                    self._sync(workload, *owner)

    def _workload(self, resource: Resource, item: Object) -> None:
        name = workload_name(item)
        if "deletionTimestamp" in item["metadata"]:
            return
        if self._storage.find(WORKLOADS, item["metadata"]["namespace"], name) is not None:
            return
        sets = _pod_sets(resource, item)
        spec: Object = {
            "queueName": item["metadata"]["labels"][QUEUE],
            "podSets": sets,
            "active": True,
        }
        spec["priority"] = self._priority(sets[0]["template"]["spec"])
        metadata = {
            "name": name,
            "namespace": item["metadata"]["namespace"],
            "labels": {"kueue.x-k8s.io/job-uid": item["metadata"]["uid"]},
            "ownerReferences": [owner_reference(item)],
        }
        own = {"apiVersion": WORKLOADS.api_version(), "kind": "Workload", "metadata": metadata}
        self._storage.create(WORKLOADS, own | {"spec": spec})
        words = f"Created Workload: {item['metadata']['namespace']}/{name}"
        self._event(item, "CreatedWorkload", words)

    def _priority(self, pod: Object) -> int:
        found = self._storage.find(PRIORITIES, "", pod.get("priorityClassName", ""))
        return int(found["value"]) if found else 0

    def _sync(self, workload: Object, resource: Resource, item: Object) -> None:
        if any(is_true(item, kind) for kind in _ENDS):
            self._set(workload, {"Finished": ("True", "Succeeded", "Job finished")})
            return
        if not workload["spec"]["active"]:
            self.evict(workload, "The workload is deactivated", reason="Deactivated")
            return
        if is_true(workload, "Evicted"):
            # Its quota is free when its pods are gone.
            if not self._has_pods(item):
                free = ("False", "Pending", "The workload was preempted")
                self._set(workload, {"QuotaReserved": free, "Evicted": ("False", "Requeued", "")})
            return
        if is_true(workload, "QuotaReserved"):
            if item["spec"].get("suspend"):
                self._suspend(resource, item, wanted=False)
            return
        why = self._why_it_waits(workload)
        if why is not None:
            reason, message = why
            self._set(workload, {"QuotaReserved": ("False", reason, message)})
            return
        queue = self._queue(workload)
        words = f"Quota reserved in ClusterQueue {queue}"
        admitted = ("True", "Admitted", "The workload is admitted")
        self._set(
            workload, {"QuotaReserved": ("True", "QuotaReserved", words), "Admitted": admitted}
        )
        self._event(item, "Started", f"Admitted by clusterQueue {queue}")
        self._suspend(resource, item, wanted=False)

    def _why_it_waits(self, workload: Object) -> tuple[str, str] | None:
        name = workload["spec"]["queueName"]
        namespace = workload["metadata"]["namespace"]
        if self._storage.find(LOCAL_QUEUES, namespace, name) is None:
            return "Inadmissible", f"LocalQueue {name} doesn't exist"
        queue = self._queue(workload)
        found = self._storage.find(CLUSTER_QUEUES, "", queue)
        if found is None:
            return "Inadmissible", f"ClusterQueue {queue} doesn't exist"
        missing = self._missing(workload, found)
        if missing is None:
            return None
        if "more needed" in missing:
            self._preempt(workload, found)
        first = workload["spec"]["podSets"][0]["name"]
        return "Pending", f"couldn't assign flavors to pod set {first}: {missing}"

    def _missing(self, workload: Object, queue: Object) -> str | None:
        flavor = queue["spec"]["resourceGroups"][0]["flavors"][0]
        used = self._used(queue["metadata"]["name"])
        nominal = {
            each["name"]: quantities.value(each["nominalQuota"]) for each in flavor["resources"]
        }
        for name, amount in _needs(workload).items():
            if name not in nominal:
                if name == "pods":
                    continue
                return f"resource {name} unavailable in ClusterQueue"
            if amount > nominal[name]:
                words = f"previously considered podsets requests (0) + current podset request ({amount:g})"
                return f"insufficient quota for {name} in flavor {flavor['name']}, {words} > maximum capacity ({nominal[name]:g})"
            more = amount + used.get(name, 0.0) - nominal[name]
            if more > 0:
                return f"insufficient unused quota for {name} in flavor {flavor['name']}, {more:g} more needed"
        return None

    def _used(self, queue: str) -> dict[str, float]:
        used: dict[str, float] = {}
        for each in self._storage.items(WORKLOADS):
            if (
                is_true(each, "QuotaReserved")
                and not is_true(each, "Finished")
                and self._queue(each) == queue
            ):
                for name, amount in _needs(each).items():
                    used[name] = used.get(name, 0.0) + amount
        return used

    def _preempt(self, workload: Object, queue: Object) -> None:
        policy = queue["spec"].get("preemption", {}).get("withinClusterQueue", "Never")
        if policy == "Never":
            return
        for victim in self._storage.items(WORKLOADS):
            lower = victim["spec"]["priority"] < workload["spec"]["priority"]
            if lower and is_true(victim, "QuotaReserved") and not is_true(victim, "Finished"):
                uid = workload["metadata"]["uid"]
                self.evict(
                    victim,
                    f"Preempted to accommodate a workload (UID: {uid}) due to prioritization in the ClusterQueue",
                )
                return

    def evict(self, workload: Object, message: str, *, reason: str = "Preempted") -> None:
        """Take the quota of a workload: its job is suspended."""
        if is_true(workload, "Evicted"):
            return
        evicted = {
            "Evicted": ("True", reason, message),
            "Admitted": ("False", "NoReservation", ""),
        }
        self._set(workload, evicted)
        for resource in (JOBS, JOB_SETS):
            for item in self._storage.items(resource, workload["metadata"]["namespace"]):
                if owned_by(workload, item):
                    self._suspend(resource, item, wanted=True)
                    self._event(item, "Stopped", message)

    def _has_pods(self, item: Object) -> bool:
        namespace = item["metadata"]["namespace"]
        owners = [
            item,
            *(job for job in self._storage.items(JOBS, namespace) if owned_by(job, item)),
        ]
        return any(
            pod["status"]["phase"] in ("Pending", "Running")
            for pod in self._storage.items(PODS, namespace)
            if any(owned_by(pod, owner) for owner in owners)
        )

    def _queue(self, workload: Object) -> str:
        namespace, name = workload["metadata"]["namespace"], workload["spec"]["queueName"]
        found = self._storage.find(LOCAL_QUEUES, namespace, name)
        return str(found["spec"].get("clusterQueue", "")) if found else ""

    def _suspend(self, resource: Resource, item: Object, *, wanted: bool) -> None:
        self._storage.change(resource, item, lambda each: each["spec"].update(suspend=wanted))

    def _set(self, workload: Object, conditions: dict[str, tuple[str, str, str]]) -> None:
        def change(each: Object) -> None:
            listed = each.setdefault("status", {}).setdefault("conditions", [])
            known = {found["type"]: found for found in listed}
            for kind, (status, reason, message) in conditions.items():
                entry = {"type": kind, "status": status, "reason": reason, "message": message}
                before = known.get(kind, {})
                if any(before.get(name) != value for name, value in entry.items()):
                    known[kind] = entry | {"lastTransitionTime": now()}
            each["status"]["conditions"] = list(known.values())

        self._storage.change(WORKLOADS, workload, change, status=True)

    def _event(self, item: Object, reason: str, message: str) -> None:
        record(self._storage, item, reason, message, source="kueue")


def workload_name(item: Object) -> str:
    """Return the name of a job's workload: kind, name, and a hash of its UID."""
    digest = hashlib.sha1(item["metadata"]["uid"].encode(), usedforsecurity=False).hexdigest()
    return f"{item['kind'].lower()}-{item['metadata']['name']}-{digest[:5]}"


def _pod_sets(resource: Resource, item: Object) -> list[Object]:
    if resource is JOBS:
        count = item["spec"]["parallelism"]
        return [{"name": "main", "count": count, "template": item["spec"]["template"]}]
    return [
        {
            "name": each["name"],
            "count": each["replicas"] * (each["template"]["spec"].get("parallelism") or 1),
            "template": each["template"]["spec"]["template"],
        }
        for each in item["spec"]["replicatedJobs"]
    ]


def _needs(workload: Object) -> dict[str, float]:
    needs: dict[str, float] = {}
    for each in workload["spec"]["podSets"]:
        requested = quantities.of_pod(each["template"]["spec"], "limits")
        requested |= quantities.of_pod(each["template"]["spec"]) | {"pods": 1.0}
        for name, amount in requested.items():
            needs[name] = needs.get(name, 0.0) + amount * each["count"]
    return needs


def _age(workload: Object) -> tuple[str, int]:
    metadata = workload["metadata"]
    return metadata["creationTimestamp"], int(metadata["resourceVersion"])
