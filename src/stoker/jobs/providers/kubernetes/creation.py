"""Creates a job's objects; after a lost answer or a kill, the next submission completes the same job.

The workload is created first, suspended, so that no pod runs before the objects that the workload owns exist.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.jobs.job import Job
from stoker.jobs.provider import Phase
from stoker.jobs.providers.kubernetes.client import Cluster
from stoker.jobs.providers.kubernetes.manifests.render import Manifests, is_owned, owned
from stoker.jobs.providers.kubernetes.manifests.workload import suspended
from stoker.jobs.providers.kubernetes.names import ID, notes_of
from stoker.jobs.providers.kubernetes.problems import REPEAT, AnswerLost, Conflict, NotFound
from stoker.jobs.providers.kubernetes.state import Seen

GONE_S = 60.0
"""Maximum time for the removal of objects, seconds, in addition to the time that pods need to save."""

POLL_S = 0.5
"""Pause between two checks whether objects are removed, seconds."""


def create(
    cluster: Cluster, job: Job, manifests: Manifests, *, kind: str, again: bool, grace_s: float
) -> dict[str, Any]:
    """Create the missing objects of a job, also after an incomplete submission; return the workload.

    Args:
        cluster: The cluster.
        job: The job.
        manifests: The objects of the job.
        kind: `job`, `jobset` or `tfjob`.
        again: Whether the cluster has answered an earlier submission; then a job that is done starts again.
        grace_s: Time that pods of an earlier submission get to end, seconds.

    Raises:
        AnswerLost: the submission is incomplete; the same command completes it.
        UserError: the cluster refuses an object; then the other objects are removed.
    """
    workload = _workload(cluster, job, manifests, kind=kind, again=again, grace_s=grace_s)
    if Seen(kind=kind, workload=workload).phase is not None:
        return workload
    try:
        for each in manifests.dependents:
            _dependent(cluster, each, workload)
        if Seen(kind=kind, workload=workload).queue:
            return workload
        path = cluster.path_of(workload, name=workload["metadata"]["name"])
        return cluster.patch(path, {"spec": suspended({}, kind, value=False)})
    except AnswerLost:
        raise
    except UserError:
        # Raise the first error, even if the removal fails, too.
        with contextlib.suppress(UserError):
            remove(cluster, workload, longest_s=GONE_S)
        raise


def find(cluster: Cluster, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """Return the existing object with a manifest's name; None if there is none."""
    try:
        return cluster.get(cluster.path_of(manifest, name=manifest["metadata"]["name"]))
    except NotFound:
        return None


def remove(cluster: Cluster, workload: dict[str, Any], *, longest_s: float) -> None:
    """Delete a workload with its pods and everything that it owns, and wait until they are gone.

    Args:
        cluster: The cluster.
        workload: The workload as the API returned it; another object with the same name is not deleted.
        longest_s: Maximum wait, seconds.

    Raises:
        UserError: the deletion takes longer.
    """
    path = cluster.path_of(workload, name=workload["metadata"]["name"])
    # The object with this name is another one, so the workload is gone.
    with contextlib.suppress(Conflict):
        cluster.delete(path, uid=workload["metadata"]["uid"])
    _wait_until_gone(cluster, workload, longest_s=longest_s)


def _workload(
    cluster: Cluster, job: Job, manifests: Manifests, *, kind: str, again: bool, grace_s: float
) -> dict[str, Any]:
    wanted = manifests.workload
    path = cluster.path_of(wanted)
    while True:
        found = find(cluster, wanted)
        if found is None:
            try:
                return _typed(cluster.create(path, wanted), wanted)
            except Conflict:
                # The object exists: an answer was lost, or another submission has just created it.
                continue
        _require_same(found, job)
        found = _typed(found, wanted)
        phase = Seen(kind=kind, workload=found).phase
        if found["metadata"].get("deletionTimestamp"):
            _wait_until_gone(cluster, found, longest_s=grace_s + GONE_S)
        elif phase is Phase.FAILED or (phase is Phase.DONE and again):
            remove(cluster, found, longest_s=grace_s + GONE_S)
        else:
            return found


def _dependent(cluster: Cluster, manifest: dict[str, Any], owner: dict[str, Any]) -> None:
    until_s = time.monotonic() + GONE_S
    while True:
        try:
            cluster.create(cluster.path_of(manifest), owned(manifest, owner))
        except Conflict:
            found = find(cluster, manifest)
            if found is not None and is_owned(found, owner):
                return
            if found is not None and ID not in notes_of(found):
                name = f"{manifest['kind']} {manifest['metadata']['name']}"
                raise ConfigError(
                    f"{name} must not exist yet",
                    fix="Stoker did not create it: delete or rename it.",
                ) from None
            if time.monotonic() > until_s:
                raise AnswerLost(
                    f"{manifest['kind']} of the job's last start must be removed by the cluster",
                    got=Plain(f"it is still there after {GONE_S:g} s"),
                    fix=REPEAT,
                ) from None
            time.sleep(POLL_S)  # the cluster is still removing the object of an earlier submission
            continue
        return


def _require_same(found: dict[str, Any], job: Job) -> None:
    other = notes_of(found).get(ID)
    if other != job.id:
        raise ConfigError(
            f"{found['metadata']['name']} must not be the name of another object in the cluster",
            got=Plain(f"job {other}" if other else "an object that is not Stoker's"),
            fix="Change `name` in stoker.yaml, or `namespace` of the target.",
        )


def _wait_until_gone(cluster: Cluster, workload: dict[str, Any], *, longest_s: float) -> None:
    until_s = time.monotonic() + longest_s
    while True:
        found = find(cluster, workload)
        if found is None or found["metadata"]["uid"] != workload["metadata"]["uid"]:
            return
        if time.monotonic() > until_s:
            name = workload["metadata"]["name"]
            raise AnswerLost(
                f"the cluster must remove {workload['kind']} {name} within {longest_s:g} s",
                got=Plain("it still exists"),
                fix=f"See `kubectl describe {workload['kind'].lower()} {name}`, and repeat the command.",
            )
        time.sleep(POLL_S)  # a removal needs only a few requests; a watch would cost more


def _typed(found: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    """Return an object with its `apiVersion` and `kind`, which answers may omit."""
    return {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"]} | found
