"""The record that the supervisor of a job on this machine writes in the job's folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from stoker.cluster.processes.identity import ProcessIdentity
from stoker.core.config import build
from stoker.core.files import read_json, write_json
from stoker.jobs.provider import JobState, Phase

FILE = "local.json"

STOP = "stop"
"""File whose existence means that a user has stopped the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRecord:
    """The state of a job on this machine; times are seconds since the epoch."""

    supervisor: ProcessIdentity
    phase: str
    """The value of a `Phase`."""

    submitted_s: float
    reason: str = ""
    started_s: float | None = None
    ended_s: float | None = None
    restarts: int = 0

    def state(self, job_id: str) -> JobState:
        """Convert the record to a `JobState`; the job has failed if the supervisor ended without a final record."""
        phase, reason = Phase(self.phase), self.reason
        if not phase.is_over and not self.supervisor.is_here:
            phase = Phase.UNKNOWN
            reason = f"it was submitted on {self.supervisor.host}: ask there"
        elif not phase.is_over and not self.supervisor.lives:
            phase = Phase.FAILED
            reason = (
                f"its supervisor (process {self.supervisor.pid}) was killed, or the machine restarted; "
                "submit it again to go on from the last checkpoint"
            )
        return JobState(
            id=job_id,
            scheduler_id=str(self.supervisor.pid),
            phase=phase,
            reason=reason,
            submitted_s=self.submitted_s,
            started_s=self.started_s,
            ended_s=self.ended_s,
            restarts=self.restarts,
            nodes=(self.supervisor.host,),
        )


def read_record(place: Path) -> LocalRecord | None:
    """Return the newest record of a job; None if the job was not started on a local target."""
    path = place / FILE
    return build(LocalRecord, read_json(path), where=str(path)) if path.is_file() else None


def write_record(place: Path, record: LocalRecord) -> None:
    """Write the record of a job, which replaces the previous one."""
    write_json(place / FILE, asdict(record))


def is_stopped(place: Path) -> bool:
    """Whether a user has stopped the job."""
    return (place / STOP).exists()
