"""Whether this process has been asked to end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from stoker.core.signals import ASKING, heard


class AskedToEnd:
    """Counts the signals that ask for an end."""

    def __init__(self, wake: int) -> None:
        """Begin at none; `wake` is a descriptor that becomes readable at each."""
        self.times = 0
        self.wake = wake

    def clear(self) -> None:
        """Read what made the descriptor readable."""
        with suppress(BlockingIOError):
            os.read(self.wake, 64)


@contextmanager
def asked_to_end() -> Iterator[AskedToEnd]:
    """Take the signals that ask for an end, and Ctrl-C, until the block ends."""
    wake, pull = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    asked = AskedToEnd(wake)

    def hear(_: signal.Signals) -> None:
        asked.times += 1
        with suppress(BlockingIOError):
            os.write(pull, b"!")

    try:
        with heard([*ASKING, signal.SIGINT], hear):
            yield asked
    finally:
        os.close(wake)
        os.close(pull)
