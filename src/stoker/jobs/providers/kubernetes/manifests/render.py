"""Combines all objects of a job, and converts them to YAML."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import yaml

from stoker.core.errors import ConfigError, Plain
from stoker.core.fingerprint import fingerprint
from stoker.jobs.archive import CODE, EXPERIMENT, HASHES, read_hashes
from stoker.jobs.code_store import BUCKETS
from stoker.jobs.job import Job
from stoker.jobs.providers.kubernetes.manifests.network import (
    disruption_budget,
    network_policy,
    service,
)
from stoker.jobs.providers.kubernetes.manifests.pod import fewest_pods
from stoker.jobs.providers.kubernetes.manifests.workload import (
    KINDS,
    SPECIFICATIONS,
    VERSIONS,
    suspended,
)
from stoker.jobs.providers.kubernetes.names import (
    EQUAL_COMPLETIONS,
    FOLDER,
    ID,
    MIN_PARALLELISM,
    QUEUE,
    WORKERS,
    labels,
    object_name,
)
from stoker.jobs.providers.kubernetes.settings import KubernetesTarget

MAX_CODE_BYTES = 900 << 10
"""Maximum size of an archive in a ConfigMap: a request to the API has at most 1.5 MiB, and base64 makes the archive
larger by a third."""

GIT = "git+"
"""Prefix of the setting `code` if it names a commit."""

SPECIFICATION = "stoker/specification"
"""Annotation with a fingerprint of the manifest. Objects themselves cannot be compared, because the API adds
defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifests:
    """The objects that are created for a job."""

    workload: dict[str, Any]
    """The Job, JobSet or TFJob. It is created suspended, so that no pod runs before all other objects exist."""

    dependents: tuple[dict[str, Any], ...]
    """The other objects, which the workload will own."""

    @property
    def all(self) -> tuple[dict[str, Any], ...]:
        """All objects, in the order of their creation."""
        return (self.workload, *self.dependents)

    def to_yaml(self, kind: str) -> str:
        """Return the objects as YAML documents; the job is suspended only if a queue decides when it starts."""
        is_queued = QUEUE in self.workload["metadata"]["labels"]
        spec = suspended(self.workload["spec"], kind, value=is_queued)
        objects = (self.workload | {"spec": spec}, *self.dependents)
        return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    """Writes repeated values in full: kubectl does not read YAML's aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the interface of PyYAML
        """Return True, so that no value becomes an alias."""
        return True


def render(
    job: Job, target: KubernetesTarget, *, kind: str, namespace: str, code: bytes
) -> Manifests:
    """Return the objects of a job.

    Args:
        job: The job.
        target: The settings of the target.
        kind: `job`, `jobset` or `tfjob`.
        namespace: Namespace of all objects.
        code: Content of the archive.

    Raises:
        ConfigError: the target's `code` is `configmap`, and the code is too large for a ConfigMap.
    """
    has_code = _is_in_config_map(target, len(code))
    spec = SPECIFICATIONS[kind](job, target, has_code=has_code)
    workload = _object(VERSIONS[kind], KINDS[kind], job, spec=suspended(spec, kind, value=True))
    noted = workload["metadata"]["annotations"]
    noted |= {
        FOLDER: str(job.place),
        WORKERS: str(job.resources.workers),
        SPECIFICATION: fingerprint(spec)[:16],
    }
    if target.queue:
        workload["metadata"]["labels"][QUEUE] = target.queue
    if fewest := fewest_pods(job, target, kind):
        noted |= {MIN_PARALLELISM: str(fewest), EQUAL_COMPLETIONS: "true"}
    dependents = []
    if kind == "job":
        dependents.append(_object("v1", "Service", job, spec=service(job)))
    if has_code:
        dependents.append(_config_map(job, target, code))
    if target.network_policy:
        policy = network_policy(job)
        dependents.append(_object("networking.k8s.io/v1", "NetworkPolicy", job, spec=policy))
    if target.disruption_budget:
        budget = disruption_budget(job)
        dependents.append(_object("policy/v1", "PodDisruptionBudget", job, spec=budget))
    for each in (workload, *dependents):
        each["metadata"]["namespace"] = namespace
    return Manifests(workload=workload, dependents=tuple(dependents))


def owned(dependent: dict[str, Any], owner: dict[str, Any]) -> dict[str, Any]:
    """Return an object with an owner: the cluster removes the object together with its owner.

    Args:
        dependent: The object to create.
        owner: The owner as the API returned it.
    """
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    }
    return dependent | {"metadata": dependent["metadata"] | {"ownerReferences": [reference]}}


def is_owned(found: dict[str, Any], owner: dict[str, Any]) -> bool:
    """Whether an object belongs to this owner, and not to an earlier owner with the same name."""
    references = found["metadata"].get("ownerReferences") or []
    return any(each.get("uid") == owner["metadata"]["uid"] for each in references)


def _object(version: str, kind: str, job: Job, **content: Any) -> dict[str, Any]:
    meta = {"name": object_name(job.id), "labels": labels(job), "annotations": {ID: job.id}}
    return {"apiVersion": version, "kind": kind, "metadata": meta} | content


def _config_map(job: Job, target: KubernetesTarget, code: bytes) -> dict[str, Any]:
    """Return the ConfigMap from which pods write the job's folder: the description and perhaps the code."""
    data = {"job.json": json.dumps(job.to_json(), indent=1) + "\n"}
    if target.code.startswith(GIT):
        data[HASHES] = json.dumps(_hashes_of_experiment(code), sort_keys=True)
        return _object("v1", "ConfigMap", job, immutable=True, data=data)
    if target.code.startswith(BUCKETS):
        return _object("v1", "ConfigMap", job, immutable=True, data=data)
    packed = {CODE: base64.b64encode(code).decode()}
    return _object("v1", "ConfigMap", job, immutable=True, data=data, binaryData=packed)


def _hashes_of_experiment(code: bytes) -> dict[str, str]:
    found = read_hashes(code) if code else {}
    outside = [name for name in found if not name.startswith(f"{EXPERIMENT}/")]
    if outside:
        raise ConfigError(
            "with `code: git+...` all code must lie in the experiment's folder",
            got=Plain(outside[0]),
            fix="Move it there, install it in the image, or use `code: auto`.",
        )
    return found


def _is_in_config_map(target: KubernetesTarget, size: int) -> bool:
    if target.code == "configmap" and size > MAX_CODE_BYTES:
        raise ConfigError(
            f"the packed code of a job must have at most {MAX_CODE_BYTES >> 10} KiB for a ConfigMap",
            got=Plain(f"{size / 1024:,.0f} KiB"),
            fix="List files that are not code in .stokerignore, or set `code` of the target to `volume` or to a "
            "folder of a bucket.",
        )
    is_small = target.code in ("auto", "configmap") and size <= MAX_CODE_BYTES
    return is_small or target.code.startswith((GIT, *BUCKETS))
