"""Writes logs and traces in a background thread, so that requests do not wait for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ITEMS = 8192
"""Maximum number of items in the queue."""

MAX_BYTES = 64 << 20
"""Maximum bytes of the items in the queue."""

_LOG_AGAIN_S = 60.0
"""Minimum time between two log messages about failed writes, seconds; a full disk would cause one for each request."""


class Background(Generic[T]):
    """A bounded queue whose items a thread writes. Items that do not fit are dropped and counted."""

    def __init__(
        self, write: Callable[[Sequence[T]], None], *, name: str, on_drop: Callable[[int], None]
    ) -> None:
        """Start the thread.

        Args:
            write: Writes items; may raise OSError.
            name: The thread's name.
            on_drop: Called with the number of dropped items.
        """
        self._write, self._on_drop, self._name = write, on_drop, name
        self._waiting: deque[T] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._ended = False
        self._logged_s = -_LOG_AGAIN_S
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def offer(self, item: T, *, size: int = 0) -> None:
        """Queue an item, or drop it if the queue is full. Does not block.

        Args:
            item: The item to write.
            size: Bytes of memory that it holds, approximately.
        """
        with self._changed:
            full = len(self._waiting) >= MAX_ITEMS or self._bytes + size > MAX_BYTES
            if not full and not self._ended:
                self._waiting.append(item)
                self._bytes += size
                self._changed.notify()
                return
        self._on_drop(1)

    def log_failure(self, error: OSError) -> None:
        """Log that items cannot be written, at most once in `_LOG_AGAIN_S`."""
        if time.monotonic() - self._logged_s >= _LOG_AGAIN_S:
            self._logged_s = time.monotonic()
            _log.error("%s is not written: %s", self._name, error)

    def close(self) -> None:
        """Write the queued items, and end the thread."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                items = list(self._waiting)
                self._waiting.clear()
                self._bytes = 0
                if not items:
                    return
            try:
                self._write(items)
            except OSError as error:
                self._on_drop(len(items))
                self.log_failure(error)
            except Exception:  # noqa: BLE001 - one item that cannot be written must not end the log
                self._on_drop(len(items))
                _log.exception("%s failed because of a bug", self._name)
