"""A thread pool that counts work which waits for a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_OF_THREAD = threading.local()


def take_waited_s() -> float:
    """Return how long the work of this thread waited for a thread, seconds.

    0 in later calls for the same work, and in threads outside of a pool.
    """
    waited_s: float = getattr(_OF_THREAD, "waited_s", 0.0)
    _OF_THREAD.waited_s = 0.0
    return waited_s


class CountedThreads(ThreadPoolExecutor):
    """A pool of threads that reports the amount of submitted work that has not begun."""

    def __init__(self, workers: int, name: str, *, on_change: Callable[[float], object]) -> None:
        """Create the pool.

        Args:
            workers: Maximum number of threads.
            name: Beginning of the threads' names.
            on_change: Called with 1 when work is submitted, and with -1 when it begins or is canceled.
        """
        super().__init__(workers, thread_name_prefix=name)
        self._on_change = on_change
        on_change(0.0)  # creates the metric's series before the first request

    def submit(self, work: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> Future[T]:
        """Queue work for a thread."""
        submitted_s = time.monotonic()

        def begin() -> T:
            self._on_change(-1.0)
            _OF_THREAD.waited_s = time.monotonic() - submitted_s
            return work(*args, **options)

        self._on_change(1.0)
        try:
            future = super().submit(begin)
        except RuntimeError:  # the pool was shut down
            self._on_change(-1.0)
            raise
        future.add_done_callback(self._after)
        return future

    def _after(self, future: Future[T]) -> None:
        if future.cancelled():  # canceled before it began
            self._on_change(-1.0)
