"""The template of a job's pods: container, volumes, security, and on which nodes the pods may run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stoker.jobs.code_store import BUCKETS
from stoker.jobs.job import Job
from stoker.jobs.providers.kubernetes.manifests.versions import expected_versions
from stoker.jobs.providers.kubernetes.names import (
    CONTAINER,
    FIRST_PORT,
    FOLDER,
    ID,
    cluster_workers,
    labels,
    object_name,
)
from stoker.jobs.providers.kubernetes.pod.facts import CODE_FOLDER, FACTS, Facts
from stoker.jobs.providers.kubernetes.settings import KubernetesTarget, Volume

GRACE_MARGIN_S = 30
"""Time that a pod gets to end after the time for its save, seconds."""

_KEPT = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
"""Annotations that forbid autoscalers to evict a training pod in order to remove a node."""


def pod_template(
    job: Job, target: KubernetesTarget, kind: str, *, has_code: bool
) -> dict[str, Any]:
    """Return metadata and specification of a job's pods.

    Args:
        job: The job.
        target: The settings of the target.
        kind: `job`, `jobset` or `tfjob`.
        has_code: Whether the ConfigMap holds the code.
    """
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": target.grace_s + GRACE_MARGIN_S,
        "securityContext": _pod_security(target),
        "containers": [_container(job, target, kind, has_code=has_code)],
        "volumes": _volumes(job, target, has_code=has_code),
    }
    optional: dict[str, Any] = {
        "subdomain": object_name(job.id) if kind == "job" else None,
        "serviceAccountName": target.service_account,
        "priorityClassName": target.priority_class,
        "nodeSelector": dict(target.node_selector),
        "tolerations": [_toleration(each) for each in target.tolerations],
        "imagePullSecrets": [{"name": name} for name in target.image_pull_secrets],
    }
    spec |= {name: value for name, value in optional.items() if value}
    notes = _KEPT | {ID: job.id, FOLDER: str(job.place)}
    template: dict[str, Any] = {"metadata": {"labels": labels(job), "annotations": notes}}
    if kind == "tfjob":  # the operator sets the restart policy of a TFJob's pods
        del spec["restartPolicy"]
    return template | {"spec": spec}


def fewest_pods(job: Job, target: KubernetesTarget, kind: str) -> int | None:
    """Return the minimum number of pods with which an elastic job starts; None: all pods are required.

    All pods are required, unless the job is a plain Job in a queue of Kueue: Kueue can admit a part of its pods, but
    not a part of the pods of a JobSet or a TFJob.
    """
    return job.resources.min_workers if kind == "job" and target.queue else None


def _container(job: Job, target: KubernetesTarget, kind: str, *, has_code: bool) -> dict[str, Any]:
    source, versions = expected_versions(job.folder)
    facts = Facts(
        place=str(job.place),
        kind=kind,
        python=target.python,
        workers=tuple(cluster_workers(job, kind)),
        grace_s=target.grace_s,
        start_s=target.start_s,
        max_restarts=target.max_restarts,
        time_limit_s=job.resources.time_limit_s,
        min_workers=fewest_pods(job, target, kind),
        versions=versions,
        versions_from=source,
        code_from=target.code if target.code.startswith(("git+", *BUCKETS)) else "",
    )
    return {
        "name": CONTAINER,
        "image": target.image,
        "command": [target.python, "-P", "-m", "stoker.jobs.providers.kubernetes.pod.main"],
        "env": _environment(job, target, kind, facts),
        # TensorFlow does not need this declaration of its port; service meshes and people read it.
        "ports": [{"name": "tfjob-port", "containerPort": FIRST_PORT}],
        "resources": _resources(job, target),
        "securityContext": _container_security(target),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(target, has_code=has_code),
    }


def _environment(
    job: Job, target: KubernetesTarget, kind: str, facts: Facts
) -> list[dict[str, Any]]:
    values = {
        "HOME": "/tmp/home",  # noqa: S108 - the pod's own emptyDir
        "TMPDIR": "/tmp",  # noqa: S108 - the pod's own emptyDir
        "USER": "stoker",
        "LOGNAME": "stoker",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **target.environment,
        **job.environment,
        FACTS: json.dumps(facts.to_json(), sort_keys=True),
    }
    # In a value, a cluster replaces `$(NAME)` by the variable NAME, and `$$` by `$`.
    listed: list[dict[str, Any]] = [
        {"name": name, "value": value.replace("$", "$$")} for name, value in values.items()
    ]
    # Use the pod's UID and not its name: TFJob's operator gives a replacement the same name.
    listed.append(_from_field("STOKER_POD", "metadata.uid"))
    if kind == "tfjob":
        label = "metadata.labels['training.kubeflow.org/replica-index']"
        listed.append(_from_field("STOKER_POD_RANK", label))
    # Add only the secrets that the job names: it must not get other secrets of the target.
    for name in job.secrets:
        secret, _, key = target.secrets[name].partition("/")
        source = {"secretKeyRef": {"name": secret, "key": key}}
        listed.append({"name": name, "valueFrom": source})
    return listed


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _resources(job: Job, target: KubernetesTarget) -> dict[str, Any]:
    needs = job.resources
    cpus = needs.cpus or target.cpus
    memory = f"{round((needs.memory_gib or target.memory_gib) * 1024)}Mi"
    disk = f"{round(target.ephemeral_gib * 1024)}Mi"
    limits = {"memory": memory, "ephemeral-storage": disk}
    if needs.gpus:
        limits[target.gpu_resource] = str(needs.gpus)
    # Set no limit of cores: a limit would slow down a worker even if other cores are idle.
    return {"requests": {"cpu": f"{round(cpus * 1000)}m", **limits}, "limits": limits}


def _pod_security(target: KubernetesTarget) -> dict[str, Any]:
    found: dict[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if target.run_as_user is not None:
        found["runAsUser"] = target.run_as_user
    if target.fs_group is not None:
        # Without this policy, each start changes the owner of every file on a volume, which is slow for a large one.
        found |= {"fsGroup": target.fs_group, "fsGroupChangePolicy": "OnRootMismatch"}
    return found


def _container_security(target: KubernetesTarget) -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": target.read_only_root,
    }


def _volumes(job: Job, target: KubernetesTarget, *, has_code: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "tmp", "emptyDir": {}},
        {
            "name": "shm",
            "emptyDir": {"medium": "Memory", "sizeLimit": f"{round(target.shm_gib * 1024)}Mi"},
        },
    ]
    if has_code:
        found.append({"name": "code", "configMap": {"name": object_name(job.id)}})
    claims = dict.fromkeys(each.claim for each in target.volumes)
    return found + [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(claims)
    ]


def _mounts(target: KubernetesTarget, *, has_code: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own emptyDir
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - the pod's own memory
    ]
    if has_code:
        found.append({"name": "code", "mountPath": CODE_FOLDER, "readOnly": True})
    claims = list(dict.fromkeys(each.claim for each in target.volumes))
    return found + [_mount(each, claims.index(each.claim)) for each in target.volumes]


def _mount(volume: Volume, number: int) -> dict[str, Any]:
    found: Mapping[str, Any] = {
        "name": f"claim-{number}",
        "mountPath": str(volume.path),
        "subPath": volume.sub_path,
        "readOnly": volume.read_only,
    }
    return {name: value for name, value in found.items() if value}


def _toleration(each: Any) -> dict[str, str]:
    names = ("key", "operator", "value", "effect")
    return {name: getattr(each, name) for name in names if getattr(each, name)}
