"""Runs jobs on this machine, each under a supervisor that continues when the terminal is closed."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stoker.cluster.doctor.visible import GPUS
from stoker.cluster.launch.restarts import MAX_WORKERS
from stoker.cluster.place import RANK, TASKS
from stoker.cluster.processes import Child, ProcessOptions, last_line
from stoker.core.errors import ConfigError, Plain, UserError
from stoker.core.incarnation import FIRST
from stoker.jobs.job import Job
from stoker.jobs.places import find_place, note_submission, places, read_submitted
from stoker.jobs.provider import Array, JobState, Phase
from stoker.jobs.providers.local.record import FILE, STOP, LocalRecord, read_record, write_record
from stoker.jobs.providers.local.room import workers_here
from stoker.jobs.providers.local.settings import LocalSettings
from stoker.jobs.providers.local.workers import worker_commands

SUPERVISOR = "stoker.jobs.providers.local.supervisor"

READY_S = 60.0
"""Maximum wait for the supervisor to start, seconds: Python may start slowly on a busy machine."""

END_S = 15.0
"""Time that the supervisor gets to end after the workers' grace period, seconds."""

MAX_AT_ONCE = 100
"""Maximum number of jobs in a sweep: each job has a supervisor, which is a Python process, from the start."""

SLOTS = "slots"
"""Folder inside a sweep's folder; each job whose workers run locks one file in it."""

POLL_S = 0.05
"""Pause between two checks of a supervisor that is not a child of this process, seconds."""


class LocalProvider:
    """Starts jobs on this machine immediately."""

    def __init__(self, name: str, settings: LocalSettings) -> None:
        """Create the provider; nothing is started.

        Args:
            name: Name of the target.
            settings: Settings of the target.
        """
        self.name = name
        self.settings = settings

    def validate(self, job: Job) -> None:
        """Refuse more workers, GPUs or secrets than this machine has."""
        needs = job.resources
        if not 1 <= needs.workers <= MAX_WORKERS:
            raise ConfigError(f"--workers must be from 1 to {MAX_WORKERS}", got=needs.workers)
        if needs.gpus < 0:
            raise ConfigError("--gpus must be 0 or more", got=needs.gpus)
        workers_here(needs)
        if missing := [name for name in job.secrets if not os.environ.get(name)]:
            raise ConfigError(
                "secrets must be variables of the environment in which the job is submitted",
                got=Plain(f"no {', '.join(missing)}"),
                fix=f"Set it: export {missing[0]}=...",
            )

    def describe(self, job: Job, code: bytes) -> str:  # noqa: ARG002 - it is in the job's folder
        """Return the commands that the workers would run."""
        lines = []
        for command in worker_commands(job, job.place, incarnation=FIRST):
            own = [f"{name}={shlex.quote(command.environ[name])}" for name in (RANK, TASKS, GPUS)]
            lines.append(f"{' '.join(own)} {shlex.join(command.argv)}\n")
        return "".join(lines)

    def submit(self, job: Job) -> str:
        """Start the job's supervisor, unless it is already running; return its process ID."""
        return self._start(job)

    def validate_array(self, array: Array) -> None:
        """Refuse what `validate` refuses, and more jobs than this machine can start supervisors for."""
        self.validate(array.jobs[0])
        if len(array.jobs) > MAX_AT_ONCE:
            raise ConfigError(
                f"a sweep on this machine must have at most {MAX_AT_ONCE} combinations",
                got=len(array.jobs),
                fix="Leave out some values, or submit it in parts.",
            )

    def submit_array(self, array: Array) -> Mapping[int, str]:
        """Start a supervisor for each job; at most `at_once` supervisors (default 1) run workers at the same time."""
        slots = (str(array.place / SLOTS), str(array.at_once or 1))
        return {number: self._start(job, *slots) for number, job in array.jobs.items()}

    def _start(self, job: Job, *slots: str) -> str:
        place = job.place
        record = read_record(place)
        if record is not None and record.supervisor.lives:
            number = str(record.supervisor.pid)
            note_submission(place, target=self.name, scheduler_id=number)
            return number
        (place / "logs").mkdir(exist_ok=True)
        (place / STOP).unlink(missing_ok=True)
        output = place / "logs" / "supervisor.out"
        settings = self.settings
        limits = map(str, (settings.max_restarts, settings.grace_s, settings.hang_s or 0))
        child = Child(
            "the supervisor",
            # -P: modules in the current folder are not imported as Stoker's.
            [sys.executable, "-P", "-m", SUPERVISOR, str(place), *limits, *slots],
            ProcessOptions(
                stdin=subprocess.DEVNULL, output=output, parent_death=None, ready_file=place / FILE
            ),
        )
        if not child.wait_until_ready(READY_S):
            child.kill()
            child.wait()
            raise UserError(
                "the supervisor of the job must start",
                got=Plain(last_line(output) or "nothing in its log"),
                fix=f"Read its log: {output}.",
            )
        number = str(child.pid)
        try:
            note_submission(place, target=self.name, scheduler_id=number)
        except (OSError, UserError):
            child.kill()
            child.wait()
            raise
        return number

    def state(self, job_id: str) -> JobState:
        """Return the state from the supervisor's record; failed if the supervisor is gone without a final one."""
        record = read_record(find_place(job_id))
        if record is None:
            return JobState(id=job_id, scheduler_id="", phase=Phase.UNKNOWN, reason="never started")
        return record.state(job_id)

    def jobs(self) -> Sequence[JobState]:
        """Return the jobs that were submitted to this target, newest first."""
        found = []
        for job_id, place in places().items():
            submitted = read_submitted(place)
            if submitted is None or submitted.target != self.name:
                continue
            if (record := read_record(place)) is not None:
                found.append(record.state(job_id))
        return sorted(found, key=lambda each: each.submitted_s or 0.0, reverse=True)

    def stop(self, job_id: str) -> None:
        """End the workers after they have saved, and wait until they have ended."""
        place = find_place(job_id)
        record = read_record(place)
        if record is None or record.state(job_id).phase.is_over:
            return
        if not record.supervisor.is_here:
            raise UserError(
                f"job {job_id} must be stopped where it runs",
                got=Plain(f"it runs on {record.supervisor.host}"),
                fix=f"There: stoker stop {job_id}.",
            )
        (place / STOP).touch()
        self._end(record, job_id)
        last = read_record(place)
        if last is not None and not Phase(last.phase).is_over:
            # The supervisor was killed before it could write the final record, so it is written here.
            write_record(place, replace(last, phase=Phase.STOPPED, ended_s=time.time()))

    def _end(self, record: LocalRecord, job_id: str) -> None:
        try:
            if record.supervisor.lives:
                os.kill(record.supervisor.pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        except PermissionError:
            raise UserError(
                f"only the owner of job {job_id} can stop it", fix="Ask the owner to stop it."
            ) from None
        end_s = time.monotonic() + self.settings.grace_s + END_S
        while record.supervisor.lives and time.monotonic() < end_s:
            time.sleep(POLL_S)  # only a parent process can wait for the supervisor's end
        if record.supervisor.lives:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.supervisor.pid, signal.SIGKILL)
            while record.supervisor.lives:
                time.sleep(POLL_S)  # as above
