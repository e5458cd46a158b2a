"""Turns SIGTERM and SIGINT into an event."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ending_on_signals(event: threading.Event) -> Iterator[None]:
    """In the `with` block, let SIGTERM and SIGINT set an event. Must be called in the main thread."""

    def end(_number: int, _frame: FrameType | None) -> None:
        event.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
