"""When the next checkpoint is due."""

from __future__ import annotations

import time
from collections.abc import Callable

from stoker.train.checkpoints.config import CheckpointConfig

LEAST_EVERY_S = 5.0
"""Shortest time between two: what is lost in it is not worth the disk's wear."""

MOST_EVERY_S = 1800.0
"""Longest time between two: more work than this is not lost, whatever a checkpoint costs."""


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

    @property
    def every_s(self) -> float:
        """Seconds between two checkpoints, as it stands."""
        if self._config.every_s != "auto":
            return self._config.every_s
        if not self._costs_s:
            return LEAST_EVERY_S
        # The mean is what the whole run pays; the last one holds where they have grown dearer.
        cost_s = max(sum(self._costs_s) / len(self._costs_s), self._costs_s[-1])
        return min(MOST_EVERY_S, max(LEAST_EVERY_S, cost_s / self._config.max_overhead))

    def due(self, step: int) -> bool:
        """Whether a checkpoint should be written now that `step` steps are done."""
        if self._config.every_steps is not None:
            return step - self._saved_step >= self._config.every_steps
        return self._now_s() - self._saved_s >= self.every_s

    def saved(self, step: int) -> None:
        """A checkpoint of `step` was handed over, or gone on from: count from here."""
        self._saved_step, self._saved_s = step, self._now_s()

    def cost(self, cost_s: float) -> None:
        """What one checkpoint took from training, seconds: stall and CPU time of its writing."""
        self._costs_s.append(cost_s)
