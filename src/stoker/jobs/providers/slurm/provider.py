"""A Slurm cluster as a target, from a login node of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from stoker.core.errors import UserError
from stoker.core.files import write_atomic
from stoker.jobs.job import Job
from stoker.jobs.logs import LOGS
from stoker.jobs.places import Submitted, find_place, places, read_submitted, write_submitted
from stoker.jobs.provider import JobState
from stoker.jobs.providers.slurm.capacity import require_capacity
from stoker.jobs.providers.slurm.client import QueuedJob, Slurm
from stoker.jobs.providers.slurm.problems import AnswerLost
from stoker.jobs.providers.slurm.script import SCRIPT, job_id_of, render, slurm_name
from stoker.jobs.providers.slurm.settings import SlurmTarget
from stoker.jobs.providers.slurm.state import is_live, is_over, known_state

STOP = "stop"
"""File in the job's folder: a person wants its end."""

LEFT_BY_LAST = (STOP, "outcome", "failures")
"""Files of an earlier submission of the same job, which are not true of the next."""

STOP_MARGIN_S = 90.0
"""How much longer than the workers' grace `stop` waits for the end, seconds: Slurm's KillWait is 30 s by default."""

STOP_POLL_S = 0.5


FRESH_S = 2.0
"""How long a state is taken for the current one, seconds: what follows logs asks several times a second, and a
controller serves thousands of users."""

_recent: dict[str, tuple[float, JobState]] = {}
"""ID of a job -> when it was asked for, and its state."""


class SlurmProvider:
    """The cluster whose programs (`sbatch`, `squeue`, ...) are on the PATH."""

    def __init__(self, name: str, settings: SlurmTarget) -> None:
        """Ask nothing yet.

        Args:
            name: Of the target.
            settings: Its settings.
        """
        self.name = name
        self.settings = settings
        self._slurm = Slurm()

    def validate(self, job: Job) -> None:
        """Refuse what no machine of the partition can run, and what sbatch would refuse."""
        script = render(job, self.settings)
        require_capacity(job, self.settings, self._slurm.node_groups())
        self._slurm.check(script)

    def describe(self, job: Job, code: bytes) -> str:  # noqa: ARG002 - it lies in the job's folder
        """Return the script that sbatch would take."""
        return render(job, self.settings)

    def submit(self, job: Job) -> str:
        """Submit it, or find its earlier submission in Slurm's queue, by name and comment."""
        found = self._submitted(job) or self._submit(job)
        submitted = Submitted(target=self.name, scheduler_id=found, submitted_s=time.time())
        write_submitted(job.place, submitted)
        _recent.pop(job.id, None)
        return found

    def state(self, job_id: str) -> JobState:
        """Return what Slurm knows, and what the job's folder keeps after Slurm has forgotten it."""
        asked_s, state = _recent.get(job_id, (-FRESH_S, None))
        if state is None or time.monotonic() - asked_s >= FRESH_S:
            state = self._state(job_id)
            _recent[job_id] = time.monotonic(), state
        return state

    def _state(self, job_id: str) -> JobState:
        place = find_place(job_id)
        submitted = read_submitted(place)
        if submitted is None:
            return known_state(job_id, place, None, queued=None, starts=[])
        ids = [submitted.scheduler_id]
        queued = {each.id: each for each in self._slurm.queue(ids=ids)}
        return known_state(
            job_id,
            place,
            submitted,
            queued=queued.get(submitted.scheduler_id),
            starts=self._slurm.accounting(ids),
        )

    def jobs(self) -> Sequence[JobState]:
        """Return the jobs that were submitted to this target, the newest first."""
        found: dict[str, tuple[Path, Submitted]] = {}
        for job_id, place in places().items():
            submitted = read_submitted(place)
            if submitted is not None and submitted.target == self.name:
                found[job_id] = place, submitted
        if not found:
            return []
        queued = {each.id: each for each in self._slurm.queue()}
        gone = [each.scheduler_id for _, each in found.values() if each.scheduler_id not in queued]
        starts = self._slurm.accounting(gone) if gone else []
        states = [
            known_state(
                job_id,
                place,
                submitted,
                queued=queued.get(submitted.scheduler_id),
                starts=[each for each in starts if each.id == submitted.scheduler_id],
            )
            for job_id, (place, submitted) in found.items()
        ]
        return sorted(states, key=lambda each: each.submitted_s or 0.0, reverse=True)

    def stop(self, job_id: str) -> None:
        """Let the workers save, and wait for the end; a job that waits leaves the queue."""
        place = find_place(job_id)
        submitted = read_submitted(place)
        if submitted is None or self._state(job_id).phase.is_over:
            return
        try:
            (place / STOP).touch()
        except PermissionError:
            raise UserError(
                f"job {job_id} must be your own to be stopped", fix="Ask its owner to stop it."
            ) from None
        try:
            self._end(submitted.scheduler_id)
        finally:
            _recent.pop(job_id, None)

    def _end(self, number: str) -> None:
        # Slurm itself looks whether it waits: it may start between a look of ours and the call.
        self._slurm.cancel(number, only_waiting=True)
        end_s = time.monotonic() + self.settings.grace_s + STOP_MARGIN_S
        is_asked = False
        while time.monotonic() < end_s:
            jobs = self._slurm.queue(ids=[number])
            if not jobs or is_over(jobs[0].state):
                return
            if not is_asked and jobs[0].state == "RUNNING":
                self._slurm.signal_script(number)
                is_asked = True
            time.sleep(STOP_POLL_S)  # Slurm sends no notification
        self._slurm.cancel(number)

    def _submitted(self, job: Job) -> str | None:
        """Return the number of an earlier submission that is not over, or whose answer was lost."""
        noted = read_submitted(job.place)
        mine = [each for each in self._slurm.queue(name=slurm_name(job.id)) if _is_of(each, job)]
        for each in sorted(mine, key=lambda each: int(each.id), reverse=True):
            # One that is over was found by its answer, and is to start again; or its answer was lost.
            if is_live(each.state) or (noted is None and each.state == "COMPLETED"):
                return each.id
        return None

    def _submit(self, job: Job) -> str:
        for name in LEFT_BY_LAST:
            (job.place / name).unlink(missing_ok=True)
        (job.place / LOGS).mkdir(parents=True, exist_ok=True)
        script = job.place / SCRIPT
        write_atomic(script, render(job, self.settings))
        try:
            return self._slurm.submit(script, secrets=job.secrets)
        except AnswerLost:
            found = self._submitted(job)
            if found is None:
                raise
            return found


def _is_of(queued: QueuedJob, job: Job) -> bool:
    return job_id_of(queued.comment) == job.id
