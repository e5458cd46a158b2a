"""Reads the logs in a job's folder, across log rotation, and also after the machines of the job are gone."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stoker.core.errors import ConfigError, Plain

LOGS = "logs"

_PART = re.compile(r"task-(\d+)\.log(?:\.(\d+))?")
"""Matches a task's log, or an older part of it; a higher number is an older part."""

POLL_S = 0.3
"""Pause between two reads of growing logs, seconds: a shared file system sends no notification."""

SILENT_S = 600.0
"""If a cluster's server does not answer for this many seconds, following a log fails."""

LINE_BYTES = 1 << 20
"""Maximum length of a line, bytes; a longer line is returned in pieces."""

BLOCK_BYTES = 1 << 16


class GrowingLog:
    """Reads the parts of one log, the oldest part first; each call continues where the previous call stopped."""

    def __init__(self, folder: Path, name: str) -> None:
        """Start at the beginning.

        Args:
            folder: Folder of the parts.
            name: Name of the newest part, e.g. `task-0.log`.
        """
        self._folder, self._name = folder, name
        self._inode, self._offset = 0, 0
        self._partial = b""

    def lines(self) -> Iterator[str]:
        """Yield the complete lines that were added since the last call."""
        parts = self._parts()
        known = [number for number, (inode, _) in enumerate(parts) if inode == self._inode]
        if not known:
            self._offset = 0
        for inode, path in parts[known[0] if known else 0 :]:
            if inode != self._inode:
                self._inode, self._offset = inode, 0
            yield from self._read(path)

    def rest(self) -> Iterator[str]:
        """Yield an incomplete last line."""
        if self._partial:
            yield self._partial.decode(errors="replace")
            self._partial = b""

    def _parts(self) -> list[tuple[int, Path]]:
        """Return inode and path of each part, oldest first."""
        found = []
        for path in self._folder.glob(f"{self._name}*"):
            number = path.name.removeprefix(self._name).lstrip(".") or "0"
            if number.isdecimal():
                try:
                    found.append((int(number), path.stat().st_ino, path))
                except FileNotFoundError:  # the log was just rotated: the next read finds the file
                    continue
        return [(inode, path) for _, inode, path in sorted(found, reverse=True)]

    def _read(self, path: Path) -> Iterator[str]:
        try:
            with path.open("rb") as stream:
                if stream.seek(0, 2) < self._offset:
                    self._offset = 0  # the file was truncated
                stream.seek(self._offset)
                while block := stream.read(BLOCK_BYTES):
                    self._offset += len(block)
                    *lines, self._partial = (self._partial + block).split(b"\n")
                    yield from (line.decode(errors="replace") for line in lines)
                    if len(self._partial) > LINE_BYTES:
                        yield from self.rest()
        except FileNotFoundError:
            return


def workers_of(place: Path) -> list[int]:
    """Return the ranks of the tasks that have written logs."""
    found = (_PART.fullmatch(path.name) for path in (place / LOGS).glob("task-*"))
    return sorted({int(match[1]) for match in found if match})


def job_lines(
    place: Path, *, worker: int | None, until: Callable[[], bool] | None = None
) -> Iterator[str]:
    """Yield the lines of a job's tasks, from all starts of the job.

    Args:
        place: The job's folder.
        worker: Rank of a task; None: all tasks, with `[worker N] ` before each line, and the target's own logs.
        until: Follow the logs, and read new ones, until this function returns True; None: only the current lines.

    Raises:
        ConfigError: the worker does not exist.
    """
    if worker is not None and until is None and worker not in workers_of(place):
        known = ", ".join(map(str, workers_of(place))) or "none yet"
        raise ConfigError(
            "the job must have a log of this worker",
            got=Plain(f"{worker}; workers with logs: {known}"),
        )
    return _lines(place / LOGS, worker=worker, until=until)


def _lines(folder: Path, *, worker: int | None, until: Callable[[], bool] | None) -> Iterator[str]:
    logs: dict[str, GrowingLog] = {}
    while True:
        # Call `until` before reading, so that lines that were written before the end are still read.
        over = until is None or until()
        for name in _names(folder, worker):
            logs.setdefault(name, GrowingLog(folder, name))
        for name, log in logs.items():
            prefix = "" if worker is not None else _prefix(name)
            yield from (f"{prefix}{line}" for line in log.lines())
            if over:
                yield from (f"{prefix}{line}" for line in log.rest())
        if over:
            return
        time.sleep(POLL_S)  # a shared file system sends no notification


def _names(folder: Path, worker: int | None) -> list[str]:
    if worker is not None:
        return [f"task-{worker}.log"]
    tasks = [f"task-{rank}.log" for rank in workers_of(folder.parent)]
    others = sorted(path.name for path in folder.glob("*.log") if not _PART.fullmatch(path.name))
    return [*others, *tasks]


def _prefix(name: str) -> str:
    match = _PART.fullmatch(name)
    return f"[worker {match[1]}] " if match else f"[{name.removesuffix('.log')}] "
