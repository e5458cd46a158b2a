"""Before its first start a job on this machine waits for the jobs that must be done before it."""

from __future__ import annotations

import select
from collections.abc import Callable

from stoker.cluster.launch.group import StopRequest
from stoker.jobs.job import Job
from stoker.jobs.places import find_place
from stoker.jobs.predecessors import waits_for, why_never
from stoker.jobs.provider import JobState, Phase
from stoker.jobs.providers.local.record import read_record

POLL_S = 0.5
"""Between two looks at the records of other jobs, seconds."""


def wait_for_predecessors(job: Job, stop: StopRequest, tell: Callable[[str], None]) -> str | None:
    """Wait until all predecessors of a job are done, or this process is asked to end.

    Args:
        job: The job.
        stop: How often this process has been asked to end.
        tell: Gets why it waits, whenever that changes.

    Returns:
        Why the job can never start; None otherwise.

    Raises:
        UserError: the folder of a predecessor is gone.
    """

    def state(job_id: str) -> JobState:
        record = read_record(find_place(job_id, [job.runs]))
        if record is None:
            return JobState(id=job_id, scheduler_id="", phase=Phase.UNKNOWN)
        return record.state(job_id)

    told: list[str] = []
    while not stop.times:
        if (why := why_never(job.after, state)) is not None:
            return why
        names = waits_for(job.after, state)
        if not names:
            return None
        if names != told:
            told = names
            tell(f"waits until {', '.join(names)} is done")
        select.select([stop.wake], [], [], POLL_S)
    return None
