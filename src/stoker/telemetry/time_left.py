"""How long work still takes, by how fast it went lately."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW = 100
"""Newest looks that the rate is taken from: work that became slower shows within so many."""


class TimeLeft:
    """Looks at a share that grows; the first look is the baseline.

    So what was done before (a resumed run, a compiled first step) gives no rate.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without any look.

        Args:
            clock: Seconds that never jump: not the time of day, which is set and corrected.
        """
        self._clock = clock
        self._looks: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def seconds(self, share: float) -> float | None:
        """Seconds until the share is 1, or None where nobody can say yet.

        Args:
            share: How much is done, in [0, 1]. One below the last is the start of other work.
        """
        now_s = self._clock()
        if self._looks and share < self._looks[-1][1]:
            self._looks.clear()
        self._looks.append((now_s, share))
        began_s, began = self._looks[0]
        if share <= began or now_s <= began_s:
            return None
        return (now_s - began_s) / (share - began) * (1 - share)


def shown_time(seconds: float) -> str:
    """Seconds as `1:05` (minutes), `2:03:00` (hours) or `3 d 4 h`."""
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours}:{minutes % 60:02d}:{whole % 60:02d}"
    return f"{minutes}:{whole % 60:02d}"
