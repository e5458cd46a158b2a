"""Pauses in long work that holds the GIL, so that requests can run in between."""

from __future__ import annotations

import time
from collections.abc import Callable

YieldGil = Callable[[], None]
"""A function that is called often in long work, and may pause."""

_WORK_S = 0.0003
"""Time of work after which the next call pauses, seconds; well below the duration of a small model's call."""

_PAUSE_S = 0.0005
"""Length of a pause, seconds. Above 0, because a thread that releases the GIL and requests it at once gets it back."""


def no_yield() -> None:
    """Do not pause, because no request waits."""


class GilYield:
    """Sleeps briefly if enough work was done since the last sleep. For use in one thread."""

    def __init__(self) -> None:
        """Start to measure the time of work."""
        self._since_s = time.perf_counter()

    def __call__(self) -> None:
        """Pause if the last pause was at least `_WORK_S` ago."""
        if time.perf_counter() - self._since_s >= _WORK_S:
            time.sleep(_PAUSE_S)  # lets other threads take the GIL
            self._since_s = time.perf_counter()
