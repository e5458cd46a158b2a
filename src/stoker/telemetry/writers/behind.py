"""Executes work for a file in a background thread, one task after another, during training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

PAUSE_S = 0.2
"""Polling interval of the thread: waking it for each task would add a twentieth to a call of one
short step."""

MOST_WAITING = 10_000
"""Most tasks that may wait. If the disk does not respond, the next task waits, and memory does not
grow."""

Piece = Callable[[], None]


class Behind:
    """Executes tasks in order in a background thread.

    An exception in a task is raised by the next `do`, or by `close`.
    """

    def __init__(self, name: str) -> None:
        """Start the thread.

        Args:
            name: The thread's name.
        """
        self._pieces: deque[Piece] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def do(self, piece: Piece) -> None:
        """Queue a task; it starts after those before it, within about a fifth of a second.

        Raises:
            ValueError: it is closed.
        """
        if self._closing:
            raise ValueError("closed: nothing more is written")
        self._raise()
        self._pieces.append(piece)
        if len(self._pieces) > MOST_WAITING:
            self.wait()

    def wait(self) -> None:
        """Return when all tasks so far are done."""
        if self._thread.is_alive():
            done = threading.Event()
            self._pieces.append(done.set)
            self._wake.set()
            done.wait()
        self._raise()

    def close(self) -> None:
        """Finish the waiting tasks, and end the thread; a second call does nothing."""
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        while True:
            closing = self._closing
            while self._pieces:
                self._do(self._pieces.popleft())
            if closing:
                return
            self._wake.wait(PAUSE_S)
            self._wake.clear()

    def _do(self, piece: Piece) -> None:
        try:
            piece()
        except Exception as error:  # noqa: BLE001 - raised by the next call
            self._error = error
