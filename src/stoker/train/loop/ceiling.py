"""Schedules the measurement of a step's ceiling, in windows between calls in the first epoch."""

from __future__ import annotations

from collections.abc import Callable

from stoker.train.context.position import Position
from stoker.train.context.utilization import WINDOWS, Ceiling

LEAST_GAP = 3
"""Fewest calls between two windows: of three, the two that do not follow a window are timed."""

FIRST_AFTER = 2
"""Calls before the first window: the first one compiles, the second one fills caches."""

Measure = Callable[[float], Ceiling | None]
"""A share of the usual time -> the time of steps on a resident batch; None if they did not fit in
memory, so that the step is a smaller one now."""


class CeilingWindows:
    """Decides after which calls of a process the ceiling is measured."""

    def __init__(self) -> None:
        self._calls = self._count = self._next = 0
        self.restart()

    def restart(self) -> None:
        """Start over for a new step; its first call is left out."""
        self._calls, self._count, self._next = 0, 0, FIRST_AFTER

    @property
    def missing(self) -> int:
        """Number of windows still to be taken."""
        return WINDOWS - self._count

    def due(self, calls_left: int) -> bool:
        """Whether to take a window after the call that has just ended; if so, it counts as taken.

        Args:
            calls_left: Remaining calls of this epoch.
        """
        self._calls += 1
        if not self.missing or self._calls < self._next:
            return False
        self._count += 1
        # Spread over the rest of the epoch, so that they see the same conditions as the real calls.
        self._next = self._calls + max(LEAST_GAP, calls_left // (self.missing + 1))
        return True


class RunCeiling:
    """The ceiling of a run's step, stored in the run's position."""

    def __init__(self, position: Position, measure: Measure) -> None:
        """Start without measurements.

        Args:
            position: The run's position.
            measure: Measures steps, and leaves the model as it was.
        """
        self._position, self._measure = position, measure
        self._windows, self._after_window = CeilingWindows(), False

    def restart(self) -> None:
        """Drop all measurements, because the step has changed."""
        self._windows.restart()
        self._position.timing.ceiling_s, self._position.timing.ceiling_steps = 0.0, 0

    def due(self, steps_per_call: int) -> bool:
        """Whether to measure it now, after a call."""
        left = self._position.per_epoch - self._position.in_epoch
        return self._windows.due(left // steps_per_call)

    def take(self, share: float = 1 / WINDOWS) -> bool:
        """Measure; return False if the step did not fit in memory."""
        found = self._measure(share)
        if found is None:
            return False
        self._position.timing.ceiling_s += found.wall_s
        self._position.timing.ceiling_steps += found.steps
        self._after_window = True
        return True

    def follows_window(self) -> bool:
        """Whether a window preceded the call that has ended: the input filled its buffers in it."""
        settling, self._after_window = self._after_window, False
        return settling

    def complete(self, *, trained: bool) -> None:
        """At the end, measure the missing windows in one.

        Args:
            trained: Whether this process has trained; if not, earlier measurements suffice.
        """
        missing = self._windows.missing or (WINDOWS if self.step_s is None else 0)
        if missing and (trained or self.step_s is None):
            while not self.take(missing / WINDOWS):
                missing = WINDOWS

    @property
    def step_s(self) -> float | None:
        """T_ceil, the mean of all windows; None before the first one."""
        timing = self._position.timing
        return timing.ceiling_s / timing.ceiling_steps if timing.ceiling_steps else None
