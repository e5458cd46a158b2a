"""Calls a function after a time limit, unless the block has ended before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def called_after(time_s: float, call: Callable[[], None]) -> Iterator[None]:
    """Call a function in a separate thread if the block takes longer.

    Args:
        time_s: The time limit, seconds.
        call: The function.
    """
    timer = threading.Timer(max(time_s, 0.0), call)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
