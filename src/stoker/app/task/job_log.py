"""The log of one task of a job, `logs/task-RANK.log`: each line has its time, and the size is limited."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path

FILE_BYTES = 10 << 20
"""Largest size of one file."""

FILES = 3
"""Number of files that are kept: `task-0.log`, and the older `task-0.log.1` and `task-0.log.2`."""

HIDDEN = "***"
"""Replaces the value of a secret."""

_LOG = logging.getLogger(__name__)


class TaskLog:
    """Appends lines to the log. If the disk fails, lines are lost, but the task continues."""

    def __init__(
        self, path: Path, *, secrets: Collection[str] = (), file_bytes: int = FILE_BYTES
    ) -> None:
        """Open the log, to which earlier starts of the job may have written.

        Args:
            path: The newest of the files.
            secrets: Values that are replaced in every line.
            file_bytes: Maximum size of one file, bytes.
        """
        self.path = path
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)
        self._file_bytes = file_bytes
        self._file, self._size = -1, 0
        self._failed = self._over = False
        self._cut = False
        """Whether the last line is incomplete because the disk was full."""
        with self._disk_failures():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()

    def write(self, line: str) -> None:
        """Append a line."""
        if self._over:
            return
        for secret in self._secrets:
            line = line.replace(secret, HIDDEN)
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        record = f"{now} {line}\n".encode(errors="replace")
        with self._disk_failures():
            if self._file < 0 or self._size + len(record) > self._file_bytes:
                self._rotate()
            if self._cut:
                record = b"\n" + record
            written = os.write(self._file, record)
            self._size += written
            self._cut = written < len(record)

    def end(self) -> None:
        """Stop writing, because a later start of the job uses the files now."""
        self._over = True
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._file).st_size

    def _rotate(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            for age in range(FILES - 1, 0, -1):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self._aged(age - 1), self._aged(age))
            self._cut = False
        self._open()

    def _aged(self, age: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{age}") if age else self.path

    @contextlib.contextmanager
    def _disk_failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failed:
                _LOG.warning("%s cannot be written, the task continues: %s", self.path, error)
            self._failed = True
