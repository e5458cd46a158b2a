"""Pauses in work that holds the interpreter: requests get it in between, and not behind."""

from __future__ import annotations

import time
from collections.abc import Callable

Breathe = Callable[[], None]
"""Called often by whatever works for long."""

_WORK_S = 0.0003
"""Longest work between two pauses, as far as its pieces allow: well below a small model's call."""

_PAUSE_S = 0.0005
"""A real sleep: a lock that is given up and asked for again at once stays where it is."""


def hurry() -> None:
    """No pause: nobody waits."""


class Breath:
    """Sleeps a little once there was some work since it slept last; for one thread."""

    def __init__(self) -> None:
        """Work begins now."""
        self._since_s = time.perf_counter()

    def __call__(self) -> None:
        """Pause, if it is time."""
        if time.perf_counter() - self._since_s >= _WORK_S:
            time.sleep(_PAUSE_S)  # for others, who wait for the interpreter's lock
            self._since_s = time.perf_counter()
