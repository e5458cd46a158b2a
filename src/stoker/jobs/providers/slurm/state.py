"""Determines a job's state from Slurm's queue, Slurm's accounting, and the files that the job's script writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stoker.jobs.places import Submitted
from stoker.jobs.provider import JobState, Phase
from stoker.jobs.providers.slurm.client import AccountedStart, QueuedJob
from stoker.jobs.providers.slurm.problems import why_it_waits
from stoker.jobs.providers.slurm.script import job_id_of, slurm_name

_WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING"}
_RUNNING = {"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "SUSPENDED", "STOPPED", "RESIZING"}

BY_SCANCEL = "by scancel"
"""Reason that is shown for a job that was canceled without `stoker stop`."""

BEFORE_FAILED = "a job that must be done before it has failed or was stopped"
"""Reason that is shown for a job that Slurm has canceled because of a predecessor, if no more is known."""

FORGOTTEN = (
    "Slurm's controller has no record of it, and its folder does not say how it ended; "
    "submit it again: it goes on from its last checkpoint"
)
"""Reason that is shown for a job that the controller has lost, or whose script ended without a record."""

NEVER = "DependencyNeverSatisfied"
"""Slurm's reason for a job that it cancels because a predecessor has failed."""

SIGNALED = "SIGNALED"
"""Stoker's name for the state of a failed job whose script was ended by a signal."""

_ENDS = {
    "FAILED": "its folder could not be written (a full disk), or a line of the target's setup ended its script; "
    "see logs/slurm.log, then submit it again: it goes on from its last checkpoint",
    SIGNALED: "a signal ended its script, most likely before its first line, as later ones are caught, or it could not "
    "be started; see logs/slurm.log, then "
    "submit it again: it goes on from its last checkpoint",
    "OUT_OF_MEMORY": "a worker used more memory than the job's limit; submit it with more: --memory GIB",
    "TIMEOUT": "the time limit came before the workers had saved; raise grace_s of the target",
    "DEADLINE": "its deadline has passed",
    "NODE_FAIL": "a machine failed, and the cluster does not start jobs again; submit it again",
    "BOOT_FAIL": "a machine could not be started; submit it again",
    "PREEMPTED": "it was preempted, and the cluster does not start jobs again; submit it again",
    "REVOKED": "the cluster gave it to another cluster",
}
"""State in Slurm -> why the job has failed."""


def is_live(state: str) -> bool:
    """Whether a job in this state waits or runs."""
    return state in _WAITING or state in _RUNNING


def is_of_array(number: str) -> bool:
    """Whether a number in Slurm belongs to a task of an array."""
    return "_" in number


def is_of(queued: QueuedJob, job_id: str) -> bool:
    """Whether a job in Slurm is this job. Its number is not enough: after a loss of state, Slurm starts again at 1."""
    named = job_id_of(queued.comment)
    # A task has the comment of its sweep.
    return named == job_id or (named is not None and is_of_array(queued.id))


def is_over(state: str) -> bool:
    """Whether the state of a job is final."""
    return not is_live(state)


def outcome(place: Path) -> tuple[int, str] | None:
    """Return the exit code and the reason that the job's script has written at its end; None if it has not."""
    try:
        code, _, reason = (place / "outcome").read_text().strip().partition(" ")
        return int(code), reason
    except (FileNotFoundError, ValueError):
        return None


def known_state(
    job_id: str,
    place: Path,
    submitted: Submitted | None,
    *,
    queued: QueuedJob | None,
    starts: Sequence[AccountedStart],
) -> JobState:
    """Return the state of a job.

    Args:
        job_id: `Job.id`.
        place: The job's folder.
        submitted: The record of the submission; None if Slurm has not accepted the job.
        queued: The controller's record of the job; None if the controller does not know the job.
        starts: The accounting's records of the job's starts, oldest first.
    """
    if submitted is None:
        reason = "not submitted, or the answer was lost: submit it again, it is found or submitted"
        return JobState(id=job_id, scheduler_id="", phase=Phase.UNKNOWN, reason=reason)
    count = starts_of(place)
    if not is_of_array(submitted.scheduler_id):  # a task has the name of its sweep, not of its job
        starts = [each for each in starts if each.name == slurm_name(job_id)]
    last = starts[-1] if starts else None
    phase, reason = _phase(place, _state(queued, last), count)
    if queued is not None and queued.reason == NEVER and phase is Phase.STOPPED and not count:
        phase, reason = Phase.FAILED, BEFORE_FAILED
    if queued is not None and phase in (Phase.WAITING, Phase.RESTARTING):
        reason = why_it_waits(queued.reason, queued.id)
    waits = phase in (Phase.WAITING, Phase.RESTARTING)
    never = phase.is_over and not count  # then Slurm reports the time of the end also as the start
    source = queued or last
    return JobState(
        id=job_id,
        scheduler_id=submitted.scheduler_id,
        phase=phase,
        reason=reason,
        expected_start_s=queued.started_s if queued and waits else None,
        submitted_s=submitted.submitted_s,
        started_s=source.started_s if source and not waits and not never else None,
        ended_s=source.ended_s if source and phase.is_over else None,
        restarts=max(0, count - 1),
        nodes=(queued.nodes,) if queued and queued.nodes and not waits else (),
        gpu_seconds=_gpu_seconds(starts),
    )


def _state(queued: QueuedJob | None, last: AccountedStart | None) -> str | None:
    """Return the state in Slurm, `SIGNALED` if a signal ended the script; None if Slurm has forgotten the job."""
    if queued is None:
        # A controller knows all waiting and running jobs, unless it was killed before it saved them. So a live job
        # that it does not know is lost.
        if last is None or is_live(last.state):
            return None
        return SIGNALED if last.state == "FAILED" and last.signal else last.state
    # Slurm 22.05 reports JobLaunchFailure, later versions RaisedSignal:15(Terminated).
    by_signal = queued.reason.startswith(("JobLaunchFailure", "RaisedSignal"))
    return SIGNALED if queued.state == "FAILED" and by_signal else queued.state


def _gpu_seconds(starts: Sequence[AccountedStart]) -> float | None:
    """Return the GPU seconds of all starts; None without GPUs, or if the cluster does not count GPUs."""
    if not any(each.gpus for each in starts):
        return None
    return sum(each.elapsed_s * each.gpus for each in starts)


def _phase(place: Path, state: str | None, starts: int) -> tuple[Phase, str]:
    """Return phase and reason for a state in Slurm; `state` is None if Slurm has forgotten the job."""
    found = outcome(place)
    if state in _WAITING:
        return (Phase.RESTARTING if starts else Phase.WAITING), ""
    if state in _RUNNING:
        return Phase.RUNNING, "suspended by Slurm" if state == "SUSPENDED" else ""
    is_cancelled = state is None or state.startswith("CANCELLED")
    if (is_cancelled or found is None) and (place / "stop").exists():
        return Phase.STOPPED, "by stoker stop"
    if is_cancelled and state is not None:
        return Phase.STOPPED, BY_SCANCEL
    if found is not None:
        code, reason = found
        return (Phase.DONE, "") if code == 0 else (Phase.FAILED, reason)
    if state == "COMPLETED":
        return Phase.FAILED, "its script ended before the workers; see logs/slurm.log"
    if state is None:
        return Phase.UNKNOWN, FORGOTTEN
    return Phase.FAILED, _ENDS.get(state, f"Slurm calls it {state}; see logs/slurm.log")


def starts_of(place: Path) -> int:
    """Return the number of starts so far."""
    try:
        return sum(1 for each in (place / "incarnations").iterdir() if each.name.isdecimal())
    except FileNotFoundError:
        return 0
