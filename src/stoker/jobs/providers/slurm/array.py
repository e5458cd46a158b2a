"""Job arrays: many jobs by one script; `4711_3` is what Slurm calls number 3 of one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from stoker.core.errors import UserError
from stoker.jobs.providers.slurm.client import QueuedJob, Slurm
from stoker.jobs.providers.slurm.state import is_live


def live_tasks(queued: Sequence[QueuedJob]) -> dict[int, str]:
    """Return the tasks that wait or run: number in the array -> number of Slurm, of the newest array that has it."""
    found: dict[int, str] = {}
    for each in sorted(queued, key=lambda each: int(array_of(each.id))):
        task = each.id.partition("_")[2]
        if task.isdecimal() and is_live(each.state):
            found[int(task)] = each.id
    return found


def array_of(number: str) -> str:
    """Return the number of the array that has a task; of a job that is not in one, its own."""
    return number.partition("_")[0]


def cancel_waiting_task(slurm: Slurm, number: str) -> None:
    """Take a task out of the queue if it waits; one that runs goes on.

    `scancel --state=PENDING ARRAY_NUMBER` of Slurm 22.05 cancels all tasks that wait. A task that is held does not start
    between the look at its state and its end.
    """
    if _state(slurm, number) != "PENDING":
        return
    slurm.hold(number)
    if _state(slurm, number) == "PENDING":
        slurm.cancel(number)
        return
    with contextlib.suppress(UserError):  # it may have ended meanwhile
        slurm.release(number)


def _state(slurm: Slurm, number: str) -> str | None:
    return next((each.state for each in slurm.queue(ids=[number]) if each.id == number), None)
