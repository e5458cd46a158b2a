"""Ends jobs: removes waiting jobs from the queue, and makes the scripts of running jobs let their workers save."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence

from stoker.core.errors import UserError
from stoker.jobs.providers.slurm.array import array_of, cancel_waiting_task
from stoker.jobs.providers.slurm.client import QueuedJob, Slurm
from stoker.jobs.providers.slurm.state import is_of_array, is_over

POLL_S = 0.5


def queue_of(slurm: Slurm, numbers: Collection[str]) -> list[QueuedJob]:
    """Return the controller's records of jobs.

    For several jobs, whole arrays are queried, so the result also contains the other tasks of these arrays.
    """
    ids = numbers if len(numbers) == 1 else {array_of(each) for each in numbers}
    return slurm.queue(ids=sorted(ids)) if ids else []


@contextlib.contextmanager
def unless_noted_cancelled(slurm: Slurm, number: str | None) -> Iterator[None]:
    """Cancel a job if its number cannot be recorded in its folder inside the block.

    Args:
        slurm: Slurm's programs.
        number: Number of a job or array that was submitted just now; None: an earlier submission was found.
    """
    try:
        yield
    except (OSError, UserError):
        if number is not None:
            with contextlib.suppress(UserError):  # a repeated submission finds the job
                slurm.cancel(number)
        raise


def end(slurm: Slurm, numbers: Sequence[str], *, are_whole: bool, most_s: float) -> None:
    """End jobs at the same time, after their workers have saved.

    Args:
        slurm: Slurm's programs.
        numbers: The numbers of the jobs in Slurm.
        are_whole: Whether these are all unfinished jobs of their arrays, so that a whole array can be canceled with
            one call.
        most_s: Maximum wait for the workers, seconds.
    """
    if is_of_array(numbers[0]) and not are_whole:
        cancel_waiting_task(slurm, numbers[0])
    else:
        # Let Slurm check which jobs wait: a job may start between a check here and the call.
        slurm.cancel(*sorted({array_of(each) for each in numbers}), only_waiting=True)
    end_s = time.monotonic() + most_s
    signaled: set[str] = set()
    while time.monotonic() < end_s:
        jobs = [each for each in queue_of(slurm, numbers) if each.id in numbers]
        if all(is_over(each.state) for each in jobs):
            return
        running = {each.id for each in jobs if each.state == "RUNNING"} - signaled
        if running:
            slurm.signal_scripts(sorted(running))
            signaled |= running
        time.sleep(POLL_S)  # Slurm sends no notification
    slurm.cancel(*numbers)
