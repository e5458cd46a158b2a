"""The deadline of a request, and whether its client is still connected."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from stoker.serve.errors import Code, ServeError
from stoker.serve.request_record import RequestRecord


class Deadline:
    """A deadline, and whether the client has disconnected. Threads may share it.

    `record` collects facts about the request for the log and the metrics.
    """

    def __init__(self, timeout_s: float = math.inf) -> None:
        """Args: timeout_s: seconds from now to the deadline."""
        self._deadline_s = time.monotonic() + timeout_s
        self.record = RequestRecord(patience_s=timeout_s)
        self._cancelled = False
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; infinite without a deadline, negative if it has passed."""
        return self._deadline_s - time.monotonic()

    def cancel(self) -> None:
        """Mark the client as gone, and run the registered callbacks in this thread."""
        with self._lock:
            self._cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        """Register a callback that runs once when the client is gone; it runs now if the client is gone already."""
        with self._lock:
            if not self._cancelled:
                self._callbacks.append(callback)
                return
        callback()

    def lost(self) -> ServeError | None:
        """Return the error for a deadline that has passed or a client that is gone; None if the client still waits."""
        if self._cancelled:
            return ServeError(Code.CANCELLED, "The client cancelled the request")
        if self.left_s <= 0:
            return ServeError(Code.DEADLINE_EXCEEDED, "Deadline exceeded before the model ran")
        return None

    def check(self) -> None:
        """Raise if the deadline has passed or the client is gone.

        Raises:
            ServeError: the error that `lost` returns.
        """
        lost = self.lost()
        if lost is not None:
            raise lost
