"""Decides when the next checkpoint is due.

The cost of a checkpoint is the training time that is lost: the time in which training stands still,
and the slowdown of the steps that run while the checkpoint is written.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from stoker.train.config import CheckpointConfig

MIN_EVERY_S = 5.0
"""Minimum interval, seconds: to save less work than this is not worth the wear of the disk."""

MAX_EVERY_S = 1800.0
"""Maximum interval, seconds: a kill loses at most this much work, even if a checkpoint costs more."""

AIM = 0.8
"""Share of the permitted overhead that the interval aims at. The rest is a reserve: costs vary, and the
first checkpoint is due before any cost is known."""

USUAL_CALLS = 50
"""Number of newest calls whose median defines the usual step time; calls during which a checkpoint was
being written do not count."""

MIN_CALLS = 5
"""Minimum number of these calls; with fewer, the CPU time of writing is taken as the slowdown."""


class Cadence:
    """Decides by the clock or by the number of steps; with `auto`, by the cost of earlier checkpoints."""

    def __init__(
        self, config: CheckpointConfig, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Start counting.

        Args:
            config: The user's section.
            now_s: A monotonic clock.
        """
        self._config = config
        self._now_s = now_s
        self._saved_s = now_s()
        self._saved_step = 0
        self._costs_s: list[float] = []
        self._usual_s: deque[float] = deque(maxlen=USUAL_CALLS)
        self._beside_s, self._beside_steps = 0.0, 0

    @property
    def every_s(self) -> float:
        """Current interval between two checkpoints, seconds."""
        if self._config.every_s != "auto":
            return self._config.every_s
        if not self._costs_s:
            return MIN_EVERY_S
        # The mean is what the whole run pays; the last cost is used if costs have grown.
        cost_s = max(sum(self._costs_s) / len(self._costs_s), self._costs_s[-1])
        return min(MAX_EVERY_S, max(MIN_EVERY_S, cost_s / (AIM * self._config.max_overhead)))

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this many steps."""
        if self._config.every_steps is not None:
            return step - self._saved_step >= self._config.every_steps
        return self._now_s() - self._saved_s >= self.every_s

    def saved(self, step: int) -> None:
        """Record that a checkpoint of this step was handed over to the writer, or restored."""
        self._saved_step, self._saved_s = step, self._now_s()

    def trained(self, steps: int, wall_s: float, *, while_writing: bool) -> None:
        """Record the time of a call of several steps.

        Args:
            steps: Number of steps.
            wall_s: Wall time of the call, seconds.
            while_writing: Whether a checkpoint was being written when the call started.
        """
        if while_writing:
            self._beside_s += wall_s
            self._beside_steps += steps
        else:
            self._usual_s.append(wall_s / steps)

    def cost(self, *, stalled_s: float, cpu_s: float) -> None:
        """Record the cost of a written checkpoint.

        Args:
            stalled_s: Time in which training stood still, seconds.
            cpu_s: CPU time of writing, seconds.
        """
        slowed_s = cpu_s
        if self._beside_steps and len(self._usual_s) >= MIN_CALLS:
            usual_s = self._beside_steps * statistics.median(self._usual_s)
            slowed_s = max(0.0, self._beside_s - usual_s)
        self._beside_s, self._beside_steps = 0.0, 0
        self._costs_s.append(stalled_s + slowed_s)
