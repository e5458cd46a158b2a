"""What a child process prints: its lines as they come, and the last of them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

TAIL_LINES = 20
"""Last lines of the output that are kept."""

LINE_BYTES = 1 << 16
"""Longest line; a longer one is passed on in pieces."""

DRAIN_S = 5.0
"""Longest wait for the end of the stream of a child that has ended, seconds."""

LOG_TAIL_BYTES = 4096
"""How much of a log file is searched for its last line."""


class Lines:
    """The lines of a stream; `tail` holds the last of them."""

    def __init__(self, stream: IO[bytes], on_line: Callable[[str], None]) -> None:
        """Read nothing yet.

        Args:
            stream: The child's unbuffered output; non-blocking from now on, until `follow`.
            on_line: Called with each line, without its end.
        """
        self.stream = stream
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_line = on_line
        self._partial = b""
        os.set_blocking(stream.fileno(), False)

    def read(self) -> bool:
        """Pass on the lines that have come; False at the end of the stream."""
        while block := self.stream.read(LINE_BYTES):
            *lines, self._partial = (self._partial + block).split(b"\n")
            for line in lines:
                self._pass_on(line)
            if len(self._partial) > LINE_BYTES:
                self.flush()
        if block == b"":
            self.flush()
        return block is None

    def flush(self) -> None:
        """Pass on a last line without an end."""
        if self._partial:
            self._pass_on(self._partial)
            self._partial = b""

    def follow(self) -> None:
        """Read in a thread until the end of the stream, then close it."""
        os.set_blocking(self.stream.fileno(), True)
        self._thread = threading.Thread(target=self._follow, name="output", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Wait until everything that a child which has ended printed is passed on; after `follow`."""
        # A process that left the child's session may keep the stream open.
        self._thread.join(DRAIN_S)

    def _follow(self) -> None:
        with self.stream:
            self.read()

    def _pass_on(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip()
        self.tail.append(line)
        self._on_line(line)


def last_line(log: Path) -> str:
    """The last line of a log file that is not empty, "" if there is none; or why it cannot be read."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            lines = stream.read().decode(errors="replace").strip().splitlines()
    except OSError as error:
        return f"its log {log} cannot be read: {error.strerror or error}"
    return lines[-1].strip() if lines else ""
