"""Receives termination signals immediately, even while the main thread is in native code.

Python calls a signal handler only between two bytecode instructions. A compiled call of many steps, an import of a
native library or a database query is one instruction. So a thread reads the signal's number from a pipe.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from stoker.core.errors import EXIT_PREEMPTED

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals with which a scheduler (Slurm: USR1) or a terminal announces that the process has to end."""


@contextmanager
def heard(
    numbers: Sequence[signal.Signals],
    tell: Callable[[signal.Signals], None],
    *,
    handler: Callable[[int], None] | None = None,
) -> Iterator[None]:
    """Call a function at each of these signals; does nothing outside the main thread.

    Args:
        numbers: The signals; a signal that this process has ignored since its start (`nohup`) stays ignored.
        tell: Called immediately, in a separate thread. Not called for a signal whose handler was
            replaced inside the block.
        handler: Called later, in the main thread, when Python runs signal handlers; may raise.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def take(number: int, _: FrameType | None) -> None:
        if handler is not None:
            handler(number)

    def watch() -> None:
        with os.fdopen(read, "rb", buffering=0) as stream:
            while byte := stream.read(1):
                if byte[0] in numbers and signal.getsignal(byte[0]) is take:
                    tell(signal.Signals(byte[0]))

    read, write = os.pipe()
    os.set_blocking(write, False)
    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    wanted = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, take) for number in wanted}
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, previous in before.items():
            signal.signal(number, previous)
        os.close(write)
        watcher.join()


@contextmanager
def ends_when_asked() -> Iterator[None]:
    """End the process immediately at SIGTERM or Slurm's SIGUSR1, with the exit code of a preempted run.

    For work that loses nothing when it is killed. If the user's code has set a handler for a signal, that handler is
    called instead.
    """
    free = [number for number in ASKING if signal.getsignal(number) is signal.SIG_DFL]
    with heard(free, end_at_once):
        yield


def end_at_once(number: signal.Signals) -> None:
    """End the process now; published files remain."""
    line = f"stoker: ended by {number.name}; run it again to continue from the saved state.\n"
    os.write(2, line.encode())
    os._exit(EXIT_PREEMPTED)
