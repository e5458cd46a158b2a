"""How busy the device is: U, the busy fraction, and W, the share of time spent waiting for input.

U = T_ceil / T_real. T_ceil: wall time of the same compiled step on one resident batch, measured
before and after training. T_real: wall time of a step with real data, synchronised only where a
call ends. W: the part of T_real that is blocked in next(iterator). They differ: a pipeline that
takes the CPU away from the step costs U and hardly any W, so both are reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from stoker.train.state import TrainingState

CEILING_S = 0.5
"""Time over which the ceiling is measured, before and again after training: long against a
scheduler's slice (some ms). Its mean is taken, as that of the real steps is: what else the machine
does slows both, and the best of several windows would blame the input for it."""


FIXED_STEPS = 20
"""Steps of a ceiling that several workers measure together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BusyReport:
    """U and W of one training run."""

    ceiling_step_s: float
    """T_ceil, seconds a step; the mean of before and after."""

    ceiling_rows: float
    """Rows of the resident batch."""

    real_step_s: float
    """T_real, seconds a step, tracing and the first call left out."""

    real_rows: float
    """Rows of a real step, mean: an epoch's last batch may be short."""

    input_wait: float
    """W, a share in [0, 1]."""

    @property
    def busy_fraction(self) -> float:
        """U by row: about 1 at most; what is above 1 is the noise of the measurement."""
        return (self.ceiling_step_s / self.ceiling_rows) / (self.real_step_s / self.real_rows)


def measure_ceiling(
    run_resident: Callable[[Any, tf.Tensor], tf.Tensor],
    element: Any,
    *,
    state: TrainingState,
    steps: int | None = None,
) -> float:
    """Seconds a step on one resident batch; the model is put back as it was.

    Args:
        run_resident: What `make_run_resident` made.
        element: The element of a step; it is the whole input of every step.
        state: Every variable that a step can change.
        steps: How many are taken; by default as many as fill `CEILING_S`. Several workers have to
            take equally many.
    """
    saved = state.capture()
    try:
        # The first call traces and warms up, the second says how many steps fill the time.
        run_resident(element, tf.constant(1, tf.int64)).numpy()
        if steps is None:
            steps = max(2, int(CEILING_S / _timed(run_resident, element, 2) * 2))
        return _timed(run_resident, element, steps) / steps
    finally:
        state.restore(saved)


def _timed(run_resident: Callable[[Any, tf.Tensor], tf.Tensor], element: Any, steps: int) -> float:
    begun_s = time.monotonic()
    run_resident(element, tf.constant(steps, tf.int64)).numpy()
    return time.monotonic() - begun_s
