"""The kinds of objects that the server knows, and whether they are installed."""

from __future__ import annotations

import marshal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
"""An object as JSON values. What the storage holds is never changed in place."""

DEFINITIONS = Path(__file__).resolve().parents[3] / "shared" / "data" / "crds"
"""Where CustomResourceDefinitions lie, next to the repository; elsewhere custom objects are stored unchecked."""


@dataclass(frozen=True, kw_only=True)
class Resource:
    """A kind of objects."""

    plural: str
    kind: str
    group: str = ""
    versions: tuple[str, ...] = ("v1",)
    """All that are served; the first is the one of the events that controllers see."""

    namespaced: bool = True
    definition: str = ""
    """File of the CustomResourceDefinition; empty for a kind of Kubernetes itself."""

    @property
    def name(self) -> str:
        """As quotas and messages write it: `jobs.batch`, `pods`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def api_version(self, version: str = "") -> str:
        """As in `apiVersion`."""
        chosen = version or self.versions[0]
        return f"{self.group}/{chosen}" if self.group else chosen


NAMESPACES = Resource(plural="namespaces", kind="Namespace", namespaced=False)
NODES = Resource(plural="nodes", kind="Node", namespaced=False)
PODS = Resource(plural="pods", kind="Pod")
SERVICES = Resource(plural="services", kind="Service")
CONFIG_MAPS = Resource(plural="configmaps", kind="ConfigMap")
SECRETS = Resource(plural="secrets", kind="Secret")
EVENTS = Resource(plural="events", kind="Event")
CLAIMS = Resource(plural="persistentvolumeclaims", kind="PersistentVolumeClaim")
QUOTAS = Resource(plural="resourcequotas", kind="ResourceQuota")
ACCOUNTS = Resource(plural="serviceaccounts", kind="ServiceAccount")
JOBS = Resource(plural="jobs", kind="Job", group="batch")
POLICIES = Resource(plural="networkpolicies", kind="NetworkPolicy", group="networking.k8s.io")
BUDGETS = Resource(plural="poddisruptionbudgets", kind="PodDisruptionBudget", group="policy")
PRIORITIES = Resource(
    plural="priorityclasses", kind="PriorityClass", group="scheduling.k8s.io", namespaced=False
)
DEFINED = Resource(
    plural="customresourcedefinitions",
    kind="CustomResourceDefinition",
    group="apiextensions.k8s.io",
    namespaced=False,
)
JOB_SETS = Resource(
    plural="jobsets",
    kind="JobSet",
    group="jobset.x-k8s.io",
    versions=("v1alpha2",),
    definition="jobsets.yaml",
)
TF_JOBS = Resource(
    plural="tfjobs", kind="TFJob", group="kubeflow.org", versions=("v1",), definition="tfjobs.yaml"
)

_KUEUE: dict[str, Any] = {"group": "kueue.x-k8s.io", "versions": ("v1beta2", "v1beta1")}
WORKLOADS = Resource(plural="workloads", kind="Workload", definition="workloads.yaml", **_KUEUE)
LOCAL_QUEUES = Resource(
    plural="localqueues", kind="LocalQueue", definition="localqueues.yaml", **_KUEUE
)
CLUSTER_QUEUES = Resource(
    plural="clusterqueues",
    kind="ClusterQueue",
    namespaced=False,
    definition="clusterqueues.yaml",
    **_KUEUE,
)

BUILT_IN = (
    *(NAMESPACES, NODES, PODS, SERVICES, CONFIG_MAPS, SECRETS, EVENTS, CLAIMS, QUOTAS, ACCOUNTS),
    *(JOBS, POLICIES, BUDGETS, PRIORITIES, DEFINED),
)
CUSTOM = (JOB_SETS, TF_JOBS, WORKLOADS, LOCAL_QUEUES, CLUSTER_QUEUES)


def copied(item: Object) -> Object:
    """Return a copy of JSON values that shares nothing; ten times faster than `deepcopy`."""
    found: Object = marshal.loads(marshal.dumps(item))
    return found


def read_definition(resource: Resource) -> Object | None:
    """Return the CustomResourceDefinition of a kind; None where its file is missing."""
    path = DEFINITIONS / resource.definition
    if not path.is_file():
        return None
    found: Object = yaml.load(path.read_text("utf-8"), yaml.CSafeLoader)
    return found


def owner_reference(owner: Object) -> Object:
    """Return the reference of a controller's child to its owner."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def owned_by(item: Object, owner: Object) -> bool:
    """Whether an object is the child of this owner."""
    references = item["metadata"].get("ownerReferences", [])
    return any(each["uid"] == owner["metadata"]["uid"] for each in references)


def condition_of(item: Object, kind: str) -> Object:
    """Return a condition of an object; an empty one if it has none of this type."""
    conditions: list[Object] = item.get("status", {}).get("conditions") or []
    return next((each for each in conditions if each["type"] == kind), {})


def is_true(item: Object, kind: str) -> bool:
    """Whether a condition of an object holds."""
    return condition_of(item, kind).get("status") == "True"
