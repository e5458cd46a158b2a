"""How busy the device is: U, the busy fraction, and W, the share of time spent waiting for input.

U = T_ceil / T_real. T_ceil: wall time of the same compiled step on one resident batch, measured in
a few windows between calls in the first epoch of each process. T_real: wall time of a step with real data,
synchronized only at the end of a call; the call after a window is left out, because the input could
fill its buffers during the window. W: the part of T_real that is blocked in next(iterator). They
differ: a pipeline that takes the CPU away from the step costs U and hardly any W, so both are
    reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from stoker.train.checkpoints.state import TrainingState

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
