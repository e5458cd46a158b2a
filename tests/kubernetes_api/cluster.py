"""A cluster: the server, its controllers and its kubelet as threads of the test, the pods as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest
import yaml
from tests.kubernetes_api.controllers.garbage import GarbageCollector
from tests.kubernetes_api.controllers.job_sets import JobSetController
from tests.kubernetes_api.controllers.jobs import JobController
from tests.kubernetes_api.controllers.kueue import Kueue
from tests.kubernetes_api.controllers.scheduler import Scheduler
from tests.kubernetes_api.controllers.tf_jobs import NAME as TF_JOB_NAME
from tests.kubernetes_api.controllers.tf_jobs import TfJobController
from tests.kubernetes_api.events import record
from tests.kubernetes_api.node.containers import Image
from tests.kubernetes_api.node.kubelet import Kubelet
from tests.kubernetes_api.resources import (
    ACCOUNTS,
    CLAIMS,
    CLUSTER_QUEUES,
    CUSTOM,
    DEFINED,
    EVENTS,
    LOCAL_QUEUES,
    NAMESPACES,
    NODES,
    PODS,
    PRIORITIES,
    QUOTAS,
    WORKLOADS,
    Object,
    Resource,
)
from tests.kubernetes_api.server.access import Access
from tests.kubernetes_api.server.api import Api, disrupt
from tests.kubernetes_api.server.faults import Faults
from tests.kubernetes_api.server.http import ApiServer
from tests.kubernetes_api.storage import Storage

TOKEN, USER = "token-of-ada", "ada"
ROUND_S = 0.3
"""Longest time between two looks of the controllers; a change wakes them."""

PAUSE_S = 0.02
"""Shortest time between two looks, so that many changes are one round."""

BACKOFF_S = 0.2
"""Of a job's first replacement of a pod; a real controller begins with 10 s."""


def require_namespaces() -> None:
    """Skip the test where pods cannot have mounts of their own; in CI, fail."""
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x2c020000) != 0)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code])
    if done.returncode == 0:
        return
    why = "pods need `unshare` of mounts, processes and host name, which only root may do here"
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


class _Part(Protocol):
    def sync(self) -> None:
        """Look at all objects, and do what they require."""


class KubernetesCluster:
    """Everything that a test needs of a cluster."""

    def __init__(self, folder: Path, images: dict[str, Image]) -> None:
        """Start nothing yet.

        Args:
            folder: Of its files.
            images: What pods may run, by the image's name.
        """
        self.folder = folder
        self.storage = Storage()
        self.access = Access(tokens={TOKEN: USER})
        self.faults = Faults()
        self.api = Api(self.storage, self.access, self._logs, self._is_stopping)
        self.server = ApiServer(self.api, self.faults)
        self.kubelet = Kubelet(self.api, folder, images)
        self.kueue = Kueue(self.api)
        self._parts: list[_Part] = [
            GarbageCollector(self.api),
            self.kueue,
            JobSetController(self.api),
            JobController(self.api, backoff_s=BACKOFF_S),
            TfJobController(self.api),
            Scheduler(self.api),
            self.kubelet,
        ]
        self._closed = threading.Event()
        self.paused = threading.Event()
        """Set: only garbage is collected, and no pod starts."""

    def start(self) -> None:
        """Listen, and start the controllers."""
        for resource in CUSTOM:
            self.install(resource)
        for name in ("default", "team"):
            self.add_namespace(name)
        self.server.start()
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """End all of it."""
        self._closed.set()
        self.server.stop()
        self.kubelet.close()

    def restart_server(self, down_s: float = 0.5) -> None:
        """Stop the API server for a while; the objects and the pods stay."""
        self.server.stop()
        self._closed.wait(down_s)
        self.server.start()

    def kubeconfig(
        self, path: Path, *, namespace: str = "team", token: str = TOKEN, context: str = "test"
    ) -> Path:
        """Write a kubeconfig of the user."""
        place = {"cluster": "test", "user": USER, "namespace": namespace}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": context,
            "contexts": [{"name": context, "context": place}],
            "clusters": [{"name": "test", "cluster": {"server": self.server.url}}],
            "users": [{"name": USER, "user": {"token": token}}],
        }
        path.write_text(yaml.safe_dump(content))
        path.chmod(0o600)
        return path

    def install(self, resource: Resource) -> None:
        """Install the definition of a custom kind."""
        name = f"{resource.plural}.{resource.group}"
        spec: Object = {
            "group": resource.group,
            "names": {"plural": resource.plural, "kind": resource.kind},
            "scope": "Namespaced",
            "versions": [{"name": each, "served": True} for each in resource.versions],
        }
        self._put(DEFINED, name, spec=spec)
        self.api.resources.append(resource)

    def uninstall(self, resource: Resource) -> None:
        """Remove a custom kind: its paths are 404."""
        self.api.resources.remove(resource)
        found = self.storage.find(DEFINED, "", f"{resource.plural}.{resource.group}")
        assert found is not None
        self.storage.delete(DEFINED, found)

    def add_namespace(self, name: str) -> None:
        """Make a namespace with its default account."""
        self._put(NAMESPACES, name, status={"phase": "Active"})
        self._put(ACCOUNTS, "default", namespace=name)

    def add_node(
        self, name: str, *, labels: dict[str, str] | None = None, taint: str = "", **resources: str
    ) -> None:
        """Make a node, with e.g. `cpu="4", gpus="2", memory="8Gi"`."""
        allocatable = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": "110"}
        allocatable |= {
            ("nvidia.com/gpu" if key == "gpus" else key): each for key, each in resources.items()
        }
        spec: Object = (
            {"taints": [{"key": taint, "value": "", "effect": "NoSchedule"}]} if taint else {}
        )
        status = {"allocatable": allocatable, "capacity": allocatable}
        self._put(NODES, name, labels=labels or {}, spec=spec, status=status)

    def add_claim(
        self, name: str, namespace: str = "team", *, directory: Path | None = None
    ) -> Path:
        """Make a claim, and return its directory."""
        if directory is not None:
            self.kubelet.claims[namespace, name] = directory
        spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        self._put(CLAIMS, name, namespace=namespace, spec=spec, status={"phase": "Bound"})
        return self.kubelet.claim(namespace, name)

    def add_quota(self, name: str, namespace: str = "team", **hard: str) -> None:
        """Limit a namespace; `_` in a name stands for `.` or `/` where the name has one."""
        keys = {"jobs": "count/jobs.batch", "jobsets": "count/jobsets.jobset.x-k8s.io"}
        keys |= {
            "gpus": "requests.nvidia.com/gpu",
            "cpu": "requests.cpu",
            "memory": "requests.memory",
        }
        spec = {"hard": {keys.get(key, key): value for key, value in hard.items()}}
        self._put(QUOTAS, name, namespace=namespace, spec=spec)

    def add_priority(self, name: str, value: int) -> None:
        """Make a priority class."""
        self._put(PRIORITIES, name, value=value)

    def add_queue(
        self, name: str, namespace: str = "team", *, preempts: bool = False, **nominal: str
    ) -> None:
        """Make a ClusterQueue and a LocalQueue `name` in a namespace, e.g. `cpu="4", gpus="2"`."""
        named = {
            "memory": "1Ti",
            "ephemeral-storage": "1Ti",
        }  # Kueue refuses what it does not cover
        named |= {
            ("nvidia.com/gpu" if key == "gpus" else key): each for key, each in nominal.items()
        }
        resources = [{"name": key, "nominalQuota": each} for key, each in named.items()]
        flavors = [{"name": "default-flavor", "resources": resources}]
        spec: Object = {"resourceGroups": [{"coveredResources": list(named), "flavors": flavors}]}
        if preempts:
            spec["preemption"] = {"withinClusterQueue": "LowerPriority"}
        self._put(CLUSTER_QUEUES, name, spec=spec)
        self._put(LOCAL_QUEUES, name, namespace=namespace, spec={"clusterQueue": name})

    def live_pods(self, owner: str, *, namespace: str = "team") -> list[Object]:
        """Return the pods of a Job, a JobSet or a TFJob, by its name, that are not over and not about to end."""
        keys = ("jobset.sigs.k8s.io/jobset-name", "job-name", TF_JOB_NAME)
        return [
            pod
            for pod in self.storage.items(PODS, namespace)
            if owner in [(pod["metadata"].get("labels") or {}).get(key) for key in keys]
            if pod["status"]["phase"] in ("Pending", "Running")
            if "deletionTimestamp" not in pod["metadata"]
        ]

    def evict(self, pod: Object) -> None:
        """Drain a pod's node: the eviction API."""
        disrupt(self.storage, pod, "EvictionByEvictionAPI", "Eviction API: evicting")
        self.api.delete(PODS, pod, {})

    def evict_for_memory(self, pod: Object) -> None:
        """Let the kubelet evict a pod because its node is low on memory."""
        disrupt(self.storage, pod, "TerminationByKubelet", "The node was low on resource: memory.")
        words = "The node was low on resource: memory."
        record(self.storage, pod, "Evicted", words, source="kubelet", warning=True)
        self.kubelet.kill(pod["metadata"]["name"], "Evicted", words)

    def evict_for_disk(self, pod: Object) -> None:
        """Let the kubelet evict a pod that uses more local disk than its own limit: that is not a disruption."""
        limit = pod["spec"]["containers"][0]["resources"]["limits"]["ephemeral-storage"]
        words = f"Pod ephemeral local storage usage exceeds the total limit of containers {limit}. "
        record(self.storage, pod, "Evicted", words, source="kubelet", warning=True)
        self.kubelet.kill(pod["metadata"]["name"], "Evicted", words)

    def kill_out_of_memory(self, pod: Object) -> None:
        """Let the kernel kill a pod that uses more memory than its limit."""
        self.kubelet.kill(pod["metadata"]["name"], "OOMKilled")

    def kill_task(self, pod: Object) -> None:
        """Kill the newest process of a pod, and not its first one, which sees that."""
        process = self.kubelet.running(pod["metadata"]["name"]).process
        assert process is not None
        inner = _descendants(process.pid)
        assert len(inner) > 2, "its task does not run"
        os.kill(inner[-1], signal.SIGKILL)

    def preempt(self, pod: Object) -> None:
        """Take a pod's place for another of a higher priority, as the scheduler does."""
        words = "default-scheduler: preempting to accommodate a higher priority pod"
        disrupt(self.storage, pod, "PreemptionByScheduler", words)
        self.api.delete(PODS, pod, {})

    def preempt_workload(self, name: str, namespace: str = "team") -> None:
        """Take the quota of a job or JobSet for another of a higher priority, as Kueue does."""
        for each in self.storage.items(WORKLOADS, namespace):
            if each["metadata"]["ownerReferences"][0]["name"] == name:
                self.kueue.evict(each, "Preempted to accommodate a workload due to prioritization")

    def lose_node(self, pod: Object) -> None:
        """Give up a pod whose node does not answer: its process goes on, and the cluster starts another."""
        self.kubelet.running(pod["metadata"]["name"]).is_abandoned = True
        disrupt(
            self.storage,
            pod,
            "DeletionByTaintManager",
            "Taint manager: deleting due to NoExecute taint",
        )

        def fail(item: Object) -> None:
            item["status"]["phase"] = "Failed"

        self.storage.change(PODS, pod, fail, status=True)

    def events(self, name: str, namespace: str = "team") -> list[Object]:
        """Return the events of an object."""
        found = self.storage.items(EVENTS, namespace)
        return [each for each in found if each["involvedObject"]["name"] == name]

    def _put(self, resource: Resource, name: str, namespace: str = "", **content: object) -> None:
        labels = content.pop("labels", {})
        metadata: Object = {"name": name, "labels": labels}
        metadata |= {"namespace": namespace} if namespace else {}
        own = {"apiVersion": resource.api_version(), "kind": resource.kind, "metadata": metadata}
        self.storage.create(resource, own | content)

    def _logs(self, pod: Object, query: dict[str, str]) -> Iterator[bytes]:
        return self.kubelet.logs(pod, query)

    def _is_stopping(self) -> bool:
        return not self.server.is_up

    def _run(self) -> None:
        seen = -1
        while not self._closed.is_set():
            with self.storage.changed:
                if self.storage.revision == seen:
                    self.storage.changed.wait(ROUND_S)
                seen = self.storage.revision
            for part in self._parts[:1] if self.paused.is_set() else self._parts:
                try:
                    part.sync()
                except Exception:  # noqa: BLE001 - a test shows it, and the other controllers go on
                    self.api.troubles.append(traceback.format_exc())
            self._closed.wait(PAUSE_S)


def _descendants(pid: int) -> list[int]:
    """Return the processes below one, each before its own children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *_descendants(child))]


@contextmanager
def kubernetes_cluster(folder: Path, images: dict[str, Image]) -> Iterator[KubernetesCluster]:
    """Run a cluster until the end of the context, and fail if one of its own parts has failed."""
    require_namespaces()
    cluster = KubernetesCluster(folder, images)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
    assert not cluster.api.troubles, cluster.api.troubles[0]
