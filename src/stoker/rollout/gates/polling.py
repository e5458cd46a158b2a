"""Calls a service in a thread, so that reading the last answer does not wait for the service."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import replace

from stoker.rollout.gates.gates import GateResult, Verdict


class Poll:
    """Repeats a call at an interval; at most one thread runs it."""

    def __init__(
        self, name: str, *, every_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a poll; the first `look` starts the first call.

        Args:
            name: Name of the gate.
            every_s: Interval between two calls, seconds.
            clock: Returns monotonic time, seconds.
        """
        self._name, self._every_s, self._clock = name, every_s, clock
        self._lock = threading.Lock()
        self._about: Hashable = None
        self._asking = False
        self._next_s = 0.0
        self._heard_s = 0.0
        self._answer: GateResult | None = None

    def look(self, about: Hashable, ask: Callable[[], GateResult]) -> GateResult:
        """Return the last answer; start the next call if the interval has passed.

        Args:
            about: What the call is about; an answer about something else is not returned.
            ask: The call to make, which has a time limit.
        """
        now_s = self._clock()
        with self._lock:
            if about != self._about:
                self._about, self._answer = about, None
                self._heard_s = self._next_s = now_s
            if not self._asking and now_s >= self._next_s:
                self._asking, self._next_s = True, now_s + self._every_s
                name = f"stoker-gate-{self._name}"
                threading.Thread(
                    target=self._ask, args=(about, ask), name=name, daemon=True
                ).start()
            found = self._answer or GateResult.no_answer(self._name)
            if found.verdict is not Verdict.INCONCLUSIVE:
                return found
            return replace(found, silent_s=max(now_s - self._heard_s, 0.0))

    def _ask(self, about: Hashable, ask: Callable[[], GateResult]) -> None:
        answer = GateResult.no_answer(self._name, "internal error: see the log")
        try:
            answer = ask()
        finally:  # an unexpected exception ends the thread with a traceback; the next `look` starts the call again
            with self._lock:
                self._asking = False
                if about == self._about:
                    self._answer = answer
                    if answer.verdict is not Verdict.INCONCLUSIVE:
                        self._heard_s = self._clock()
