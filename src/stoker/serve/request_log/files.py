"""The files of a request log: each whole when it has its name, all together bounded, the oldest gone first.

Several processes write files of one log side by side, each its own. What is being written is locked by
its writer; what is not locked and has no name of its own was left by one that was killed.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_log = logging.getLogger(__name__)

UNFINISHED = ".unfinished"
"""How the name ends of a file that is being written."""

_REST = re.compile(rf"(?P<stamp>\d{{8}}T\d{{12}})-\d+\.tfrecord(?:{re.escape(UNFINISHED)})?")
"""What stands behind the prefix in the name of each of our files, and of no other."""


class RecordFile:
    """A file that has its name only when it is whole."""

    def __init__(self, prefix: str) -> None:
        """Begin it.

        Args:
            prefix: How its path begins.

        Raises:
            OSError: it cannot be made.
        """
        now = dt.datetime.now(dt.UTC)
        stamp = f"{now:%Y%m%dT%H%M%S}{now.microsecond:06}"
        self._final = Path(f"{prefix}-{stamp}-{os.getpid()}.tfrecord")
        self._path = self._final.with_name(self._final.name + UNFINISHED)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _opened(self._path)
        self.size = 0

    def write(self, record: bytes) -> None:
        """Add a record, framed."""
        self._file.write(record)
        self.size += len(record)

    def flush(self) -> None:
        """Give what was written to the kernel."""
        self._file.flush()

    def abandon(self) -> None:
        """Leave it as it is, under the name of one that is not whole."""
        self._file.close()

    def close(self) -> None:
        """Give it its name."""
        try:
            self._file.flush()
            os.replace(self._path, self._final)  # before the lock goes: nobody else may remove it
        finally:
            self._file.close()


def _opened(path: Path) -> IO[bytes]:
    """A new file under this name, locked; another process may have removed it before it was."""
    while True:
        file = path.open("xb")
        fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """One of a log's files."""

    path: Path
    stamp: str
    size: int


def make_room(prefix: str, *, max_bytes: int, needed: int) -> bool:
    """Remove the oldest files of a log until it has room, whole ones only and none that is being written.

    Args:
        prefix: How their paths begin.
        max_bytes: Most that all files of the log may have together.
        needed: Bytes that are to be added.

    Returns:
        Whether it has.
    """
    if needed > max_bytes:
        return False
    files = sorted(_files(prefix), key=lambda found: (found.stamp, found.path.name))
    held = sum(found.size for found in files)
    for found in files:
        if held + needed <= max_bytes:
            break
        if _removed(found.path):
            held -= found.size
            _log.info("%s was removed: its log has its limit", found.path)
    return held + needed <= max_bytes


def _files(prefix: str) -> Iterator[_Found]:
    """All files of a log; a name that only begins like them belongs to somebody else."""
    start = Path(f"{prefix}-")
    with os.scandir(start.parent) as entries:
        for entry in entries:
            found = _REST.fullmatch(entry.name.removeprefix(start.name))
            if not entry.name.startswith(start.name) or found is None:
                continue
            with contextlib.suppress(FileNotFoundError):  # another worker removed or renamed it
                size = entry.stat(follow_symlinks=False).st_size
                yield _Found(path=Path(entry.path), stamp=found["stamp"], size=size)


def _removed(path: Path) -> bool:
    """Whether a file is gone now; one that is being written stays, and one of another user."""
    try:
        if path.name.endswith(UNFINISHED):
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        else:
            path.unlink()
    except FileNotFoundError:  # another worker was quicker
        return True
    except (BlockingIOError, PermissionError):
        return False
    return True
