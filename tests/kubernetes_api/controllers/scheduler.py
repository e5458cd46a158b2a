"""The scheduler: a node for each pod, or why none fits, and preemption by priority."""

from __future__ import annotations

from collections import Counter

from tests.kubernetes_api import quantities
from tests.kubernetes_api.events import record
from tests.kubernetes_api.resources import CLAIMS, NODES, PODS, Object
from tests.kubernetes_api.server.api import Api, disrupt
from tests.kubernetes_api.server.selectors import expression
from tests.kubernetes_api.storage import now


class Scheduler:
    """Gives nodes to pods, the ones of the highest priority first."""

    def __init__(self, api: Api) -> None:
        self._api, self._storage = api, api.storage

    def sync(self) -> None:
        """Look at all pods without a node."""
        with self._storage.changed:
            waiting = [
                pod
                for pod in self._storage.items(PODS)
                if not pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]
            ]
            for pod in sorted(waiting, key=lambda each: -each["spec"].get("priority", 0)):
                if not pod["spec"].get("schedulingGates"):
                    self._schedule(pod)

    def _schedule(self, pod: Object) -> None:
        reasons: Counter[str] = Counter()
        for node in self._storage.items(NODES):
            why = self._why_not(pod, node)
            if why is None:
                self._bind(pod, node["metadata"]["name"])
                return
            reasons[why] += 1
        count = sum(reasons.values())
        listed = ", ".join(f"{number} {why}" for why, number in sorted(reasons.items()))
        message = f"0/{count} nodes are available: {listed}."
        if not count:
            message = "no nodes available to schedule pods"
        if missing := self._missing_claim(pod):
            message = f'0/{count} nodes are available: persistentvolumeclaim "{missing}" not found.'
        self._preempt(pod)
        self._condition(pod, "False", "Unschedulable", message)
        record(
            self._storage,
            pod,
            "FailedScheduling",
            message,
            source="default-scheduler",
            warning=True,
        )

    def _why_not(self, pod: Object, node: Object, *, without: tuple[str, ...] = ()) -> str | None:
        spec = pod["spec"]
        if self._missing_claim(pod):
            return "persistentvolumeclaim not found"
        if node["spec"].get("unschedulable"):
            return "node(s) were unschedulable"
        for taint in node["spec"].get("taints") or []:
            blocks = taint["effect"] in ("NoSchedule", "NoExecute")
            if blocks and not any(
                _tolerates(each, taint) for each in spec.get("tolerations") or []
            ):
                return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
        if not _selects(spec, node["metadata"].get("labels") or {}):
            return "node(s) didn't match Pod's node affinity/selector"
        free = self._free(node, without)
        needs = quantities.of_pod(spec) | {"pods": 1.0}
        short = [name for name, amount in needs.items() if amount > free.get(name, 0.0)]
        if short:
            return "Too many pods" if short == ["pods"] else f"Insufficient {short[0]}"
        return None

    def _free(self, node: Object, without: tuple[str, ...]) -> dict[str, float]:
        free = {
            name: quantities.value(each) for name, each in node["status"]["allocatable"].items()
        }
        free.setdefault("pods", 110.0)
        for pod in self._on(node["metadata"]["name"]):
            if pod["metadata"]["uid"] not in without:
                for name, amount in (quantities.of_pod(pod["spec"]) | {"pods": 1.0}).items():
                    free[name] = free.get(name, 0.0) - amount
        return free

    def _on(self, node: str) -> list[Object]:
        return [
            pod
            for pod in self._storage.items(PODS)
            if pod["spec"].get("nodeName") == node
            and pod["status"]["phase"] in ("Pending", "Running")
        ]

    def _missing_claim(self, pod: Object) -> str | None:
        for volume in pod["spec"].get("volumes") or []:
            name = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            if name and self._storage.find(CLAIMS, pod["metadata"]["namespace"], name) is None:
                return str(name)
        return None

    def _preempt(self, pod: Object) -> None:
        priority = pod["spec"].get("priority", 0)
        for node in self._storage.items(NODES):
            on_it = self._on(node["metadata"]["name"])
            if any("deletionTimestamp" in each["metadata"] for each in on_it):
                return  # room is being made
            victims = [each for each in on_it if each["spec"].get("priority", 0) < priority]
            without = tuple(each["metadata"]["uid"] for each in victims)
            if not victims or self._why_not(pod, node, without=without) is not None:
                continue
            for victim in sorted(victims, key=lambda each: each["spec"].get("priority", 0)):
                words = "default-scheduler: preempting to accommodate a higher priority pod"
                disrupt(self._storage, victim, "PreemptionByScheduler", words)
                name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
                words = f"Preempted by pod {name} on node {node['metadata']['name']}"
                record(
                    self._storage,
                    victim,
                    "Preempted",
                    words,
                    source="default-scheduler",
                    warning=True,
                )
                self._api.delete(PODS, victim, {})
            return

    def _bind(self, pod: Object, node: str) -> None:
        self._storage.change(PODS, pod, lambda each: each["spec"].update(nodeName=node))
        self._condition(pod, "True", "", "")
        name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        words = f"Successfully assigned {name} to {node}"
        record(self._storage, pod, "Scheduled", words, source="default-scheduler")

    def _condition(self, pod: Object, status: str, reason: str, message: str) -> None:
        def change(item: Object) -> None:
            conditions = item["status"].setdefault("conditions", [])
            entry = {"type": "PodScheduled", "status": status, "reason": reason, "message": message}
            entry = {name: value for name, value in entry.items() if value}
            before: Object = next(
                (each for each in conditions if each["type"] == "PodScheduled"), {}
            )
            if {
                name: value for name, value in before.items() if name != "lastTransitionTime"
            } == entry:
                return
            conditions[:] = [each for each in conditions if each["type"] != "PodScheduled"]
            conditions.append(entry | {"lastTransitionTime": now()})

        self._storage.change(PODS, pod, change, status=True)


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    same = toleration.get("key") == taint["key"]
    return same and toleration.get("value", "") == taint.get("value", "")


def _selects(spec: Object, labels: dict[str, str]) -> bool:
    if any(labels.get(name) != value for name, value in (spec.get("nodeSelector") or {}).items()):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if not required:
        return True
    return any(
        all(expression(rule, labels) for rule in term.get("matchExpressions") or [])
        for term in required["nodeSelectorTerms"]
    )
