"""Steps with real data in a row, and the gaps that tf.data keeps between its elements."""

from __future__ import annotations

WINDOW_S = 0.3
"""Least length of a window of steps: long against a scheduler's slice (some ms)."""

MOST_WINDOW_CALLS = 90
"""Most calls of one: tf.data keeps the last 100 gaps."""

MOST_GAPS = 98
"""Of those that tf.data keeps."""

LEAST_WINDOW_CALLS = 4


class Window:
    """Steps with real data, one after the other."""

    def __init__(self) -> None:
        self.calls = self.latest_calls = 0
        self.seconds = self.latest_s = 0.0
        self._fresh = True

    def add(self, period_s: float) -> None:
        """Another step is done."""
        self.calls += 1
        self.seconds += period_s
        if self._fresh:
            # The gap before its input holds what came before the window.
            self._fresh = False
            return
        self.latest_calls += 1
        self.latest_s += period_s

    def pause(self) -> None:
        """An epoch has ended: what comes between is left out, and gaps are another iterator's."""
        self.latest_calls, self.latest_s, self._fresh = 0, 0.0, True

    def gap(self, gaps_us: list[float], per_call: int) -> tuple[float, float] | None:
        """Time between two elements, over its latest calls in a row, and their whole time."""
        elements = self.latest_calls * per_call
        if self.latest_calls < LEAST_WINDOW_CALLS or elements > min(len(gaps_us), MOST_GAPS):
            return None
        return sum(gaps_us[-elements:]) / 1e6, self.latest_s

    def is_full(self) -> bool:
        """Whether it is long enough, or as long as the gaps reach."""
        long_enough = self.seconds >= WINDOW_S and self.calls > LEAST_WINDOW_CALLS
        return long_enough or self.calls >= MOST_WINDOW_CALLS
