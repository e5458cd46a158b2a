"""The folder where tasks of another launcher's cluster tell each other how far they are.

TensorFlow waits the better part of an hour for a task that never comes, deaf to signals as it holds
Python's lock meanwhile; and it takes one that ends before the others for lost.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from stoker.cluster.resolver import ClusterSpec
from stoker.core.errors import DataError, Plain, UserError
from stoker.core.files import read_json, write_json

MEET_S = 60.0
"""Longest that the first task waits for the others to end."""

POLL_S = 0.2
"""Pause between two looks: a shared file system tells nobody of a change elsewhere."""

READY = "ready-{rank}"
"""A task has found what it trains with, and can go to TensorFlow."""

FAILED = "failed-{rank}.json"
"""Why a task cannot."""


def gather(meeting: Path, cluster: ClusterSpec) -> None:
    """Say that this task is ready, and wait until all are.

    Raises:
        UserError: another one cannot train; names it, and why.
    """
    while True:
        try:
            # Again and again: a first task that is started again clears the folder.
            (meeting / READY.format(rank=cluster.rank)).touch()
        except FileNotFoundError:
            raise not_come(cluster.leader, "it has ended") from None
        if len(list(meeting.glob(READY.format(rank="*")))) >= cluster.trainers:
            return
        for path in meeting.glob(FAILED.format(rank="*")):
            with contextlib.suppress(DataError):  # the first task has ended, and cleared up
                told = read_json(path)
                raise not_come(told["name"], told["line"])
        time.sleep(POLL_S)


def say_failed(meeting: Path, cluster: ClusterSpec, error: Exception) -> None:
    """Tell those who gather that this task cannot train, and why."""
    told = {"name": cluster.name, "line": line_of(error)}
    if meeting.is_dir():  # else nobody waits any more
        write_json(meeting / FAILED.format(rank=cluster.rank), told)


def meet(meeting: Path, cluster: ClusterSpec) -> None:
    """Say that this task has ended; the first waits for all, for TensorFlow's others end with it."""
    with contextlib.suppress(OSError):  # the first one has waited long enough
        (meeting / str(cluster.rank)).touch()
    until_s = time.monotonic() + MEET_S
    while cluster.leads and time.monotonic() < until_s:
        if len(list(meeting.glob("[0-9]*"))) >= cluster.trainers:
            return
        time.sleep(POLL_S)


def line_of(error: Exception) -> str:
    """An error as one line, whoever's it is."""
    return error.line() if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def not_come(name: str, line: str) -> UserError:
    """What the others end with where one cannot train.

    Args:
        name: Who.
        line: Why.
    """
    return UserError(
        f"{name} must come as far as training",
        got=Plain(line),
        fix="Mend that, and start all tasks again.",
    )
