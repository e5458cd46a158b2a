"""Keeps the final state of a job in its folder, because the cluster removes the job after some time."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from stoker.core.errors import UserError
from stoker.core.files import read_json, write_json
from stoker.jobs.places import read_submitted
from stoker.jobs.provider import JobState, Phase
from stoker.jobs.providers.kubernetes.state import STOP

ENDED = "ended.json"
"""File in the job's folder with the job's final state; the cluster removes a job `keep_s` seconds after its end."""


def keep(place: Path, state: JobState) -> None:
    """Write the final state of a job into its folder, if the folder is writable."""
    if (place / ENDED).exists():
        return
    try:
        write_json(place / ENDED, asdict(state))
    except (UserError, OSError):  # the folder belongs to another user
        return


def forgotten(job_id: str, place: Path) -> JobState:
    """Return the state of a job that the cluster does not know, from the job's folder."""
    submitted = read_submitted(place)
    scheduler_id = submitted.scheduler_id if submitted else ""
    if (place / STOP).exists():
        return JobState(
            id=job_id,
            scheduler_id=scheduler_id,
            phase=Phase.STOPPED,
            reason="by stoker stop",
            submitted_s=submitted.submitted_s if submitted else None,
        )
    if (place / ENDED).is_file():
        kept = read_json(place / ENDED)
        return JobState(**kept | {"phase": Phase(kept["phase"]), "nodes": tuple(kept["nodes"])})
    reason = "not submitted, or the answer was lost: submit it again, it is found or submitted"
    if submitted is not None:
        reason = "the cluster does not know it any more: deleted, or over for longer than keep_s of the target"
    return JobState(
        id=job_id,
        scheduler_id=scheduler_id,
        phase=Phase.UNKNOWN,
        reason=reason,
        submitted_s=submitted.submitted_s if submitted else None,
    )
