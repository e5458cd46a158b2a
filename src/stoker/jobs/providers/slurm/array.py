"""Job arrays: many jobs that Slurm runs from the same script. `4711_3` is Slurm's name of task 3 of array 4711."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from stoker.core.errors import UserError
from stoker.jobs.providers.slurm.client import QueuedJob, Slurm
from stoker.jobs.providers.slurm.state import is_live


def live_tasks(queued: Sequence[QueuedJob]) -> dict[int, str]:
    """Return live tasks: index in the array -> number in Slurm, from the newest array with that index."""
    found: dict[int, str] = {}
    for each in sorted(queued, key=lambda each: int(array_of(each.id))):
        task = each.id.partition("_")[2]
        if task.isdecimal() and is_live(each.state):
            found[int(task)] = each.id
    return found


def array_of(number: str) -> str:
    """Return the number of a task's array; for a job outside an array, its own number."""
    return number.partition("_")[0]


def cancel_waiting_task(slurm: Slurm, number: str) -> None:
    """Remove a task from the queue if it waits; a running task continues.

    In Slurm 22.05, `scancel --state=PENDING ARRAY_NUMBER` cancels all waiting tasks of the array. So the task is held
    first: then it cannot start between the check of its state and its removal.
    """
    if _state(slurm, number) != "PENDING":
        return
    slurm.hold(number)
    if _state(slurm, number) == "PENDING":
        slurm.cancel(number)
        return
    with contextlib.suppress(UserError):  # the task may have ended in the meantime
        slurm.release(number)


def _state(slurm: Slurm, number: str) -> str | None:
    return next((each.state for each in slurm.queue(ids=[number]) if each.id == number), None)
