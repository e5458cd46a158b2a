"""Checks, before a submission, the user's rights, and whether the cluster has the required extensions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.jobs.job import Job
from stoker.jobs.providers.kubernetes.client import Cluster
from stoker.jobs.providers.kubernetes.manifests.workload import KINDS, PLURALS, VERSIONS
from stoker.jobs.providers.kubernetes.problems import NotFound
from stoker.jobs.providers.kubernetes.settings import Kind, KubernetesTarget

KUEUE = "kueue.x-k8s.io"

_INSTALL = {
    "jobset": "Install JobSet (https://jobset.sigs.k8s.io), or set `kind: job` in the target.",
    "tfjob": "Install Kubeflow's training operator (version 1), or remove `kind` from the target.",
}

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@dataclass(frozen=True, kw_only=True, slots=True)
class Right:
    """A right: to apply a verb to a kind of objects."""

    verb: str
    resource: str
    group: str = ""
    subresource: str = ""

    def __str__(self) -> str:
        name = f"{self.resource}.{self.group}" if self.group else self.resource
        return (
            f"{self.verb} {name}/{self.subresource}" if self.subresource else f"{self.verb} {name}"
        )


def require_supported(job: Job, target: KubernetesTarget) -> None:
    """Refuse a job that no cluster could run with this target; sends no request.

    Raises:
        ConfigError: a setting is not possible; the message names it.
    """
    if job.after:
        raise ConfigError(
            "a job on Kubernetes cannot wait for another job",
            got=Plain(f"--after {' --after '.join(job.after)}"),
            fix="Submit it when the other jobs are done.",
        )
    if not any(job.runs.is_relative_to(each.path) for each in target.volumes if not each.read_only):
        paths = ", ".join(str(each.path) for each in target.volumes) or "none"
        raise ConfigError(
            "the folder of runs must lie on one of the target's `volumes`",
            got=Plain(f"{job.runs}; volumes: {paths}"),
            fix="Set `runs` in stoker.yaml to a folder below the path of a volume.",
        )
    missing = [name for name in job.secrets if name not in target.secrets]
    if missing:
        raise ConfigError(
            "every --secret must be in `secrets` of the target",
            got=Plain(", ".join(missing)),
            fix=f"Add e.g. `secrets: {{{missing[0]}: SECRET/KEY}}`; the value stays on the cluster.",
        )


def needed(target: KubernetesTarget, kind: str) -> list[Right]:
    """Return the rights for submitting, watching and stopping a job."""
    return list(_needed(target, kind))


def _needed(target: KubernetesTarget, kind: str) -> Iterator[Right]:
    group = VERSIONS[kind].partition("/")[0]
    for verb in ("create", "get", "list", "patch", "delete"):
        yield Right(verb=verb, resource=PLURALS[kind], group=group)
    dependents = [("configmaps", "")]
    if kind == "job":
        dependents.append(("services", ""))
    if target.network_policy:
        dependents.append(("networkpolicies", "networking.k8s.io"))
    if target.disruption_budget:
        dependents.append(("poddisruptionbudgets", "policy"))
    for resource, api in dependents:
        for verb in ("create", "get"):
            yield Right(verb=verb, resource=resource, group=api)
    for verb in ("list", "watch"):
        yield Right(verb=verb, resource="pods")
    yield Right(verb="get", resource="pods", subresource="log")
    yield Right(verb="list", resource="events")
    if target.queue:
        yield Right(verb="list", resource="workloads", group=KUEUE)


def require_rights(cluster: Cluster, rights: list[Right]) -> None:
    """Ask the cluster whether the user has rights in the namespace.

    Raises:
        ConfigError: rights are missing; the message names them all.
    """
    missing = [str(right) for right in rights if not _is_allowed(cluster, right)]
    if missing:
        raise ConfigError(
            f"you must have these rights in namespace {cluster.namespace}: {', '.join(missing)}",
            fix="docs/how-to/kubernetes-rbac.yaml is the smallest Role that works: ask an administrator "
            "to apply it, or set another `namespace` in the target.",
        )


def choose_kind(cluster: Cluster, wanted: Kind | None) -> Kind:
    """Return the kind of object for jobs on this cluster.

    Raises:
        ConfigError: the cluster does not know the kind that the target sets.
    """
    if wanted is None:
        return "jobset" if _knows(cluster, VERSIONS["jobset"], PLURALS["jobset"]) else "job"
    if not _knows(cluster, VERSIONS[wanted], PLURALS[wanted]):
        raise ConfigError(
            f"the cluster must know {KINDS[wanted]} ({VERSIONS[wanted]}) for `kind: {wanted}`",
            got=Plain("its definition is not installed"),
            fix=_INSTALL.get(wanted, ""),
        )
    return wanted


def require_queue(cluster: Cluster, queue: str) -> None:
    """Check that Kueue is installed and has the queue.

    Raises:
        ConfigError: Kueue or the queue is missing.
    """
    try:
        group = cluster.get(f"/apis/{KUEUE}")
    except NotFound:
        raise ConfigError(
            "`queue` needs Kueue in the cluster",
            got=Plain(f"{KUEUE} is not installed"),
            fix="Install it (https://kueue.sigs.k8s.io), or remove `queue` from the target.",
        ) from None
    version = group["preferredVersion"]["groupVersion"]
    try:
        cluster.get(cluster.path(version, "localqueues", queue))
    except NotFound:
        raise ConfigError(
            f"queue must be a LocalQueue of namespace {cluster.namespace}",
            got=queue,
            fix=f"List them: kubectl get localqueues --namespace {cluster.namespace}.",
        ) from None
    except UserError as error:
        # A user without the right to read queues may still submit.
        if "rights" not in error.rule:
            raise


def _knows(cluster: Cluster, version: str, plural: str) -> bool:
    try:
        known = cluster.get(f"/apis/{version}")
    except NotFound:
        return False
    return any(each.get("name") == plural for each in known.get("resources") or [])


def _is_allowed(cluster: Cluster, right: Right) -> bool:
    attributes = {
        "namespace": cluster.namespace,
        "verb": right.verb,
        "group": right.group,
        "resource": right.resource,
    }
    if right.subresource:
        attributes["subresource"] = right.subresource
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    status = cluster.create(_REVIEWS, review).get("status") or {}
    return bool(status.get("allowed"))
