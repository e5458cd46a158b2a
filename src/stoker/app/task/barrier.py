"""Barriers of the tasks of a cluster that another launcher started, as files in a shared folder.

TensorFlow waits almost an hour for a task that never starts, holds Python's lock meanwhile, and so
does not react to signals. It also treats a task that exits before the others as lost.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from stoker.cluster.resolver import ClusterSpec
from stoker.core.errors import DataError, Plain, UserError
from stoker.core.files import read_json, write_json

FINISH_S = 60.0
"""Longest time that the first task waits for the others to exit, in seconds."""

POLL_S = 0.2
"""Poll interval in seconds: a shared file system sends no notification of a remote change."""

READY = "ready-{rank}"
"""File of a task that is ready to connect through TensorFlow."""

FAILED = "failed-{rank}.json"
"""File with the error of a task that cannot train."""


def wait_for_all(barrier: Path, cluster: ClusterSpec) -> None:
    """Mark this task as ready, and wait until all tasks are.

    Raises:
        UserError: another task cannot train; names the task and its error.
    """
    while True:
        try:
            # In every iteration: a restarted first task clears the folder.
            (barrier / READY.format(rank=cluster.rank)).touch()
        except FileNotFoundError:
            raise peer_failed(cluster.leader, "it has exited") from None
        if len(list(barrier.glob(READY.format(rank="*")))) >= cluster.trainers:
            return
        for path in barrier.glob(FAILED.format(rank="*")):
            with contextlib.suppress(DataError):  # the first task has exited and removed the folder
                failure = read_json(path)
                raise peer_failed(failure["name"], failure["line"])
        time.sleep(POLL_S)  # a shared file system sends no notification


def report_failure(barrier: Path, cluster: ClusterSpec, error: Exception) -> None:
    """Report to the waiting tasks that this task cannot train, and why."""
    failure = {"name": cluster.name, "line": line_of(error)}
    if barrier.is_dir():  # else no task waits any more
        write_json(barrier / FAILED.format(rank=cluster.rank), failure)


def finish(barrier: Path, cluster: ClusterSpec) -> None:
    """Mark this task as finished; the first task waits for the others, which TensorFlow ends with it."""
    with contextlib.suppress(OSError):  # the first task timed out and removed the folder
        (barrier / str(cluster.rank)).touch()
    until_s = time.monotonic() + FINISH_S
    while cluster.leads and time.monotonic() < until_s:
        if len(list(barrier.glob("[0-9]*"))) >= cluster.trainers:
            return
        time.sleep(POLL_S)  # a shared file system sends no notification


def line_of(error: Exception) -> str:
    """Return the error as one line."""
    return error.line() if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def peer_failed(name: str, line: str) -> UserError:
    """Return the error that the other tasks raise when one task cannot train.

    Args:
        name: The failed task.
        line: Its error.
    """
    return UserError(
        f"{name} failed before training started",
        got=Plain(line),
        fix="Fix it, and start all tasks again.",
    )
