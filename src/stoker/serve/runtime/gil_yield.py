"""Pauses in long work that holds the GIL, so that requests run in between."""

from __future__ import annotations

import time
from collections.abc import Callable

YieldGil = Callable[[], None]
"""Called often in long work."""

_WORK_S = 0.0003
"""Longest work between two pauses, seconds, as far as its pieces allow: well below a small model's call."""

_PAUSE_S = 0.0005
"""Length of a pause, seconds. It must be a real sleep: a thread that releases the GIL and requests it at once gets it back."""


def no_yield() -> None:
    """Do not pause, because no request waits."""


class GilYield:
    """Sleeps briefly after some work since the last sleep; for one thread."""

    def __init__(self) -> None:
        """Start counting work now."""
        self._since_s = time.perf_counter()

    def __call__(self) -> None:
        """Pause if it is time."""
        if time.perf_counter() - self._since_s >= _WORK_S:
            time.sleep(_PAUSE_S)  # lets other threads take the GIL
            self._since_s = time.perf_counter()
