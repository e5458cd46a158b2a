"""Determines a job's state from its object, its pods, and the reasons why pods do not run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from stoker.core.incarnation import INCARNATIONS
from stoker.jobs.provider import JobState, Phase
from stoker.jobs.providers.kubernetes.names import ID, QUEUE, SUBMITTED, WORKERS, notes_of
from stoker.jobs.providers.kubernetes.reasons import (
    disruption_reason,
    event_reason,
    failure_reason,
    kueue_reason,
    waiting_reason,
)

STOP = "stop"
"""File in the job's folder whose existence means that a user has stopped the job."""

_DONE = ("Complete", "Completed", "Succeeded")
_FAILED = ("Failed",)
"""Types of the conditions of a Job, a JobSet or a TFJob that is done, and of one that has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What the cluster reports about a job."""

    kind: str
    workload: dict[str, Any]
    """The Job, JobSet or TFJob."""

    pods: Sequence[dict[str, Any]] = ()
    events: Sequence[dict[str, Any]] = ()
    """Events of the job and of its pods, oldest first."""

    queued: dict[str, Any] | None = field(default=None)
    """Kueue's Workload object of the job; None if there is none."""

    @property
    def phase(self) -> Phase | None:
        """How the job has ended; None if it has not ended."""
        if condition(self.workload, *_DONE):
            return Phase.DONE
        return Phase.FAILED if condition(self.workload, *_FAILED) else None

    @property
    def is_suspended(self) -> bool:
        """Whether the job is suspended, so it has no pods: it waits in its queue, or is not completely submitted."""
        spec = self.workload.get("spec") or {}
        return bool((spec.get("runPolicy") or {} if self.kind == "tfjob" else spec).get("suspend"))

    @property
    def queue(self) -> str:
        """The job's LocalQueue of Kueue; empty if it has none."""
        return str((self.workload["metadata"].get("labels") or {}).get(QUEUE, ""))

    @property
    def workers(self) -> int:
        """Number of pods that the job has when it runs."""
        admitted = (self.workload.get("spec") or {}).get("parallelism")
        if admitted:  # only for a Job: Kueue may have admitted fewer pods than were submitted
            return int(admitted)
        text = notes_of(self.workload).get(WORKERS, "")
        return int(text) if text.isdecimal() else 1


def known_state(seen: Seen, place: Path | None) -> JobState:
    """Return the state of a job that the cluster knows.

    Args:
        seen: What the cluster reports about the job.
        place: The job's folder, if it is known.
    """
    meta = seen.workload["metadata"]
    notes = notes_of(seen.workload)
    restarts = _restarts(seen, place)
    phase, reason = _phase(seen, restarts=restarts)
    alive = [pod for pod in seen.pods if _pod_phase(pod) in ("Pending", "Running")]
    begun = [time_s(pod["status"].get("startTime")) for pod in alive if pod.get("status")]
    return JobState(
        id=notes.get(ID, meta["name"]),
        scheduler_id=f"{seen.kind}/{meta['name']}",
        phase=phase,
        reason=reason,
        submitted_s=_number(notes.get(SUBMITTED)) or time_s(meta.get("creationTimestamp")),
        started_s=max((each for each in begun if each is not None), default=None)
        if phase is Phase.RUNNING
        else None,
        ended_s=_ended_s(seen) if phase.is_over else None,
        restarts=restarts,
        nodes=tuple(sorted({n for pod in alive if (n := pod["spec"].get("nodeName"))})),
    )


def condition(workload: dict[str, Any], *kinds: str) -> dict[str, Any] | None:
    """Return the first condition that has one of these types and is true."""
    for each in (workload.get("status") or {}).get("conditions") or []:
        if each.get("type") in kinds and each.get("status") == "True":
            return dict(each)
    return None


def time_s(text: object) -> float | None:
    """Convert a time of the API to seconds since the epoch."""
    try:
        return datetime.fromisoformat(str(text)).timestamp() if text else None
    except ValueError:
        return None


def _phase(seen: Seen, *, restarts: int) -> tuple[Phase, str]:
    over = seen.phase
    if over is Phase.DONE:
        return over, ""
    if over is Phase.FAILED:
        return over, _why_failed(seen)
    if seen.workload["metadata"].get("deletionTimestamp"):
        return Phase.RUNNING, "is being deleted: its workers save"
    alive = [pod for pod in seen.pods if _pod_phase(pod) == "Running"]
    done = sum(1 for pod in seen.pods if _pod_phase(pod) == "Succeeded")
    waits = Phase.RESTARTING if restarts or _was_admitted(seen) else Phase.WAITING
    if seen.is_suspended:
        if seen.queue:
            return waits, kueue_reason(seen.queued)
        return waits, "is suspended: submit it again, which finishes its submission and starts it"
    if len(alive) + done >= seen.workers and not waiting_reason(alive):
        return Phase.RUNNING, ""
    pods = [pod for pod in seen.pods if _pod_phase(pod) in ("Pending", "Running")]
    why = waiting_reason(pods) or event_reason(seen.events) or _last_end(seen)
    if not why:
        why = f"waits for the pods of {seen.workers} worker(s); {len(alive)} run"
    return waits, why


def _last_end(seen: Seen) -> str:
    return disruption_reason(seen.pods) or failure_reason(seen.pods)


def _was_admitted(seen: Seen) -> bool:
    queued = seen.queued
    return queued is not None and condition(queued, "Evicted") is not None


def _why_failed(seen: Seen) -> str:
    found = condition(seen.workload, *_FAILED) or {}
    own = " ".join(str(found.get("message", "")).split())
    said = failure_reason(seen.pods) or disruption_reason(seen.pods)
    if not said:
        return f"{own} (stoker logs)" if own else "see stoker logs"
    is_limit = "restart" in own or "backoff" in own.lower() or "retries" in own
    return f"{said} (max_restarts reached)" if is_limit else said


def _restarts(seen: Seen, place: Path | None) -> int:
    status = seen.workload.get("status") or {}
    if seen.kind == "jobset":
        return int(status.get("restarts") or 0)
    starts = _incarnations(place) if place is not None else 0
    if starts:
        return starts - 1
    replicas = (status.get("replicaStatuses") or {}).get("Worker") or {}
    failed = int(status.get("failed") or replicas.get("failed") or 0)
    return -(-failed // seen.workers)


def _incarnations(place: Path) -> int:
    try:
        return sum(1 for each in (place / INCARNATIONS).iterdir() if each.name.isdecimal())
    except OSError:
        return 0


def _ended_s(seen: Seen) -> float | None:
    status = seen.workload.get("status") or {}
    found = condition(seen.workload, *_DONE, *_FAILED) or {}
    return time_s(status.get("completionTime")) or time_s(found.get("lastTransitionTime"))


def _pod_phase(pod: dict[str, Any]) -> str:
    return str((pod.get("status") or {}).get("phase", ""))


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
