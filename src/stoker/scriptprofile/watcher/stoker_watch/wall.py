"""Splits the process's wall time: imports, `fit`, validation, predict, callbacks, saving.

Each moment counts for the innermost part that runs in the main thread, so no time counts
twice; the rest is the script's own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

from .places import NOWHERE, Place, of_code
from .watch import wrap

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

    def as_json(self) -> dict[str, Any]:
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
        with open("/proc/self/stat") as stream:  # noqa: PTH123 - importing pathlib slows the script's start
            ticks = int(stream.read().rpartition(") ")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


WALL = Wall()
"""Name of this process's part."""


HOOKS = ("on_batch_begin", "on_train_batch_begin", "on_batch_end", "on_train_batch_end")
"""Hooks of `keras.callbacks.Callback`."""


class BatchHooks:
    """Durations of the hooks of one `fit`."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str, Place], float] = {}
        """Class, hook and its line -> seconds."""
        self.counts = False
        """Whether steps count already: the first ones trace and compile."""
        self._thread = 0
        self._inside = False

    def watch(self, keras: Any, given: Any) -> None:
        """Time what these callbacks do for each batch.

        Args:
            keras: The module.
            given: The argument `callbacks` of `fit`.
        """
        global _current  # a hook belongs to the class, and does not know its fit
        self._thread, self._inside = get_ident(), False
        plain = keras.callbacks.Callback
        for callback in _flat(keras, given):
            for hook in HOOKS:
                found = getattr(type(callback), hook, None)
                if found is not None and found is not getattr(plain, hook):
                    wrap(type(callback), hook, partial(_timed, hook))
        _current = self

    def end(self) -> None:
        """The call of `fit` is over."""
        global _current
        _current = None

    def as_json(self) -> list[dict[str, Any]]:
        """As facts."""
        return [
            {"name": name, "hook": hook, "place": place, "seconds": seconds}
            for (name, hook, place), seconds in list(self.seconds.items())
        ]

    def call(self, original: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """Call a hook; hooks that it calls itself are not counted."""
        if not self.counts or self._inside or get_ident() != self._thread:
            return original(*args, **kwargs)
        self._inside, begun_s = True, time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            self._inside = False
            key = type(args[0]).__name__, name, of_code(getattr(original, "__code__", None))
            self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - begun_s


_current: BatchHooks | None = None
"""The hooks of the running `fit`."""


def _flat(keras: Any, given: Any) -> Iterator[Any]:
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    for each in given if isinstance(given, (list, tuple)) else [given]:
        if isinstance(each, keras.callbacks.Callback):
            yield each


def _timed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def hook(*args: Any, **kwargs: Any) -> Any:
        if _current is None:
            return original(*args, **kwargs)
        return _current.call(original, name, args, kwargs)

    return hook


_TASKS = "/proc/self/task"
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_CORES = {f"cpu{core}" for core in os.sched_getaffinity(0)}
"""The cores that this process may use."""


class Moment(NamedTuple):
    """Sums so far, seconds."""

    wall_s: float
    run_s: float
    """CPU time of the calling thread."""
    wait_s: float
    """Time that it waited for a core."""
    others_run_s: float
    """The same of all other threads of this process."""
    others_wait_s: float
    cores_busy_s: float
    """CPU time of all programs on the cores that this process may use."""
    own_s: float
    """CPU time of this process."""


def now() -> Moment | None:
    """The current sums; None if Linux does not record them. It takes 0.2 ms for 10 threads."""
    try:
        run_s, wait_s = _schedstat("/proc/thread-self")
        ran_s = waited_s = 0.0
        for thread in os.listdir(_TASKS):  # noqa: PTH208 - importing pathlib slows the script's start
            # A thread may end meanwhile.
            with suppress(OSError):
                each_run_s, each_wait_s = _schedstat(f"{_TASKS}/{thread}")
                ran_s, waited_s = ran_s + each_run_s, waited_s + each_wait_s
        busy_s = _cores_busy_s()
    except (OSError, ValueError, IndexError):
        return None
    others = (max(0.0, ran_s - run_s), max(0.0, waited_s - wait_s))
    return Moment(time.perf_counter(), run_s, wait_s, *others, busy_s, time.process_time())


def _schedstat(folder: str) -> tuple[float, float]:
    with open(f"{folder}/schedstat") as stream:  # noqa: PTH123 - as above
        run_ns, wait_ns, _ = stream.read().split()
    return int(run_ns) / 1e9, int(wait_ns) / 1e9


def _cores_busy_s() -> float:
    with open("/proc/stat") as stream:  # noqa: PTH123 - as above
        rows = [line.split() for line in stream if line.startswith("cpu")]
    # user, nice, system, irq, softirq
    kinds = (1, 2, 3, 6, 7)
    ticks = (int(row[kind]) for row in rows if row[0] in _CORES for kind in kinds)
    return sum(ticks) * _TICK_S


class Span(NamedTuple):
    """What other programs took of a time span; all zero if unknown."""

    wall_s: float = 0.0
    run_s: float = 0.0
    """CPU time of the calling thread."""
    wait_s: float = 0.0
    """Time that it waited for a core that another program had."""
    away_s: float = 0.0
    """The part of the wall time that other programs caused."""

    def away(self) -> float:
        """The share of its wall time, in [0, 1)."""
        return self.away_s / self.wall_s if self.wall_s > 0 else 0.0


class Load:
    """The load of this machine by other programs, since this process has been watched."""

    def __init__(self) -> None:
        self._begun: Moment | None = None
        self._began_session_s = 0.0
        self._helped = 1.0
        """CPU time of this process and of all processes of its command, by its own."""

    def begin(self) -> None:
        """Count from here."""
        self._begun, self._began_session_s = now(), _session_s()
        self._helped = 1.0

    def share_of_others(self, spent: Moment) -> float:
        """Of the busy time of all cores, the part that no process of the command took, in [0, 1]."""
        if spent.cores_busy_s <= 0:
            return 0.0
        return min(1.0, max(0.0, 1.0 - self._helped * spent.own_s / spent.cores_busy_s))

    def between(self, begun: Moment | None, ended: Moment | None) -> Span:
        """What other programs took between two moments of the same thread."""
        if begun is None or ended is None:
            return Span()
        spent = Moment(*(max(0.0, last - first) for first, last in zip(begun, ended, strict=True)))
        share = self.share_of_others(spent)
        wait_s, behind_s = spent.wait_s * share, spent.others_wait_s * share
        blocked_s = max(0.0, spent.wall_s - spent.run_s - spent.wait_s)
        if behind_s > 0:
            # Threads that it waits for have themselves waited: several at once, or in turn.
            behind_s = min(behind_s, blocked_s * behind_s / (spent.others_run_s + behind_s))
        away_s = min(wait_s + behind_s, max(0.0, spent.wall_s - spent.run_s))
        return Span(spent.wall_s, spent.run_s, wait_s, away_s)

    def as_json(self) -> dict[str, Any]:
        """As facts: how long threads of this process ran, and waited for a core that another program had."""
        ended = now()
        if self._begun is None or ended is None:
            return {}
        spent = Moment(*(b - a for a, b in zip(self._begun, ended, strict=True)))
        session_s = _session_s() - self._began_session_s
        self._helped = max(1.0, session_s / max(spent.own_s, _TICK_S))
        waited_s = max(0.0, spent.wait_s + spent.others_wait_s) * self.share_of_others(spent)
        return {"run_s": spent.own_s, "waited_s": waited_s}


def _session_s() -> float:
    """CPU time of all processes of this session, which is the command's, and of ended ones."""
    session, found = str(os.getsid(0)), 0
    for process in os.listdir("/proc"):  # noqa: PTH208 - as above
        if process.isdigit():
            with suppress(OSError, IndexError), open(f"/proc/{process}/stat") as stream:  # noqa: PTH123 - as above
                fields = stream.read().rpartition(") ")[2].split()
                if fields[3] == session:
                    found += sum(map(int, fields[11:15]))
    return found * _TICK_S


LOAD = Load()
"""Of this process."""
