"""Splits the process's wall time: imports, `fit`, validation, evaluate, predict, callbacks, saving.

Each moment counts for the innermost part that runs in the main thread, so no time counts twice. The rest of the time is
the script's own code.
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
"""Methods of `keras.callbacks.Callback` that are called once per epoch or training, not for each batch."""


class Wall:
    """Wall time and CPU time of the main thread's work, by kind and line."""

    def __init__(self) -> None:
        self._spent: dict[tuple[str, Place], list[float]] = {}
        """Kind and line -> wall seconds, CPU seconds, calls."""
        self._open: list[list[Any]] = []
        """The running parts, outermost first: key, wall and CPU time at the start, wall and CPU time of nested parts."""

    @contextmanager
    def part(self, kind: str, at: Place = NOWHERE) -> Iterator[None]:
        """Count the time of the `with` body as this kind; in other threads, do nothing."""
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
        """Return all parts as facts; running parts count up to now."""
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
        """Return a function that wraps a method so that its calls count as parts.

        Args:
            kind: Returns the kind of a call.
            where: Returns the line of a call.
        """

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
"""The wall time of this process."""


HOOKS = ("on_batch_begin", "on_train_batch_begin", "on_batch_end", "on_train_batch_end")
"""Methods of `keras.callbacks.Callback` that are called for each batch of the training."""


class BatchHooks:
    """Measures the time of the callbacks' batch hooks during one `fit`."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str, Place], float] = {}
        """Class, method, and line of the method -> seconds."""
        self.counts = False
        """Whether the warm-up is over; times before that do not count."""
        self._thread = 0
        self._inside = False

    def watch(self, keras: Any, given: Any) -> None:
        """Start to measure the time of the batch hooks of these callbacks.

        Args:
            keras: The module.
            given: The argument `callbacks` of `fit`.
        """
        global _current  # a wrapped method belongs to the callback's class, and does not know its `fit`
        self._thread, self._inside = get_ident(), False
        plain = keras.callbacks.Callback
        for callback in _flat(keras, given):
            for hook in HOOKS:
                found = getattr(type(callback), hook, None)
                if found is not None and found is not getattr(plain, hook):
                    wrap(type(callback), hook, partial(_timed, hook))
        _current = self

    def end(self) -> None:
        """Stop measuring: the call of `fit` is over."""
        global _current
        _current = None

    def as_json(self) -> list[dict[str, Any]]:
        """Return the times as facts."""
        return [
            {"name": name, "hook": hook, "place": place, "seconds": seconds}
            for (name, hook, place), seconds in list(self.seconds.items())
        ]

    def call(self, original: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """Call a method of a callback, and add its time; methods that it calls itself do not count again."""
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
"""The times of the running `fit`."""


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
    """The state of all clocks at one moment: sums since some start, seconds."""

    wall_s: float
    run_s: float
    """CPU time of the calling thread."""
    wait_s: float
    """Time that the calling thread waited for a core."""
    others_run_s: float
    """CPU time of all other threads of this process."""
    others_wait_s: float
    """Time that all other threads of this process waited for a core."""
    cores_busy_s: float
    """CPU time of all programs on the cores that this process may use."""
    own_s: float
    """CPU time of this process."""


def now() -> Moment | None:
    """Read all clocks; None if Linux does not record them. This takes 0.2 ms for 10 threads."""
    try:
        run_s, wait_s = _schedstat("/proc/thread-self")
        ran_s = waited_s = 0.0
        for thread in os.listdir(_TASKS):  # noqa: PTH208 - importing pathlib slows the script's start
            # A thread may have ended since the list was read.
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
    # Columns of /proc/stat: user, nice, system, irq, softirq.
    kinds = (1, 2, 3, 6, 7)
    ticks = (int(row[kind]) for row in rows if row[0] in _CORES for kind in kinds)
    return sum(ticks) * _TICK_S


class Span(NamedTuple):
    """A time span, and how much of it other programs took, seconds; all zero if unknown."""

    wall_s: float = 0.0
    run_s: float = 0.0
    """CPU time of the calling thread."""
    wait_s: float = 0.0
    """Time that the calling thread waited for a core that another program used."""
    away_s: float = 0.0
    """The part of the wall time that other programs caused."""

    def away(self) -> float:
        """`away_s` as a share of the wall time, in [0, 1]."""
        return self.away_s / self.wall_s if self.wall_s > 0 else 0.0


class Load:
    """The load on this machine from other programs since Stoker began to watch this process."""

    def __init__(self) -> None:
        self._begun: Moment | None = None
        self._began_session_s = 0.0
        self._helped = 1.0
        """CPU time of all processes of the command, divided by that of this process; at least 1."""

    def begin(self) -> None:
        """Start to count from now."""
        self._begun, self._began_session_s = now(), _session_s()
        self._helped = 1.0

    def share_of_others(self, spent: Moment) -> float:
        """Share of the busy time of all cores that was taken by other programs than the command, in [0, 1]."""
        if spent.cores_busy_s <= 0:
            return 0.0
        return min(1.0, max(0.0, 1.0 - self._helped * spent.own_s / spent.cores_busy_s))

    def between(self, begun: Moment | None, ended: Moment | None) -> Span:
        """Return how much time other programs took between two moments of the same thread."""
        if begun is None or ended is None:
            return Span()
        spent = Moment(*(max(0.0, last - first) for first, last in zip(begun, ended, strict=True)))
        share = self.share_of_others(spent)
        wait_s, behind_s = spent.wait_s * share, spent.others_wait_s * share
        blocked_s = max(0.0, spent.wall_s - spent.run_s - spent.wait_s)
        if behind_s > 0:
            # While this thread was blocked, other threads of the process worked and waited for cores. Of the
            # blocked time, only the share that they waited is due to other programs.
            behind_s = min(behind_s, blocked_s * behind_s / (spent.others_run_s + behind_s))
        away_s = min(wait_s + behind_s, max(0.0, spent.wall_s - spent.run_s))
        return Span(spent.wall_s, spent.run_s, wait_s, away_s)

    def as_json(self) -> dict[str, Any]:
        """Return, as facts, how long this process's threads ran, and waited for cores that other programs used."""
        ended = now()
        if self._begun is None or ended is None:
            return {}
        spent = Moment(*(b - a for a, b in zip(self._begun, ended, strict=True)))
        session_s = _session_s() - self._began_session_s
        self._helped = max(1.0, session_s / max(spent.own_s, _TICK_S))
        waited_s = max(0.0, spent.wait_s + spent.others_wait_s) * self.share_of_others(spent)
        return {"run_s": spent.own_s, "waited_s": waited_s}


def _session_s() -> float:
    """CPU time of all processes of the command (they share its session), with their ended children, seconds."""
    session, found = str(os.getsid(0)), 0
    for process in os.listdir("/proc"):  # noqa: PTH208 - as above
        if process.isdigit():
            with suppress(OSError, IndexError), open(f"/proc/{process}/stat") as stream:  # noqa: PTH123 - as above
                fields = stream.read().rpartition(") ")[2].split()
                if fields[3] == session:
                    found += sum(map(int, fields[11:15]))
    return found * _TICK_S


LOAD = Load()
"""The load from other programs since Stoker began to watch this process."""
