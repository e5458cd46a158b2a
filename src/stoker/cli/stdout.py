"""Streams that nobody may be reading."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import IO, Any, TextIO, cast


class TolerantStream:
    """Passes on what is written; what cannot be written is lost, and nothing else.

    A pipe whose reader is gone (`| head -1`), a log on a full disk, a terminal that was closed: none
    of them is a reason to end hours of work, or to call them failed.
    """

    def __init__(self, stream: TextIO) -> None:
        """Stand before a stream."""
        self._stream = stream
        self._failed = False

    def write(self, text: str) -> int:
        """Write, or lose it."""
        try:
            return self._stream.write(text)
        except OSError:
            self._fails()
        return len(text)

    def flush(self) -> None:
        """Flush, or lose it."""
        try:
            self._stream.flush()
        except OSError:
            self._fails()

    def __getattr__(self, name: str) -> Any:
        """All else is the stream's: its encoding, whether it is a terminal."""
        return getattr(self._stream, name)

    def _fails(self) -> None:
        if not self._failed:
            self._failed = True
            atexit.register(self._settle)

    def _settle(self) -> None:
        # Python flushes once more at its end, and exits by 120 where that fails.
        try:
            self._stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def tolerant(stream: TextIO | None) -> IO[str]:
    """A stream whose faults end nothing; None is one that was closed before we began."""
    return cast(IO[str], TolerantStream(stream or Path(os.devnull).open("w")))


def print_result(text: str) -> None:
    """Print a command's result on stdout; where it cannot be, the work is done all the same."""
    stdout = tolerant(sys.stdout)
    stdout.write(text + "\n")
    stdout.flush()
