"""How long a client waits for its answer, and whether it still does."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from stoker.serve.errors import Code, ServeError
from stoker.serve.request_record import Trail


class Patience:
    """A deadline, and the news that the client has gone; may be shared by threads.

    What becomes known of his request meanwhile is in `trail`.
    """

    def __init__(self, timeout_s: float = math.inf) -> None:
        """Args: timeout_s: seconds from now after which nobody waits for the answer."""
        self._deadline_s = time.monotonic() + timeout_s
        self.trail = Trail()
        self._cancelled = False
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def left_s(self) -> float:
        """Seconds to the deadline, infinite where there is none, negative when it has passed."""
        return self._deadline_s - time.monotonic()

    def cancel(self) -> None:
        """The client has gone: whoever asked to be told is told, in this thread."""
        with self._lock:
            self._cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        """Be told once; at once if the client has gone already."""
        with self._lock:
            if not self._cancelled:
                self._callbacks.append(callback)
                return
        callback()

    def lost(self) -> ServeError | None:
        """Why nobody waits any more; None while somebody does."""
        if self._cancelled:
            return ServeError(Code.CANCELLED, "The client cancelled the request")
        if self.left_s <= 0:
            return ServeError(Code.DEADLINE_EXCEEDED, "Deadline exceeded before the model ran")
        return None

    def check(self) -> None:
        """Go on only while somebody waits.

        Raises:
            ServeError: the deadline has passed, or the client has gone.
        """
        lost = self.lost()
        if lost is not None:
            raise lost
