"""Output streams that tolerate a closed pipe or a full disk."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import IO, Any, TextIO, cast


class TolerantStream:
    """Forwards writes to a stream, and drops the text that cannot be written.

    A closed pipe (`| head -1`), a full disk or a closed terminal must not stop hours of work or make
    the command fail.
    """

    def __init__(self, stream: TextIO) -> None:
        """Wrap a stream."""
        self._stream = stream
        self._failed = False

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        try:
            return self._stream.write(text)
        except OSError:
            self._fails()
        return len(text)

    def flush(self) -> None:
        """Flush, ignoring a failure."""
        try:
            self._stream.flush()
        except OSError:
            self._fails()

    def __getattr__(self, name: str) -> Any:
        """Forward all other attributes to the stream."""
        return getattr(self._stream, name)

    def _fails(self) -> None:
        if not self._failed:
            self._failed = True
            atexit.register(self._settle)

    def _settle(self) -> None:
        # Python flushes once more on exit, and exits with 120 if that fails.
        try:
            self._stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def tolerant(stream: TextIO | None) -> IO[str]:
    """Wrap a stream so that its failures are ignored; None is a stream that was closed at start."""
    return cast(IO[str], TolerantStream(stream or Path(os.devnull).open("w")))


def print_result(text: str) -> None:
    """Print a command's result on stdout; ignore a failure to print."""
    stdout = tolerant(sys.stdout)
    stdout.write(text + "\n")
    stdout.flush()
