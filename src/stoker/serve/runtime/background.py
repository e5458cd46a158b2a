"""Writes logs and traces in a background thread, off the request path."""

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
"""Most items in the queue."""

MAX_BYTES = 64 << 20
"""Most bytes in the queue."""

_SAY_AGAIN_S = 60.0
"""A full disk is logged once in so many seconds, not once a request."""


class Background(Generic[T]):
    """A bounded queue that a thread writes from; items that do not fit are dropped and counted."""

    def __init__(
        self, write: Callable[[Sequence[T]], None], *, name: str, on_drop: Callable[[int], None]
    ) -> None:
        """Args: write: writes items, may raise OSError; name: of the thread; on_drop: gets the number dropped."""
        self._write, self._on_drop, self._name = write, on_drop, name
        self._waiting: deque[T] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._ended = False
        self._said_s = -_SAY_AGAIN_S
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def offer(self, item: T, *, size: int = 0) -> None:
        """Queue an item to be written, or drop it if the queue is full; returns at once.

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

    def say(self, error: OSError) -> None:
        """Log that items are not written; once in a while, not once a request."""
        if time.monotonic() - self._said_s >= _SAY_AGAIN_S:
            self._said_s = time.monotonic()
            _log.error("%s is not written: %s", self._name, error)

    def close(self) -> None:
        """Write the queued items, and end."""
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
                self.say(error)
            except Exception:  # noqa: BLE001 - one item that cannot be written must not end the log
                self._on_drop(len(items))
                _log.exception("%s met a bug", self._name)
