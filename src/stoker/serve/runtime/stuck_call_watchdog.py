"""Detects model calls (runs) that do not end.

TensorFlow cannot cancel a run. A model with a loop may run forever, so its runs have threads of their own; clients get
the answer, or an error at their deadline. A run that takes too long is stuck: every request that shares the run gets an
error, and another process must replace this one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

from stoker.serve.deadline import Deadline
from stoker.serve.errors import Code, ServeError
from stoker.serve.routing import Router

_log = logging.getLogger(__name__)

_MAX_IDLE = 32
"""Maximum number of idle threads that are kept for later runs."""

_LOOKS = 20
"""Number of checks within the time limit of a run."""

_LOOK_S = 0.5
"""Maximum time between two checks, seconds. Versions under rollout may have shorter time limits than others."""

_STOOD_STILL_S = 2.0
"""A check that is this late, seconds, means that the whole process stood still. This time does not count against
models."""

Work = Callable[[], None]

Owner = tuple[str, int]
"""The model and the version of a run."""


def stuck_error() -> ServeError:
    """Return the error for the clients of a run that will not end."""
    return ServeError(
        Code.DEADLINE_EXCEEDED,
        "Deadline exceeded: the model call takes longer than the server allows",
    )


class Runs(Protocol):
    """Watches the runs of a model."""

    def watched(self, on_overdue: Work) -> Watched:
        """Return a context manager for a run. `on_overdue` is called once if the run takes too long."""

    def start(self, work: Work) -> None:
        """Run a function in another thread, without waiting. The function must not raise."""

    def call(self, work: Callable[[], Any], deadline: Deadline) -> Any:
        """Run a function in another thread; return its result, or raise if the client's deadline passes first."""


class StuckCallWatchdog:
    """Watches the runs of all models; thread-safe."""

    def __init__(
        self,
        *,
        max_run_s: float,
        on_stuck: Callable[[], None] = lambda: None,
        router: Router | None = None,
    ) -> None:
        """Start the thread that watches.

        Args:
            max_run_s: Time limit of a run, seconds, above 0.
            on_stuck: Called once, for the first run that exceeds its limit.
            router: Has the time limits of versions under rollout, and is notified if a version exceeds its limit.
        """
        self._max_run_s = max_run_s
        self._on_stuck = on_stuck
        self._router = router
        self._stood_still_s = 0.0
        self._under_way: dict[int, tuple[float, Work, Owner | None, bool]] = {}
        self._idle: list[SimpleQueue[Work | None]] = []
        self._next = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.stuck = False
        self._watch = threading.Thread(target=self._look, name="stoker-runs", daemon=True)
        self._watch.start()

    def of_version(self, model: str, version: int) -> VersionRuns:
        """Return an object that watches the runs and the load of one version."""
        return VersionRuns(self, (model, version))

    def watched(self, on_overdue: Work, owner: Owner | None = None) -> Watched:
        """Return a context manager for a run. `on_overdue` is called once if the run takes too long."""
        return Watched(self, on_overdue, owner)

    def begin(self, on_overdue: Work, owner: Owner | None = None, *, loading: bool = False) -> int:
        """Record the start of a run or a load; return the number to pass to `end`."""
        began_s = self._now_s()
        with self._lock:
            self._next += 1
            self._under_way[self._next] = (began_s, on_overdue, owner, loading)
            return self._next

    def end(self, number: int) -> None:
        """Record the end of a run or a load."""
        with self._lock:
            self._under_way.pop(number, None)

    def start(self, work: Work) -> None:
        """Run a function in another thread, without waiting. The function must not raise."""
        with self._lock:
            thread = self._idle.pop() if self._idle else None
        if thread is None:
            thread = SimpleQueue()
            threading.Thread(
                target=self._serve, args=(thread,), name="stoker-run", daemon=True
            ).start()
        thread.put(work)

    def call(self, work: Callable[[], Any], deadline: Deadline, owner: Owner | None = None) -> Any:
        """Run a function in another thread; return its result, or raise if the client's deadline passes first.

        Raises:
            ServeError: the client no longer waits, or the run is stuck.
            Exception: the error that the function raised.
        """
        done = threading.Event()
        outcome: list[Any] = []

        def give_up() -> None:
            outcome.append(stuck_error())
            done.set()

        def run() -> None:
            with self.watched(give_up, owner):
                try:
                    outcome.append(work())
                except Exception as error:  # noqa: BLE001 - it is raised in the caller's thread
                    outcome.append(error)
            done.set()

        deadline.when_cancelled(done.set)
        self.start(run)
        left_s = deadline.left_s
        done.wait(min(left_s, threading.TIMEOUT_MAX) if left_s > 0 else 0.0)
        if not outcome:
            raise deadline.lost() or stuck_error()
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def close(self) -> None:
        """Stop watching, and end the idle threads."""
        self._ended.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for thread in idle:
            thread.put(None)

    def _serve(self, waiting: SimpleQueue[Work | None]) -> None:
        while (work := waiting.get()) is not None:
            try:
                work()
            except Exception:  # noqa: BLE001 - the thread is also needed for the next run
                _log.exception("a run failed because of a bug")
            del work  # drop the references before the next run
            with self._lock:
                if len(self._idle) >= _MAX_IDLE or self._ended.is_set():
                    return
                self._idle.append(waiting)

    def _look(self) -> None:
        every_s, looked_s = min(self._max_run_s / _LOOKS, _LOOK_S), time.monotonic()
        while not self._ended.wait(every_s):
            late_s = time.monotonic() - looked_s - every_s
            self._stood_still_s += late_s if late_s > _STOOD_STILL_S else 0.0
            looked_s = time.monotonic()
            overdue = self._overdue(self._now_s())
            for on_overdue, owner, loading, limit_s in overdue:
                of = "a model" if owner is None else f"{owner[0]} version {owner[1]}"
                does = "loading" if loading else "running"
                _log.error(
                    "%s has been %s for more than %g s and is considered stuck", of, does, limit_s
                )
                on_overdue()
                if self._router is not None and owner is not None:
                    self._router.hung(*owner, loading=loading)
            if overdue and not self.stuck:
                self.stuck = True
                self._on_stuck()

    def _overdue(self, now_s: float) -> list[tuple[Work, Owner | None, bool, float]]:
        """Remove the runs and loads that have exceeded their limits, and return each with its limit."""
        with self._lock:
            running = dict(self._under_way)
        found = []
        for number, (began_s, on_overdue, owner, loading) in running.items():
            limit_s = self._limit_s(owner, loading=loading)
            if now_s - began_s > limit_s:
                with self._lock:
                    ended = self._under_way.pop(number, None) is None
                if not ended:
                    found.append((on_overdue, owner, loading, limit_s))
        return found

    def _now_s(self) -> float:
        """Return the monotonic clock, minus the time during which this process stood still."""
        return time.monotonic() - self._stood_still_s

    def _limit_s(self, owner: Owner | None, *, loading: bool) -> float:
        of_all = math.inf if loading else self._max_run_s
        if self._router is None or owner is None:
            return of_all
        return min(of_all, self._router.max_run_s(*owner, loading=loading))


class VersionRuns:
    """Watches the runs and the load of one version."""

    def __init__(self, all_runs: StuckCallWatchdog, owner: Owner) -> None:
        self._all, self._owner = all_runs, owner

    def watched(self, on_overdue: Work) -> Watched:
        """See `Runs`."""
        return Watched(self._all, on_overdue, self._owner)

    def loading(self) -> Watched:
        """Return a context manager for the version's load: the load of a version under rollout has a time limit."""
        return Watched(self._all, _no_client_waits, self._owner, loading=True)

    def start(self, work: Work) -> None:
        """See `Runs`."""
        self._all.start(work)

    def call(self, work: Callable[[], Any], deadline: Deadline) -> Any:
        """See `Runs`."""
        return self._all.call(work, deadline, self._owner)


def _no_client_waits() -> None:
    """Do nothing: no client waits for a load."""


class Watched:
    """The context manager of a run or a load."""

    __slots__ = ("_loading", "_number", "_on_overdue", "_owner", "_runs")

    def __init__(
        self,
        runs: StuckCallWatchdog,
        on_overdue: Work,
        owner: Owner | None,
        *,
        loading: bool = False,
    ) -> None:
        """Create the context manager.

        Args:
            runs: The watchdog.
            on_overdue: Called if the run or load takes too long.
            owner: Model and version of the run; None: unknown.
            loading: Whether it is a load, not a run.
        """
        self._runs, self._on_overdue, self._owner, self._number = runs, on_overdue, owner, 0
        self._loading = loading

    def __enter__(self) -> None:
        """Start the run."""
        self._number = self._runs.begin(self._on_overdue, self._owner, loading=self._loading)

    def __exit__(self, *_: object) -> None:
        """End the run."""
        self._runs.end(self._number)
