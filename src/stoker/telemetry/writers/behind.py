"""Work for a file that a thread of its own does, one piece after another, while training goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

MOST_WAITING = 1_000
"""Pieces that may wait: with a disk that answers nothing the next one waits for it, and memory does
not grow."""

Piece = Callable[[], None]


class Behind:
    """Does pieces of work in their order in a background thread.

    What a piece raises is raised by the next `do`, or by `close`.
    """

    def __init__(self, name: str) -> None:
        """Start the thread.

        Args:
            name: The thread's name.
        """
        self._waiting: queue.Queue[Piece | None] = queue.Queue(MOST_WAITING)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def do(self, piece: Piece) -> None:
        """Have a piece of work done after those before it.

        Raises:
            ValueError: it is closed.
        """
        if not self._thread.is_alive():
            raise ValueError("closed: nothing more is written")
        self._raise()
        self._waiting.put(piece)

    def wait(self) -> None:
        """Return when all is done that was asked for."""
        self._waiting.join()
        self._raise()

    def close(self) -> None:
        """Do what is waiting, and end the thread; a second time nothing."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            piece = self._waiting.get()
            try:
                if piece is None:
                    return
                piece()
            except Exception as error:  # noqa: BLE001 - raised where the next piece is asked for
                self._error = error
            finally:
                self._waiting.task_done()
