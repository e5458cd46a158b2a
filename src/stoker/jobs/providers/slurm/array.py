"""Job arrays: many jobs by one script; `4711_3` is Slurm's name for element 3 of array 4711."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from stoker.core.errors import UserError
from stoker.jobs.providers.slurm.client import QueuedJob, Slurm
from stoker.jobs.providers.slurm.state import is_live


def live_tasks(queued: Sequence[QueuedJob]) -> dict[int, str]:
    """Return the waiting and running tasks: index in the array -> number in Slurm, of the newest array that has it."""
    found: dict[int, str] = {}
    for each in sorted(queued, key=lambda each: int(array_of(each.id))):
        task = each.id.partition("_")[2]
        if task.isdecimal() and is_live(each.state):
            found[int(task)] = each.id
    return found


def array_of(number: str) -> str:
    """Return the number of the array that has a task; for a job that is not in one, its own number."""
    return number.partition("_")[0]


def cancel_waiting_task(slurm: Slurm, number: str) -> None:
    """Remove a waiting task from the queue; a running one continues.

    `scancel --state=PENDING ARRAY_NUMBER` of Slurm 22.05 cancels all waiting tasks. A held task does not start
    between the check of its state and its removal.
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
