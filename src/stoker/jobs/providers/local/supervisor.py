"""`python -m stoker.jobs.providers.local.supervisor JOB_FOLDER MAX_RESTARTS GRACE_S HANG_S [SLOTS COUNT]`: runs a job on this machine.

The supervisor is the leader of its own session, so it continues when the terminal is closed. For each start of the job
it allocates the number of the next incarnation and starts all workers. After a failure, all workers restart from the
last checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stoker.cluster.launch.group import Group, GroupLimits, Outcome, StopRequest, stop_requests
from stoker.cluster.processes.identity import identity_of
from stoker.core.errors import UserError
from stoker.core.threads import called_after
from stoker.jobs.job import Job, read_job
from stoker.jobs.provider import Phase
from stoker.jobs.providers.local.hang import hang_is_noticed
from stoker.jobs.providers.local.record import LocalRecord, is_stopped, write_record
from stoker.jobs.providers.local.room import why_fewer
from stoker.jobs.providers.local.settings import LocalSettings
from stoker.jobs.providers.local.waiting import Slots, wait_for_predecessors
from stoker.jobs.providers.local.workers import next_incarnation, worker_commands

LOG = "supervisor.log"

MIN_START_S = 1.0
"""Workers run for at least this many seconds before they must save because of the time limit."""


class Supervisor:
    """Runs the consecutive starts of a job."""

    def __init__(self, place: Path, limits: LocalSettings, slots: Slots | None = None) -> None:
        """Prepare the job; no worker is started yet.

        Args:
            place: The job's folder.
            limits: How often, and when, all workers restart.
            slots: The slots of the job's sweep; None: the job is not part of a sweep.
        """
        self._place, self._job = place, read_job(place)
        self._left, self._grace_s = limits.max_restarts, limits.grace_s
        self._hang_s, self._hung = limits.hang_s or 0.0, False
        self._timed_out, self._slots = False, slots
        phase = Phase.WAITING if self._job.after or slots else Phase.RUNNING
        self._record = LocalRecord(
            supervisor=identity_of(os.getpid()), phase=phase, submitted_s=time.time()
        )

    def run(self) -> None:
        """Run the job to its end, and record how it ended."""
        with stop_requests() as stop:
            try:
                self._write(reason=why_fewer(self._job.resources))
                with contextlib.ExitStack() as held:
                    phase, reason = self._wait(stop, held) or self._run(stop)
            except UserError as error:
                phase, reason = Phase.FAILED, error.line()
            except Exception:  # noqa: BLE001 - a detached process has no caller to raise it to
                self._log(traceback.format_exc())
                phase, reason = Phase.FAILED, f"a bug in Stoker: see logs/{LOG}, and report it"
            self._log(f"the job is {phase}{': ' if reason else ''}{reason}")
            self._write(phase=phase, reason=reason, ended_s=time.time())

    def _wait(self, stop: StopRequest, held: contextlib.ExitStack) -> tuple[Phase, str] | None:
        """Wait for predecessors and for a slot; return phase and reason if the job must not start."""
        why = wait_for_predecessors(self._job, stop, lambda reason: self._write(reason=reason))
        if why is not None:
            return Phase.FAILED, why
        if self._slots is not None:
            self._write(reason="waits until other jobs of its sweep are over")
            self._slots.take(stop, held)
        if stop.times:
            return self._end_by_request()
        self._write(phase=Phase.RUNNING, reason=why_fewer(self._job.resources))
        return None

    def _end_by_request(self) -> tuple[Phase, str]:
        if is_stopped(self._place):
            return Phase.STOPPED, ""
        return Phase.FAILED, "a signal ended its supervisor; submit it again to go on"

    def _run(self, stop: StopRequest) -> tuple[Phase, str]:
        while True:
            outcome = self._start(stop)
            if end := self._end_of(outcome):
                return end
            if is_stopped(self._place):
                return Phase.STOPPED, ""
            # The signals of this start came from its time limit, or from the check for a hang.
            stop.times = 0
            self._write(restarts=self._record.restarts + 1)

    def _start(self, stop: StopRequest) -> Outcome:
        number = next_incarnation(self._place)
        commands = worker_commands(self._job, self._place, incarnation=number)
        fewer = why_fewer(self._job.resources)
        self._log(f"incarnation {number}: {fewer or f'{len(commands)} worker(s)'}")
        self._write(started_s=time.time(), reason=fewer)
        limits = GroupLimits(
            # Heartbeats do not reach this process: they end at the process that writes a worker's log.
            watchdog_s=math.inf,
            grace_s=self._grace_s,
            unheard_grace_s=self._grace_s,
            alone_restarts=0,
        )
        self._hung = False
        with (
            self._time_limit(self._job),
            hang_is_noticed(self._place, self._hang_s, self._end_because_of_hang),
        ):
            group = Group(commands, limits, stop=stop, log=self._log_event, on_beat=lambda _: None)
            return group.run()

    def _end_of(self, outcome: Outcome) -> tuple[Phase, str] | None:
        """Return the final phase and reason of the job; None if the job restarts."""
        if outcome.signaled:
            if is_stopped(self._place):
                return Phase.STOPPED, ""
            if not outcome.preempted:
                return Phase.DONE, ""
            if self._hung:
                return self._end_of_failure(f"no progress for {self._hang_s:g} s")
            if self._timed_out:
                self._log(
                    "the time limit of this start was reached: all workers have saved and start again"
                )
                return None
            return self._end_by_request()
        failure = outcome.failure
        if failure is None:
            return Phase.DONE, ""
        last = next((line for line in reversed(failure.tail) if line.strip()), "it printed nothing")
        reason = f"{failure.name} {failure.reason}: {last.strip()}"
        if failure.is_final:
            self._log(reason)
            return Phase.FAILED, reason
        return self._end_of_failure(reason)

    def _end_because_of_hang(self) -> None:
        self._hung = True
        self._log(f"no progress for {self._hang_s:g} s: the workers are ended")
        os.kill(os.getpid(), signal.SIGUSR1)

    def _end_of_failure(self, reason: str) -> tuple[Phase, str] | None:
        """Return the final phase and reason of the job after a failure; None if the job restarts."""
        self._log(reason)
        if self._left <= 0:
            return Phase.FAILED, f"{reason} (after {self._record.restarts} restarts)"
        self._left -= 1
        self._log(
            f"all workers start again from the last checkpoint; {self._left} more times at most"
        )
        return None

    @contextmanager
    def _time_limit(self, job: Job) -> Iterator[None]:
        """Request the end of this start early enough that workers can save within the time limit."""
        self._timed_out = False
        if job.resources.time_limit_s is None:
            yield
            return

        def ask() -> None:
            self._timed_out = True
            os.kill(os.getpid(), signal.SIGUSR1)

        with called_after(max(MIN_START_S, job.resources.time_limit_s - self._grace_s), ask):
            yield

    def _log_event(self, line: str) -> None:
        if not line.startswith("[worker "):  # lines of workers are already in their own logs
            self._log(line)

    def _log(self, text: str) -> None:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        with (self._place / "logs" / LOG).open("a", encoding="utf-8") as stream:
            stream.writelines(f"{at} {line}\n" for line in text.splitlines())

    def _write(self, **changes: Any) -> None:
        self._record = replace(self._record, **changes)
        write_record(self._place, self._record)


def main(arguments: list[str]) -> None:
    """Run the job.

    Args:
        arguments: The job's folder; maximum number of restarts; the workers' grace period, seconds; maximum time
            without progress, seconds (0: no limit); for a job of a sweep, folder and number of the sweep's slots.
    """
    place, max_restarts, grace_s, hang_s, *slots = arguments
    shared = Slots(Path(slots[0]), int(slots[1])) if slots else None
    limits = LocalSettings(
        max_restarts=int(max_restarts), grace_s=float(grace_s), hang_s=float(hang_s) or None
    )
    Supervisor(Path(place), limits, shared).run()


if __name__ == "__main__":
    main(sys.argv[1:])
