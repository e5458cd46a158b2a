"""Measures a period of training and computes the metrics while steps arrive."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from stoker.telemetry import catalogue
from stoker.train.parameter_server.server import PassTotals

_NOTHING = PassTotals(batches=0, repeated=0, rows=0.0, loss_sum=0.0, not_finite=-1)


class Meter:
    """The clock of a period of steps, on the chief."""

    def __init__(self) -> None:
        """Start."""
        self._begun_s = self._reported_s = time.monotonic()
        self._reported, self._reported_wait_s = _NOTHING, 0.0
        self.wait_s = 0.0
        """Time blocked in next(iterator), seconds."""

    @property
    def wall_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begun_s

    def next_of(self, iterator: Iterator[Any]) -> Any:
        """Return the next element; the wait for it is counted."""
        asked_s = time.monotonic()
        element = next(iterator)
        self.wait_s += time.monotonic() - asked_s
        return element

    def scalars(self, taken: PassTotals, *, every_s: float) -> dict[str, float]:
        """Return loss and rates since the last report; empty if it is too recent.

        Args:
            taken: Totals since the start.
            every_s: Shortest interval between two reports, seconds.
        """
        now_s = time.monotonic()
        wall_s, steps = now_s - self._reported_s, taken.batches - self._reported.batches
        if not steps or wall_s < every_s:
            return {}
        rows = taken.rows - self._reported.rows
        found = {
            "loss": (taken.loss_sum - self._reported.loss_sum) / rows,
            catalogue.STEP_TIME_S.name: wall_s / steps,
            catalogue.SAMPLES_PER_S.name: rows / wall_s,
            catalogue.INPUT_WAIT.name: min(1.0, (self.wait_s - self._reported_wait_s) / wall_s),
        }
        self._reported, self._reported_s, self._reported_wait_s = taken, now_s, self.wait_s
        return found
