"""Limits the number of metric series of all models of a server, over all its workers.

If there is room, a worker appends each new series to a file that all workers share, while it holds the file's lock. So
all workers admit the same series, and an admitted series stays admitted. A series is a metric with certain values of
its labels; all buckets of a histogram together are one series.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

MAX_SERIES = 20_000
"""Default limit: about 2,500 models with one version each, all of which get requests."""

SHARED_FILE = "admitted.series"
"""Name of the file in the folder of the workers."""


class SeriesLimit:
    """Admits series until the limit is reached; thread-safe."""

    def __init__(self, folder: Path | None = None, *, max_series: int = MAX_SERIES) -> None:
        """Open the shared file.

        Args:
            folder: The folder that the workers share; None: this is the only process.
            max_series: Maximum number of series of all models together.
        """
        self._max_series = max_series
        self._admitted: set[bytes] = set()
        self._lock = threading.Lock()
        self._read_bytes = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = None if folder is None else os.open(folder / SHARED_FILE, flags, 0o600)

    @property
    def used(self) -> int:
        """Number of admitted series that this process knows."""
        return len(self._admitted)

    def admits(self, key: str) -> bool:
        """Admit a series if there is room; return whether it is admitted, now or before.

        Args:
            key: The name and labels of the series, without a line break.
        """
        line = key.encode()
        with self._lock:
            if line in self._admitted:
                return True
            if self._file is None:
                return self._admit(line)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                self._read_others(self._file)
                if line in self._admitted:
                    return True
                if not self._admit(line):
                    return False
                os.write(self._file, line + b"\n")
                return True
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file. No series may be admitted after that."""
        if self._file is not None:
            os.close(self._file)

    def _admit(self, line: bytes) -> bool:
        if len(self._admitted) >= self._max_series:
            return False
        self._admitted.add(line)
        return True

    def _read_others(self, file: int) -> None:
        """Read the lines that were added since the last call."""
        size = os.fstat(file).st_size
        added = os.pread(file, size - self._read_bytes, self._read_bytes)
        # A worker that was killed during its write leaves a line without an end, which the next line continues.
        whole, end, _ = added.rpartition(b"\n")
        if end:
            self._admitted.update(whole.split(b"\n"))
            self._read_bytes += len(whole) + len(end)
