"""Requests to this process to end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from stoker.core.signals import ASKING, heard


class StopRequest:
    """How often this process has been asked to end."""

    def __init__(self, wake: int) -> None:
        """Begin at 0.

        Args:
            wake: Descriptor that becomes readable at each request.
        """
        self.times = 0
        self.wake = wake

    def clear(self) -> None:
        """Empty the descriptor."""
        with suppress(BlockingIOError):
            os.read(self.wake, 64)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Count the signals that ask for the end, and Ctrl-C, until the block ends."""
    wake, pull = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    stop = StopRequest(wake)

    def count(_: signal.Signals) -> None:
        stop.times += 1
        with suppress(BlockingIOError):
            os.write(pull, b"!")

    try:
        with heard([*ASKING, signal.SIGINT], count):
            yield stop
    finally:
        os.close(wake)
        os.close(pull)
