"""A Kubernetes cluster as a target, from any machine with a kubeconfig."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.jobs.archive import CODE
from stoker.jobs.code_store import BUCKETS, put_code
from stoker.jobs.job import Job
from stoker.jobs.places import find_place, note_submission, places, read_submitted
from stoker.jobs.provider import JobEvent, JobState, Wire
from stoker.jobs.providers.kubernetes.client import Cluster
from stoker.jobs.providers.kubernetes.creation import create, remove
from stoker.jobs.providers.kubernetes.events import events_of, job_event
from stoker.jobs.providers.kubernetes.kept import ENDED, forgotten, keep
from stoker.jobs.providers.kubernetes.manifests.render import Manifests, render
from stoker.jobs.providers.kubernetes.manifests.workload import KINDS, PLURALS, VERSIONS
from stoker.jobs.providers.kubernetes.names import (
    MANAGED,
    MANAGER,
    NAME,
    SUBMITTED,
    USER,
    object_name,
    selector,
    user_label,
)
from stoker.jobs.providers.kubernetes.pod.facts import FAILURES
from stoker.jobs.providers.kubernetes.pod_logs import log_lines
from stoker.jobs.providers.kubernetes.port_forward import connect
from stoker.jobs.providers.kubernetes.problems import Conflict, NotFound
from stoker.jobs.providers.kubernetes.reasons import rank_of
from stoker.jobs.providers.kubernetes.rights import (
    KUEUE,
    choose_kind,
    needed,
    require_queue,
    require_rights,
    require_supported,
)
from stoker.jobs.providers.kubernetes.settings import Kind, KubernetesTarget
from stoker.jobs.providers.kubernetes.state import STOP, Seen, known_state
from stoker.jobs.recent import RecentStates

STOP_MARGIN_S = 90.0
"""`stop` waits for the workers' grace period plus this time, seconds."""

_recent = RecentStates()


class KubernetesProvider:
    """Runs jobs in a namespace of a Kubernetes cluster."""

    def __init__(self, name: str, settings: KubernetesTarget) -> None:
        """Create the provider; no request is sent.

        Args:
            name: Name of the target.
            settings: Settings of the target.
        """
        self.name = name
        self.settings = settings

    @cached_property
    def _cluster(self) -> Cluster:
        target = self.settings
        return Cluster(
            kubeconfig=target.kubeconfig, context=target.context, namespace=target.namespace
        )

    @cached_property
    def _kind(self) -> Kind:
        return choose_kind(self._cluster, self.settings.kind)

    def validate(self, job: Job) -> None:
        """Refuse a job that the cluster does not support or allow; a dry run lets the cluster check the manifest."""
        require_supported(job, self.settings)
        kind = self._kind
        if self.settings.queue:
            require_queue(self._cluster, self.settings.queue)
        require_rights(self._cluster, needed(self.settings, kind))
        workload = self._manifests(job, b"").workload
        try:
            self._cluster.create(self._cluster.path_of(workload), workload, dry_run=True)
        except Conflict:  # the object exists from an earlier submission
            return

    def describe(self, job: Job, code: bytes) -> str:
        """Return the job's manifests as YAML."""
        return self._manifests(job, code).to_yaml(self._kind)

    def submit(self, job: Job) -> str:
        """Create the job's objects, or complete those of an earlier submission."""
        code = (job.place / CODE).read_bytes()
        manifests = self._manifests(job, code)
        if self.settings.code.startswith(BUCKETS):
            put_code(self.settings.code, job.code, code)
        manifests.workload["metadata"]["annotations"][SUBMITTED] = str(time.time())
        again = read_submitted(job.place) is not None
        for name in (STOP, ENDED):
            (job.place / name).unlink(missing_ok=True)
        shutil.rmtree(job.place / FAILURES, ignore_errors=True)
        found = create(
            self._cluster,
            job,
            manifests,
            kind=self._kind,
            again=again,
            grace_s=self.settings.grace_s,
        )
        scheduler_id = f"{self._kind}/{found['metadata']['name']}"
        note_submission(job.place, target=self.name, scheduler_id=scheduler_id)
        _recent.forget(job.id)
        return scheduler_id

    def state(self, job_id: str) -> JobState:
        """Return the state that the cluster reports, or, after the cluster has removed the job, the job's folder."""
        return _recent.state(job_id, self._state)

    def jobs(self) -> Sequence[JobState]:
        """Return the user's jobs in the namespace, and the jobs whose folders are known here, newest first.

        For a job that the cluster has removed, the state is read from the job's folder.
        """
        known = places()
        kinds = {self._kind_of(place) for place in known.values()} | {self._kind}
        chosen, user = f"{MANAGED}={MANAGER}", user_label()
        pods: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for pod in self._cluster.all(self._cluster.path("v1", "pods"), labelSelector=chosen):
            pods[pod["metadata"]["labels"].get(NAME, "")].append(pod)
        found = []
        for kind in sorted(kinds):
            path = self._cluster.path(VERSIONS[kind], PLURALS[kind])
            try:
                listed = self._cluster.all(path, labelSelector=chosen)
            except NotFound:  # the cluster does not know this kind of object
                continue
            for each in listed:
                workload = {"apiVersion": VERSIONS[kind], "kind": KINDS[kind]} | each
                mine = pods[each["metadata"]["name"]]
                state = known_state(Seen(kind=kind, workload=workload, pods=mine), None)
                if each["metadata"]["labels"].get(USER) == user or state.id in known:
                    found.append(state)
        listed_ids = {state.id for state in found}
        for job_id, place in known.items():
            submitted = read_submitted(place)
            if job_id not in listed_ids and submitted and submitted.target == self.name:
                found.append(forgotten(job_id, place))
        return sorted(found, key=lambda each: each.submitted_s or 0.0, reverse=True)

    def stop(self, job_id: str) -> None:
        """Delete the job's objects, and wait until they are gone; pods save within their grace period."""
        place = find_place(job_id)
        seen = self._seen(job_id, place)
        if seen is None or seen.phase is not None:
            return
        try:
            (place / STOP).touch()
        except PermissionError:
            raise UserError(
                f"only the owner of job {job_id} can stop it", fix="Ask the owner to stop it."
            ) from None
        try:
            longest_s = self.settings.grace_s + STOP_MARGIN_S
            remove(self._cluster, seen.workload, longest_s=longest_s)
        finally:
            _recent.forget(job_id)

    def events(self, job_id: str) -> Sequence[JobEvent]:
        """Return the events of the job and its pods, oldest first; a cluster keeps events for an hour by default."""
        return [job_event(event) for event in self._events(job_id)]

    def log_lines(self, job_id: str, *, worker: int | None, follow: bool) -> Iterator[str]:
        """Yield the lines that the existing pods have printed; with `follow`, until the job is over."""

        def is_over() -> bool:
            return self.state(job_id).phase.is_over

        return log_lines(
            self._cluster, selector(job_id), worker=worker, until=is_over if follow else None
        )

    def where_is(self, job_id: str, worker: int) -> str:
        """Return the name of a worker's pod."""
        listed = self._cluster.all(self._cluster.path("v1", "pods"), labelSelector=selector(job_id))
        mine = [pod for pod in listed if rank_of(pod) == str(worker)]
        for pod in mine:
            if pod["status"].get("phase") == "Running" and not pod["metadata"].get(
                "deletionTimestamp"
            ):
                return str(pod["metadata"]["name"])
        phases = ", ".join(str(pod["status"].get("phase", "")) for pod in mine)
        raise ConfigError(
            f"worker {worker} of job {job_id} must run",
            got=Plain(f"its pod is {phases}" if phases else "it has no pod"),
            fix=f"See what it does: stoker jobs show {job_id}.",
        )

    def connect(self, where: str, port: int) -> Wire:
        """Connect to a port of a pod."""
        return connect(self._cluster, where, port)

    def _manifests(self, job: Job, code: bytes) -> Manifests:
        return render(
            job, self.settings, kind=self._kind, namespace=self._cluster.namespace, code=code
        )

    def _kind_of(self, place: Path) -> str:
        """Return the kind of object of a submitted job; the target's setting may have changed since then."""
        submitted = read_submitted(place)
        kind = submitted.scheduler_id.partition("/")[0] if submitted is not None else ""
        is_own = submitted is not None and submitted.target == self.name
        return kind if is_own and kind in KINDS else self._kind

    def _state(self, job_id: str) -> JobState:
        place = find_place(job_id)
        seen = self._seen(job_id, place)
        if seen is not None:
            state = known_state(seen, place)
            if state.phase.is_over:
                keep(place, state)
            return state
        return forgotten(job_id, place)

    def _seen(self, job_id: str, place: Path) -> Seen | None:
        kind = self._kind_of(place)
        path = self._cluster.path(VERSIONS[kind], PLURALS[kind], object_name(job_id))
        try:
            workload = {"apiVersion": VERSIONS[kind], "kind": KINDS[kind]} | self._cluster.get(path)
        except NotFound:
            return None
        pods_path = self._cluster.path("v1", "pods")
        pods = self._cluster.all(pods_path, labelSelector=selector(job_id))
        seen = Seen(kind=kind, workload=workload, pods=pods)
        if seen.phase is not None:
            return seen
        queued = self._queued(workload) if seen.queue and seen.is_suspended else None
        running = sum(1 for pod in pods if (pod.get("status") or {}).get("phase") == "Running")
        events = [] if running >= seen.workers or seen.is_suspended else self._events(job_id)
        return Seen(kind=kind, workload=workload, pods=pods, events=events, queued=queued)

    def _queued(self, workload: dict[str, Any]) -> dict[str, Any] | None:
        """Return Kueue's workload of a job; None if there is none, or the user may not read it."""
        uid = workload["metadata"]["uid"]
        try:
            version = self._cluster.get(f"/apis/{KUEUE}")["preferredVersion"]["groupVersion"]
            path = self._cluster.path(version, "workloads")
            found = self._cluster.all(path, labelSelector=f"{KUEUE}/job-uid={uid}")
        except UserError:
            return None
        return found[0] if found else None

    def _events(self, job_id: str) -> list[dict[str, Any]]:
        listed = self._cluster.all(self._cluster.path("v1", "events"))
        return events_of(listed, object_name(job_id))
