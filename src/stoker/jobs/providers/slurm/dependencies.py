"""Makes jobs wait for other jobs: options for sbatch, and the state of a waiting job.

Slurm treats the number of a job that it has forgotten as a job that is done, so only the numbers of jobs that are not
over are passed to Slurm. If Slurm cancels a job because of a predecessor, it keeps no record of that, neither in the
queue after MinJobAge nor in the accounting. Then the states of the predecessors explain why the job did not start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stoker.core.errors import UserError
from stoker.jobs.job import Job
from stoker.jobs.places import open_job
from stoker.jobs.predecessors import require_may_be_done, waits_for, why_never
from stoker.jobs.provider import JobState, Phase
from stoker.jobs.providers.slurm.state import BEFORE_FAILED, BY_SCANCEL, starts_of

WAITS = "(Dependency)"
"""How the reason of a job ends that waits for another job."""


def dependency_options(job: Job, state: Callable[[str], JobState]) -> list[str]:
    """Return the options of sbatch that make a job wait for its unfinished predecessors.

    Args:
        job: The job.
        state: Returns the state of a job.

    Raises:
        ConfigError: a predecessor will not be done.
    """
    numbers = []
    for each in job.after:
        found = state(each)
        require_may_be_done(each, found)
        if found.phase is not Phase.DONE:
            numbers.append(found.scheduler_id)
    if not numbers:
        return []
    return [f"--dependency=afterok:{':'.join(numbers)}", "--kill-on-invalid-dep=yes"]


def with_predecessors(known: JobState, place: Path, state: Callable[[str], JobState]) -> JobState:
    """Return the state of a job; the reason names the predecessor that it waits for, or that prevented its start.

    Args:
        known: The state according to Slurm and the job's folder.
        place: The job's folder.
        state: Returns the state of a job.
    """
    waits = known.phase is Phase.WAITING and known.reason.endswith(WAITS)
    is_lost = known.phase is Phase.UNKNOWN or known.reason in (BY_SCANCEL, BEFORE_FAILED)
    if not waits and not (is_lost and not starts_of(place)):
        return known
    try:
        after = open_job(place).after
    except UserError:
        return known
    why = why_never(after, state)
    if why is not None:
        return replace(known, phase=Phase.FAILED, reason=why) if is_lost else known
    if waits and (names := waits_for(after, state)):
        return replace(known, reason=f"waits until {', '.join(names)} is done {WAITS}")
    return known
