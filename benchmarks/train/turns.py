"""Contestants in one process that run in turn: each has a thread, and one of them moves at a time.

A loop that calls back after some steps is stopped there until it is its turn again. So windows of
tenths of a second stand side by side, and whatever else the machine does hits all of them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

AfterSteps = Callable[[int], None]
"""What a loop has to call with the steps that it has done; it may not return for long."""


class StoppedError(Exception):
    """The contest is over: raised in the loop, which does not catch it."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a window took."""

    wall_s: float
    cpu_s: float


class Contestant:
    """A loop that runs on request."""

    def __init__(self, run: Callable[[AfterSteps], None]) -> None:
        """Wait to be started.

        Args:
            run: The loop.
        """
        self._run = run
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._target, self._over, self._ended = 0, False, False
        self._outcome: Future[None] = Future()
        # A daemon: if one contestant fails, the process does not wait for the others.
        threading.Thread(target=self._work, daemon=True).start()

    def advance(self, steps: int) -> Cost:
        """Let it do some more steps.

        Raises:
            Exception: what the loop raised.
        """
        self._target += steps
        cpu_s, wall_s = _cpu_s(), time.monotonic()
        self._go.release()
        self._done.acquire()
        cost = Cost(wall_s=time.monotonic() - wall_s, cpu_s=_cpu_s() - cpu_s)
        if self._ended:
            self._outcome.result()
            raise RuntimeError("a loop must go on until it is stopped")
        return cost

    def stop(self) -> None:
        """End the loop."""
        self._over = True
        self._go.release()
        with contextlib.suppress(StoppedError):
            self._outcome.result()

    def _work(self) -> None:
        self._go.acquire()
        try:
            if not self._over:
                self._run(self._after)
            self._outcome.set_result(None)
        except Exception as error:  # noqa: BLE001 - it is raised where somebody waits for it
            self._outcome.set_exception(error)
        self._ended = True
        self._done.release()

    def _after(self, steps: int) -> None:
        if steps < self._target:
            return
        self._done.release()
        self._go.acquire()
        if self._over:
            raise StoppedError


def _cpu_s() -> float:
    return sum(os.times()[:2])
