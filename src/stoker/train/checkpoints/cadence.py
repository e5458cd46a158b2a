"""When the next checkpoint is due.

What one costs is what training loses by it: the time that it stands still, and the time that its
steps take longer while the checkpoint is written beside them.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from stoker.train.checkpoints.config import CheckpointConfig

LEAST_EVERY_S = 5.0
"""Shortest time between two: what is lost in it is not worth the disk's wear."""

MOST_EVERY_S = 1800.0
"""Longest time between two: more work than this is not lost, whatever a checkpoint costs."""

AIM = 0.8
"""Share of the permitted overhead that is aimed at: one checkpoint costs more than another, and the
first is due before any cost is known."""

USUAL_CALLS = 50
"""Calls with nothing written beside them, the newest, by which the usual time of a step is known,"""

LEAST_CALLS = 5
"""and fewest. Before there are so many the CPU time of writing stands for what it takes."""


class Cadence:
    """Decides from the clock or the step count; `auto` from what the checkpoints cost."""

    def __init__(
        self, config: CheckpointConfig, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin counting now.

        Args:
            config: How often.
            now_s: A clock that never jumps.
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
        """Seconds between two checkpoints, as it stands."""
        if self._config.every_s != "auto":
            return self._config.every_s
        if not self._costs_s:
            return LEAST_EVERY_S
        # The mean is what the whole run pays; the last one holds where they have grown dearer.
        cost_s = max(sum(self._costs_s) / len(self._costs_s), self._costs_s[-1])
        return min(MOST_EVERY_S, max(LEAST_EVERY_S, cost_s / (AIM * self._config.max_overhead)))

    def due(self, step: int) -> bool:
        """Whether a checkpoint should be written now that `step` steps are done."""
        if self._config.every_steps is not None:
            return step - self._saved_step >= self._config.every_steps
        return self._now_s() - self._saved_s >= self.every_s

    def saved(self, step: int) -> None:
        """A checkpoint of `step` was handed over, or gone on from: count from here."""
        self._saved_step, self._saved_s = step, self._now_s()

    def trained(self, steps: int, wall_s: float, *, beside: bool) -> None:
        """A call trained so many steps in so many seconds.

        Args:
            steps: How many.
            wall_s: Of all of them.
            beside: Whether a checkpoint was being written when it began.
        """
        if beside:
            self._beside_s += wall_s
            self._beside_steps += steps
        else:
            self._usual_s.append(wall_s / steps)

    def cost(self, *, stalled_s: float, cpu_s: float) -> None:
        """A checkpoint is written.

        Args:
            stalled_s: How long training stood still for it.
            cpu_s: CPU time of its writing.
        """
        slowed_s = cpu_s
        if self._beside_steps and len(self._usual_s) >= LEAST_CALLS:
            usual_s = self._beside_steps * statistics.median(self._usual_s)
            slowed_s = max(0.0, self._beside_s - usual_s)
        self._beside_s, self._beside_steps = 0.0, 0
        self._costs_s.append(stalled_s + slowed_s)
