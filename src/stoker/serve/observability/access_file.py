"""The access log as a file of JSON lines."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from stoker.core.errors import ConfigError, Plain
from stoker.serve.observability.access_log import Entry
from stoker.serve.observability.metrics import Counter
from stoker.serve.runtime.background import Background

STANDARD_ERROR = "-"
"""The name that stands for standard error."""


class AccessFile:
    """A line of JSON for each request, in a file that only grows; taken up anew where somebody has moved it away."""

    def __init__(self, path: str, *, dropped: Counter) -> None:
        """Args: path: the file, "-" for standard error; dropped: counts the lines that are lost.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._path = None if path == STANDARD_ERROR else Path(path)
        self._file = -1
        try:
            self._reopen_if_moved()
        except OSError as error:
            raise ConfigError(
                "the access log must be a file that can be written",
                got=Plain(f"{path} ({error.strerror})"),
            ) from error
        self._lines: Background[str] = Background(
            self._write,
            name="stoker-access-log",
            on_drop=lambda count: dropped.add(count, log="access"),
        )

    def add(self, entry: Entry) -> None:
        """Have a line written; returns at once."""
        self._lines.offer(entry.line(time.monotonic()))

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._lines.close()
        if self._file >= 0:
            os.close(self._file)

    def _write(self, lines: Sequence[str]) -> None:
        text = "".join(line + "\n" for line in lines)
        if self._path is None:
            sys.stderr.write(text)
            sys.stderr.flush()
            return
        self._reopen_if_moved()
        raw = text.encode()
        while raw:  # appended at once, so that the lines of several workers do not mix
            raw = raw[os.write(self._file, raw) :]

    def _reopen_if_moved(self) -> None:
        if self._path is None:
            return
        if self._file >= 0:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file), self._path.stat()):
                    return
            os.close(self._file)
            self._file = -1
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
