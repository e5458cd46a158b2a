"""Shows what XLA compiles while the device waits, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SILENT_S = 2.0
"""Shorter compilations are not shown."""

EVERY_S = 1.0
"""Interval between two updates of the line."""


@contextmanager
def shown(report: Callable[[str], None], what: str) -> Iterator[None]:
    """Show what is being compiled, and for how long.

    Args:
        report: Receives the line, called from another thread: this one is inside TensorFlow.
        what: What is being compiled; empty if nothing is.

    Yields:
        Nothing; the line is updated until the end, e.g. `compiling, 0:35: ...`.
    """
    if not what:
        yield
        return
    begun_s = time.monotonic()
    ended = threading.Event()

    def repeat() -> None:
        wait_s = SILENT_S
        while not ended.wait(wait_s):
            passed = round(time.monotonic() - begun_s)
            report(f"compiling, {passed // 60}:{passed % 60:02}: {what}")
            wait_s = EVERY_S

    teller = threading.Thread(target=repeat, name="stoker-compiling", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
