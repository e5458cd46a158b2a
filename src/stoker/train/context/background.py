"""Runs work in a thread while the main thread does something else, and returns its result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """Runs a function in a thread, starting immediately."""

    def __init__(self, work: Callable[[], T], *, name: str) -> None:
        """Start.

        Args:
            work: Called once. It must not draw random numbers or trace parts of the model, because
                the main thread builds the model meanwhile.
            name: The thread's name.
        """
        self._found: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the function has ended, with or without an error."""
        self._thread.join()

    def result(self) -> T:
        """Wait for the function's result.

        Raises:
            Exception: what it raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found  # type: ignore[return-value]  # it has returned one

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._found = work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            self._error = error
