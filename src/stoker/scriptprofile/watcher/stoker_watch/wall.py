"""Where the process's wall time goes: imports, `fit`, validation, predict, callbacks, saving.

Each moment counts for the innermost of these that runs in the main thread, so no time counts
twice; the rest is the script's own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .places import NOWHERE, Place

EPOCH_HOOKS = ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end")
"""Methods of `keras.callbacks.Callback` that are rarely called between steps."""


class Wall:
    """Seconds by kind and line."""

    def __init__(self) -> None:
        self._spent: dict[tuple[str, Place], list[float]] = {}
        """Kind and line -> wall seconds, CPU seconds, calls."""
        self._open: list[list[Any]] = []
        """Key, start on both clocks, and the time of nested parts on both."""

    @contextmanager
    def part(self, kind: str, at: Place = NOWHERE) -> Iterator[None]:
        """Count the body as this kind; only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._open.append([(kind, at), time.monotonic(), time.process_time(), 0.0, 0.0])
        try:
            yield
        finally:
            key, begun_s, begun_cpu_s, inner_s, inner_cpu_s = self._open.pop()
            wall_s, cpu_s = time.monotonic() - begun_s, time.process_time() - begun_cpu_s
            spent = self._spent.setdefault(key, [0.0, 0.0, 0])
            spent[0] += wall_s - inner_s
            spent[1] += cpu_s - inner_cpu_s
            spent[2] += 1
            if self._open:
                self._open[-1][3] += wall_s
                self._open[-1][4] += cpu_s

    def told(self) -> dict[str, Any]:
        """As facts; open parts count up to now."""
        found = {key: list(spent) for key, spent in list(self._spent.items())}
        now_s, now_cpu_s = time.monotonic(), time.process_time()
        inner_s = inner_cpu_s = 0.0
        for key, begun_s, begun_cpu_s, closed_s, closed_cpu_s in reversed(list(self._open)):
            spent = found.setdefault(key, [0.0, 0.0, 0])
            spent[0] += now_s - begun_s - closed_s - inner_s
            spent[1] += now_cpu_s - begun_cpu_s - closed_cpu_s - inner_cpu_s
            spent[2] += 1
            inner_s, inner_cpu_s = now_s - begun_s, now_cpu_s - begun_cpu_s
        return {
            "total_s": _since_start_s(),
            "parts": [[kind, list(at), *spent] for (kind, at), spent in found.items()],
        }

    def forget(self) -> None:
        """Forget everything, because this is a forked child."""
        self._spent.clear()
        self._open.clear()

    def around_method(
        self, kind: Callable[[], str], where: Callable[[], Place]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a wrapper that counts a function as a part."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with self.part(kind(), where()):
                    return original(*args, **kwargs)

            return call

        return make


def _since_start_s() -> float:
    """Seconds since the process was started; see proc(5), field 22 of stat."""
    try:
        with open("/proc/self/stat") as stream:  # noqa: PTH123 - as in facts
            ticks = int(stream.read().rpartition(") ")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


WALL = Wall()
"""Of this process."""
