"""Makes a job on this machine wait before its first start: for its predecessors, and for other jobs of its sweep."""

from __future__ import annotations

import fcntl
import select
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from stoker.cluster.launch.group import StopRequest
from stoker.jobs.job import Job
from stoker.jobs.places import find_place
from stoker.jobs.predecessors import waits_for, why_never
from stoker.jobs.provider import JobState, Phase
from stoker.jobs.providers.local.record import read_record

POLL_S = 0.5
"""Pause between two checks of the records of other jobs, seconds."""


class Slots:
    """Limits how many jobs of a sweep run at the same time: each job holds the lock of a file until it ends."""

    def __init__(self, folder: Path, count: int) -> None:
        """Create the slots; no slot is locked yet.

        Args:
            folder: Folder of the files.
            count: Number of slots.
        """
        self._folder, self._count = folder, count

    def take(self, stop: StopRequest, held: ExitStack) -> None:
        """Wait for a free slot, or for a request to end this process.

        Args:
            stop: Counts the requests to end that this process has received.
            held: Context that frees the slot when it is closed.
        """
        self._folder.mkdir(exist_ok=True)
        while not stop.times:
            for number in range(self._count):
                stream = (self._folder / str(number)).open("a")
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    stream.close()
                    continue
                held.enter_context(stream)
                return
            select.select([stop.wake], [], [], POLL_S)


def wait_for_predecessors(job: Job, stop: StopRequest, tell: Callable[[str], None]) -> str | None:
    """Wait until all predecessors of a job are done, or until a request to end this process.

    Args:
        job: The job.
        stop: Counts the requests to end that this process has received.
        tell: Called with the reason for waiting whenever it changes.

    Returns:
        Why the job can never start; None if it may start.

    Raises:
        UserError: the folder of a predecessor is gone.
    """

    def state(job_id: str) -> JobState:
        record = read_record(find_place(job_id, [job.runs]))
        if record is None:
            return JobState(id=job_id, scheduler_id="", phase=Phase.UNKNOWN)
        return record.state(job_id)

    shown: list[str] = []
    while not stop.times:
        if (why := why_never(job.after, state)) is not None:
            return why
        names = waits_for(job.after, state)
        if not names:
            return None
        if names != shown:
            shown = names
            tell(f"waits until {', '.join(names)} is done")
        select.select([stop.wake], [], [], POLL_S)
    return None
