"""How busy the device is: U, the busy fraction, and W, the share of time spent waiting for input.

U = T_ceil / T_real. T_ceil: wall time of the same compiled step on one resident batch, measured in
a few windows between calls in the first epoch of each process. T_real: wall time of a step with real data,
synchronized only at the end of a call; the call after a window is left out, because the input could
fill its buffers during the window. W: the part of T_real that is blocked in next(iterator). They
differ: a pipeline that takes the CPU away from the step costs U and hardly any W, so both are reported.
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
"""Total time of all windows that measure the ceiling: long compared with a scheduler's slice (some
ms). The mean is used, as for the real steps, because other work on the machine slows both; with the
best of several windows, U would blame the input for it."""

WINDOWS = 4
"""Windows per process: a temporary load on the machine should not decide the result."""

FIXED_STEPS = 5
"""Steps in a window that several workers measure together."""

RunResident = Callable[[Any, tf.Tensor], tf.Tensor]
"""A function from `make_run_resident`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BusyReport:
    """U and W of one training run."""

    ceiling_step_s: float
    """T_ceil, seconds per step; the mean of all windows."""

    ceiling_rows: float
    """Rows of the batch in memory."""

    real_step_s: float
    """T_real, seconds per step, without tracing, the first call and calls after a window."""

    real_rows: float
    """Mean rows of a real step: an epoch's last batch may be shorter."""

    input_wait: float
    """W, share from 0 to 1."""

    @property
    def busy_fraction(self) -> float:
        """U per row: at most about 1; values above 1 are measurement noise."""
        return (self.ceiling_step_s / self.ceiling_rows) / (self.real_step_s / self.real_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """The time of steps on a resident batch."""

    steps: int
    wall_s: float

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.wall_s / self.steps


def measure_ceiling(
    run_resident: RunResident,
    element: Any,
    *,
    state: TrainingState,
    seconds: float,
    steps: int | None = None,
) -> Ceiling:
    """Time steps on one resident batch, and restore the model.

    Args:
        run_resident: From `make_run_resident`.
        element: The element of a step; every step gets it.
        state: Every variable that a step can change.
        seconds: Approximate measuring time.
        steps: Number of steps; by default as many as fill the time. Several workers have to run
            the same number.
    """
    saved = state.capture()
    try:
        # The first call traces if necessary, and brings the batch and the weights into the caches.
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
        self._next = self._calls + max(MIN_GAP, calls_left // (self.missing + 1))
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
