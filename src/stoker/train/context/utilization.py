"""Measures how busy the device is: U, the busy fraction, and W, the share of time spent waiting for input.

U = T_ceil / T_real. T_ceil (the ceiling) is the wall time of the compiled step on a batch that stays in
memory, the resident batch. It is measured in a few windows between calls, in the first epoch of each
process. T_real is the wall time of the same step with real input, synchronized only at the end of a call.
The call after a window does not count, because the input could fill its buffers during the window.

W is the part of T_real in which the step is blocked in next(iterator). Both are reported, because they
differ: a pipeline that takes the CPU away from the step lowers U, but hardly changes W.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from stoker.train.checkpoints.state import TrainingState
from stoker.train.context.position import Position

CEILING_S = 0.5
"""Total time of all windows that measure the ceiling, seconds: much longer than a time slice of the
scheduler (some ms). The mean of the windows is used, as for real steps, because other work on the machine
slows both. If the best window were used, U would blame the input for that work."""

WINDOWS = 4
"""Number of windows per process: several, so that a temporary load does not decide the result."""

FIXED_STEPS = 5
"""Number of steps in a window that several workers measure together."""

RunResident = Callable[[Any, tf.Tensor], tf.Tensor]
"""Type of the result of `make_run_resident`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BusyReport:
    """U and W of one training run."""

    ceiling_step_s: float
    """T_ceil, the time per step on the resident batch, mean of all windows, seconds."""

    ceiling_rows: float
    """Number of rows of the resident batch."""

    real_step_s: float
    """T_real, the time per step with real input, without the first call and calls after a window, seconds."""

    real_rows: float
    """Mean number of rows of a real step: an epoch's last batch may be shorter."""

    input_wait: float
    """W, the share of the time spent waiting for input, from 0 to 1."""

    @property
    def busy_fraction(self) -> float:
        """U, computed from times per row; values above 1 are measurement noise."""
        return (self.ceiling_step_s / self.ceiling_rows) / (self.real_step_s / self.real_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """The time of steps on a resident batch."""

    steps: int
    wall_s: float

    @property
    def step_s(self) -> float:
        """Time per step, seconds."""
        return self.wall_s / self.steps


def measure_ceiling(
    run_resident: RunResident,
    element: Any,
    *,
    state: TrainingState,
    seconds: float,
    steps: int | None = None,
) -> Ceiling:
    """Measure the time of steps on a resident batch, and restore the model.

    Args:
        run_resident: The result of `make_run_resident`.
        element: An element of the feed, which every step gets.
        state: All variables that a step can change.
        seconds: Approximate measuring time, seconds.
        steps: Number of steps; by default as many as fit in the time. Several workers must all run
            the same number.
    """
    saved = state.capture()
    try:
        # The first call traces the function if necessary, and fills the caches with batch and weights.
        run_resident(element, tf.constant(1, tf.int64)).numpy()
        if steps is None:
            steps = max(2, int(seconds / _timed(run_resident, element, 2) * 2))
        return Ceiling(steps=steps, wall_s=_timed(run_resident, element, steps))
    finally:
        state.restore(saved)


def _timed(run_resident: RunResident, element: Any, steps: int) -> float:
    begun_s = time.monotonic()
    run_resident(element, tf.constant(steps, tf.int64)).numpy()
    return time.monotonic() - begun_s


MIN_GAP = 3
"""Minimum number of calls between two windows. The first of them is not timed, because it follows a
window."""

FIRST_AFTER = 2
"""Number of calls before the first window: the first one compiles, the second one fills caches."""

Measure = Callable[[float], Ceiling | None]
"""Share of the usual measuring time -> time of steps on a resident batch. None if memory ran out: the step
was then replaced by a smaller one."""


class CeilingWindows:
    """Decides after which calls of a process the ceiling is measured."""

    def __init__(self) -> None:
        self._calls = self._count = self._next = 0
        self.restart()

    def restart(self) -> None:
        """Start over, because the step has changed."""
        self._calls, self._count, self._next = 0, 0, FIRST_AFTER

    @property
    def missing(self) -> int:
        """Number of windows that have not been measured yet."""
        return WINDOWS - self._count

    def due(self, calls_left: int) -> bool:
        """Return whether to measure a window after the call that has just ended; if so, count the window.

        Args:
            calls_left: Number of remaining calls of this epoch.
        """
        self._calls += 1
        if not self.missing or self._calls < self._next:
            return False
        self._count += 1
        # Spread windows over the rest of the epoch, so that their conditions are those of the real calls.
        self._next = self._calls + max(MIN_GAP, calls_left // (self.missing + 1))
        return True


class RunCeiling:
    """The ceiling of a run's step, stored in the run's position."""

    def __init__(self, position: Position, measure: Measure) -> None:
        """Start without measurements.

        Args:
            position: The run's position.
            measure: Measures the time of steps, and leaves the model unchanged.
        """
        self._position, self._measure = position, measure
        self._windows, self._after_window = CeilingWindows(), False

    def restart(self) -> None:
        """Drop all measurements, because the step has changed."""
        self._windows.restart()
        self._position.timing.ceiling_s, self._position.timing.ceiling_steps = 0.0, 0

    def due(self, steps_per_call: int) -> bool:
        """Return whether to measure the ceiling now, after a call."""
        left = self._position.per_epoch - self._position.in_epoch
        return self._windows.due(left // steps_per_call)

    def take(self, share: float = 1 / WINDOWS) -> bool:
        """Measure a window, and add it to the position; return False if the step did not fit in memory."""
        found = self._measure(share)
        if found is None:
            return False
        self._position.timing.ceiling_s += found.wall_s
        self._position.timing.ceiling_steps += found.steps
        self._after_window = True
        return True

    def follows_window(self) -> bool:
        """Return whether the call that has ended followed a window. During a window, the input fills its buffers."""
        settling, self._after_window = self._after_window, False
        return settling

    def complete(self, *, trained: bool) -> None:
        """At the end of a run, measure all missing windows as a single one.

        Args:
            trained: Whether this process has trained; if not, earlier measurements are enough.
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
