"""The controller of TFJobs: a pod and a Service for each worker, TF_CONFIG, restarts by exit code, suspension.

Written after its source (kubeflow/training-operator, pkg/controller.v1/tensorflow/tfjob_controller.go and
pkg/controller.v1/common/job.go): order of the steps, conditions, reasons, messages. Left out: replicas other than
workers, the restart policies Always and OnFailure, back-off and deadlines, gang scheduling.
"""

from __future__ import annotations

import json
import time
from functools import partial

from tests.kubernetes_api.controllers.jobs import seconds
from tests.kubernetes_api.events import record
from tests.kubernetes_api.problems import Refusal
from tests.kubernetes_api.resources import (
    PODS,
    SERVICES,
    TF_JOBS,
    Object,
    Resource,
    copied,
    is_true,
    owned_by,
    owner_reference,
)
from tests.kubernetes_api.server.api import Api
from tests.kubernetes_api.storage import now

PREFIX = "training.kubeflow.org"
NAME, INDEX = f"{PREFIX}/job-name", f"{PREFIX}/replica-index"
WORKER, CONTAINER, PORT = "Worker", "tensorflow", "tfjob-port"

RETRYABLE = 128
"""With the restart policy `ExitCode`, pods that end with this code or a higher one are replaced."""

UNKNOWN = 0xBEEF
"""Exit code of a pod whose container has none, e.g. one that was evicted before it ran."""


class TfJobController:
    """Brings every TFJob forward."""

    def __init__(self, api: Api) -> None:
        self._api, self._storage = api, api.storage

    def sync(self) -> None:
        """Look at all TFJobs."""
        for item in self._storage.items(TF_JOBS):
            if "deletionTimestamp" in item["metadata"]:
                continue
            with self._storage.changed:
                status = copied(item.get("status") or {})
                self._sync(item, status)
                if status != item.get("status"):
                    self._storage.change(TF_JOBS, item, partial(_put, status), status=True)

    def _sync(self, item: Object, status: Object) -> None:
        pods = self._owned(PODS, item)
        if not status.get("conditions"):
            _set(status, "Created", "TFJobCreated", f"TFJob {item['metadata']['name']} is created.")
        if _has(status, "Succeeded") or _has(status, "Failed"):
            self._clean(item, pods)
            self._expire(item, status)
            return
        if item["spec"]["runPolicy"].get("suspend"):
            self._delete(PODS, pods)
            self._delete(SERVICES, self._owned(SERVICES, item))
            if not _has(status, "Suspended"):
                status.pop("startTime", None)
                _set(status, "Suspended", "TFJobSuspended", f"TFJob {_place(item)} is suspended.")
            return
        if _has(status, "Suspended"):
            words = f"TFJob {_place(item)} is resumed."
            _set(status, "Suspended", "TFJobResumed", words, value="False")
        status.setdefault("startTime", now())
        status["replicaStatuses"] = {WORKER: self._reconcile(item, status, pods)}
        self._conclude(item, status)

    def _reconcile(self, item: Object, status: Object, pods: list[Object]) -> Object:
        """Make the pods that are missing, delete those that are to be replaced, and count the others."""
        counts = {"active": 0, "succeeded": 0, "failed": 0}
        ranked = {int(pod["metadata"]["labels"][INDEX]): pod for pod in pods}
        for index in range(item["spec"]["tfReplicaSpecs"][WORKER]["replicas"]):
            pod = ranked.get(index)
            if pod is None:
                self._make(item, index)
                continue
            phase = pod["status"]["phase"]
            if phase == "Failed" and _exit_code(pod) >= RETRYABLE:
                self._delete(PODS, [pod])
                name = item["metadata"]["name"]
                words = f"TFJob {name} is restarting because {WORKER} replica(s) failed."
                self._event(item, "TFJobRestarting", words, warning=True)
                _set(status, "Restarting", "TFJobRestarting", words)
            counts["active"] += phase == "Running"
            counts["succeeded"] += phase == "Succeeded"
            counts["failed"] += phase == "Failed"
        return counts

    def _conclude(self, item: Object, status: Object) -> None:
        counts = status["replicaStatuses"][WORKER]
        restarting = _has(status, "Restarting")
        if counts["succeeded"] == item["spec"]["tfReplicaSpecs"][WORKER]["replicas"]:
            words = f"TFJob {_place(item)} successfully completed."
            self._end(item, status, "Succeeded", words)
        elif counts["active"]:
            _set(status, "Running", "TFJobRunning", f"TFJob {_place(item)} is running.")
        if counts["failed"] and restarting:
            words = f"TFJob {item['metadata']['name']} is restarting because {WORKER} replica(s) failed."
            _set(status, "Restarting", "TFJobRestarting", words)
        elif counts["failed"]:
            words = f"TFJob {_place(item)} has failed because {counts['failed']} {WORKER} replica(s) failed."
            self._end(item, status, "Failed", words)

    def _end(self, item: Object, status: Object, kind: str, message: str) -> None:
        status["completionTime"] = now()
        self._event(item, f"TFJob{kind}", message)
        _set(status, kind, f"TFJob{kind}", message)
        for each in status["conditions"]:
            if each["type"] == "Running":
                each["status"] = "False"

    def _make(self, item: Object, index: int) -> None:
        name, namespace = (
            f"{item['metadata']['name']}-worker-{index}",
            item["metadata"]["namespace"],
        )
        labels = {NAME: item["metadata"]["name"], INDEX: str(index)}
        labels |= {
            f"{PREFIX}/operator-name": "tfjob-controller",
            f"{PREFIX}/replica-type": "worker",
        }
        labels |= {f"{PREFIX}/job-role": "master"} if index == 0 else {}
        own = {"namespace": namespace, "name": name, "ownerReferences": [owner_reference(item)]}
        template = copied(item["spec"]["tfReplicaSpecs"][WORKER]["template"])
        metadata = template.get("metadata") or {}
        metadata["labels"] = (metadata.get("labels") or {}) | labels
        spec = template["spec"] | {"restartPolicy": "Never"}
        (container,) = (each for each in spec["containers"] if each["name"] == CONTAINER)
        if text := _tf_config(item, index):
            container.setdefault("env", []).append({"name": "TF_CONFIG", "value": text})
        service = {"clusterIP": "None", "selector": labels, "ports": container["ports"]}
        made = [(PODS, {"kind": "Pod", "metadata": metadata | own, "spec": spec})]
        if self._storage.find(SERVICES, namespace, name) is None:
            made.append(
                (
                    SERVICES,
                    {"kind": "Service", "metadata": own | {"labels": labels}, "spec": service},
                )
            )
        for resource, each in made:
            try:
                self._api.create(resource, {"apiVersion": "v1"} | each, checked=True)
            except Refusal as refusal:
                words = f"Error creating: {refusal.message}"
                self._event(item, f"FailedCreate{each['kind']}", words, warning=True)
                return
            self._event(
                item, f"SuccessfulCreate{each['kind']}", f"Created {each['kind'].lower()}: {name}"
            )

    def _clean(self, item: Object, pods: list[Object]) -> None:
        if item["spec"]["runPolicy"].get("cleanPodPolicy") == "Running":
            pods = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
        self._delete(PODS, pods)
        self._delete(SERVICES, self._owned(SERVICES, item))

    def _expire(self, item: Object, status: Object) -> None:
        left_s = item["spec"]["runPolicy"].get("ttlSecondsAfterFinished")
        if left_s is not None and time.time() - seconds(status["completionTime"]) >= left_s:
            self._delete(TF_JOBS, [item])

    def _delete(self, resource: Resource, items: list[Object]) -> None:
        for each in items:
            if "deletionTimestamp" not in each["metadata"]:
                self._api.delete(resource, each, {})

    def _owned(self, resource: Resource, item: Object) -> list[Object]:
        listed = self._storage.items(resource, item["metadata"]["namespace"])
        return [each for each in listed if owned_by(each, item)]

    def _event(self, item: Object, reason: str, message: str, *, warning: bool = False) -> None:
        record(self._storage, item, reason, message, source="tfjob-controller", warning=warning)


def _tf_config(item: Object, index: int) -> str:
    """Return what the operator gives a worker: nothing to one that is alone."""
    spec, metadata = item["spec"]["tfReplicaSpecs"][WORKER], item["metadata"]
    if spec["replicas"] == 1:
        return ""
    (container,) = (
        each for each in spec["template"]["spec"]["containers"] if each["name"] == CONTAINER
    )
    (port,) = (each["containerPort"] for each in container["ports"] if each["name"] == PORT)
    hosts = [
        f"{metadata['name']}-worker-{rank}.{metadata['namespace']}.svc:{port}"
        for rank in range(spec["replicas"])
    ]
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": hosts}, "task": task, "environment": "cloud"})


def _exit_code(pod: Object) -> int:
    for each in pod["status"].get("containerStatuses") or []:
        if each["name"] == CONTAINER and "terminated" in each["state"]:
            return int(each["state"]["terminated"]["exitCode"])
    return UNKNOWN


def _place(item: Object) -> str:
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"


def _put(status: Object, item: Object) -> None:
    item["status"] = status


def _has(status: Object, kind: str) -> bool:
    return is_true({"status": status}, kind)


def _set(status: Object, kind: str, reason: str, message: str, *, value: str = "True") -> None:
    """Set a condition; `Running` and `Restarting` exclude each other."""
    others = {"Running": "Restarting", "Restarting": "Running"}
    before: Object = next(
        (each for each in status.get("conditions", []) if each["type"] == kind), {}
    )
    if (before.get("status"), before.get("reason")) == (value, reason):
        return
    kept = [
        each
        for each in status.get("conditions", [])
        if each["type"] not in (kind, others.get(kind))
    ]
    entry = {"type": kind, "status": value, "reason": reason, "message": message}
    status["conditions"] = [*kept, entry | {"lastTransitionTime": now(), "lastUpdateTime": now()}]
