"""Tracks the model calls in progress, how long they have run, and which threads are stuck in one.

TensorFlow ends no run before its time. A model that loops may never end at all, so it runs in a thread
of its own that its clients do not wait in: they get their answer, or that their time is over. A run
that takes too long is stuck: every request that shares it gets an error, and the process must make room for another.
"""

from __future__ import annotations

import logging
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
"""Threads that are kept for the next run."""

_LOOKS = 20
"""How many looks at the clock fall into the longest time of a run."""

_LOOK_S = 0.5
"""Longest time between two looks, seconds: a version under rollout has a shorter longest run."""

_STOOD_STILL_S = 2.0
"""A look that comes this much later means that the process stood still, seconds: no fault of a model."""

Work = Callable[[], None]

Owner = tuple[str, int]
"""The model and the version of a run."""


def stuck_error() -> ServeError:
    """Return the error for the clients of a run that will not end."""
    return ServeError(
        Code.DEADLINE_EXCEEDED, "Deadline exceeded: the model runs longer than any call may"
    )


class Runs(Protocol):
    """What a model's calls are watched by."""

    def watched(self, on_overdue: Work) -> Watched:
        """A run lasts as long as the context; `on_overdue` is called once where that is too long."""

    def start(self, work: Work) -> None:
        """Do something in another thread, at once; what it raises is a bug."""

    def call(self, work: Callable[[], Any], deadline: Deadline) -> Any:
        """The result of a run in another thread, for as long as the client waits."""


class StuckCallWatchdog:
    """Watches over runs; may be used by many threads."""

    def __init__(
        self,
        *,
        max_run_s: float,
        on_stuck: Callable[[], None] = lambda: None,
        router: Router | None = None,
    ) -> None:
        """Start to watch.

        Args:
            max_run_s: longest run, seconds, above 0.
            on_stuck: called once, for the first run that takes longer.
            router: knows the longest run of a version under rollout, and hears which version takes longer.
        """
        self._max_run_s = max_run_s
        self._on_stuck = on_stuck
        self._router = router
        self._stood_still_s = 0.0
        self._under_way: dict[int, tuple[float, Work, Owner | None]] = {}
        self._idle: list[SimpleQueue[Work | None]] = []
        self._next = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.stuck = False
        self._watch = threading.Thread(target=self._look, name="stoker-runs", daemon=True)
        self._watch.start()

    def of_version(self, model: str, version: int) -> Runs:
        """The same for the runs of one version."""
        return _VersionRuns(self, (model, version))

    def watched(self, on_overdue: Work, owner: Owner | None = None) -> Watched:
        """A run lasts as long as the context; `on_overdue` is called once where that is too long."""
        return Watched(self, on_overdue, owner)

    def begin(self, on_overdue: Work, owner: Owner | None = None) -> int:
        """A run begins; the number that it ends by."""
        began_s = self._now_s()
        with self._lock:
            self._next += 1
            self._under_way[self._next] = (began_s, on_overdue, owner)
            return self._next

    def end(self, number: int) -> None:
        """A run has ended."""
        with self._lock:
            self._under_way.pop(number, None)

    def start(self, work: Work) -> None:
        """Do something in another thread, at once; what it raises is a bug."""
        with self._lock:
            thread = self._idle.pop() if self._idle else None
        if thread is None:
            thread = SimpleQueue()
            threading.Thread(
                target=self._serve, args=(thread,), name="stoker-run", daemon=True
            ).start()
        thread.put(work)

    def call(self, work: Callable[[], Any], deadline: Deadline, owner: Owner | None = None) -> Any:
        """The result of a run in another thread, for as long as the client waits.

        Raises:
            ServeError: the client waits no longer, or the run is stuck.
            Exception: what it raised.
        """
        told = threading.Event()
        outcome: list[Any] = []

        def give_up() -> None:
            outcome.append(stuck_error())
            told.set()

        def run() -> None:
            with self.watched(give_up, owner):
                try:
                    outcome.append(work())
                except Exception as error:  # noqa: BLE001 - it is raised in the thread of its owner
                    outcome.append(error)
            told.set()

        deadline.when_cancelled(told.set)
        self.start(run)
        left_s = deadline.left_s
        told.wait(min(left_s, threading.TIMEOUT_MAX) if left_s > 0 else 0.0)
        if not outcome:
            raise deadline.lost() or stuck_error()
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def close(self) -> None:
        """Watch no more, and let the idle threads end."""
        self._ended.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for thread in idle:
            thread.put(None)

    def _serve(self, waiting: SimpleQueue[Work | None]) -> None:
        while (work := waiting.get()) is not None:
            try:
                work()
            except Exception:  # noqa: BLE001 - the thread is for the next run too
                _log.exception("a run met a bug")
            del work  # what it holds is not held until the next
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
            for tell, owner, limit_s in overdue:
                of = "a model" if owner is None else f"{owner[0]} version {owner[1]}"
                _log.error("%s has run for more than %g s, and is taken for stuck", of, limit_s)
                tell()
                if self._router is not None and owner is not None:
                    self._router.hung(*owner)
            if overdue and not self.stuck:
                self.stuck = True
                self._on_stuck()

    def _overdue(self, now_s: float) -> list[tuple[Work, Owner | None, float]]:
        """Take out the runs that last too long, each with its longest time."""
        with self._lock:
            running = dict(self._under_way)
        found = []
        for number, (began_s, tell, owner) in running.items():
            limit_s = self._limit_s(owner)
            if now_s - began_s > limit_s:
                with self._lock:
                    ended = self._under_way.pop(number, None) is None
                if not ended:
                    found.append((tell, owner, limit_s))
        return found

    def _now_s(self) -> float:
        """The monotonic clock without the time in which this process stood still."""
        return time.monotonic() - self._stood_still_s

    def _limit_s(self, owner: Owner | None) -> float:
        if self._router is None or owner is None:
            return self._max_run_s
        return min(self._max_run_s, self._router.max_run_s(*owner))


class _VersionRuns:
    """The runs of one version."""

    def __init__(self, all_runs: StuckCallWatchdog, owner: Owner) -> None:
        self._all, self._owner = all_runs, owner

    def watched(self, on_overdue: Work) -> Watched:
        return Watched(self._all, on_overdue, self._owner)

    def start(self, work: Work) -> None:
        self._all.start(work)

    def call(self, work: Callable[[], Any], deadline: Deadline) -> Any:
        return self._all.call(work, deadline, self._owner)


class Watched:
    """The context of a run."""

    __slots__ = ("_number", "_on_overdue", "_owner", "_runs")

    def __init__(self, runs: StuckCallWatchdog, on_overdue: Work, owner: Owner | None) -> None:
        """Args: runs: what watches; on_overdue: called where it takes too long; owner: whose run."""
        self._runs, self._on_overdue, self._owner, self._number = runs, on_overdue, owner, 0

    def __enter__(self) -> None:
        """It begins."""
        self._number = self._runs.begin(self._on_overdue, self._owner)

    def __exit__(self, *_: object) -> None:
        """It ends."""
        self._runs.end(self._number)
