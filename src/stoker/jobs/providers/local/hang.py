"""Notices that a job's workers hang: for a long time, no line is added to their logs or to the files of their run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker.core.incarnation import RUN_OF_JOB
from stoker.jobs.logs import LOGS

LONGEST_POLL_S = 10.0
"""Maximum pause between two checks of the files, seconds."""


def newest_progress_s(place: Path) -> float:
    """Return when a job's workers last wrote to their logs or to the folders of their run, seconds since the epoch.

    Args:
        place: The job's folder.
    """
    paths = list((place / LOGS).glob("task-*.log"))
    with contextlib.suppress(OSError):
        run = Path((place / RUN_OF_JOB).read_text())
        paths += [*run.glob("*"), *run.glob("*/*"), *run.glob("train/checkpoints/*")]
    newest_s = 0.0
    for path in paths:
        with contextlib.suppress(OSError):
            newest_s = max(newest_s, path.stat().st_mtime)
    return newest_s


@contextmanager
def hang_is_noticed(place: Path, hang_s: float, on_hang: Callable[[], None]) -> Iterator[None]:
    """Call a function, in another thread, if workers make no progress for `hang_s` seconds.

    Args:
        place: The job's folder.
        hang_s: Maximum time without progress, seconds; 0: no limit.
        on_hang: Called at most once.
    """
    if not hang_s:
        yield
        return
    over, began_s = threading.Event(), time.time()

    def watch() -> None:
        while not over.wait(min(hang_s / 4, LONGEST_POLL_S)):
            if time.time() - max(began_s, newest_progress_s(place)) > hang_s:
                on_hang()
                return

    thread = threading.Thread(target=watch, name="hang", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
