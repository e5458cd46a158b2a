"""Signals that ask a process to end, heard at once whatever its main thread is doing.

Python runs a signal's handler only between its own instructions, and a compiled call of many
steps, an import or a query is one of them. So the signal's number is read from a pipe by a thread.
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
"""What a scheduler (Slurm: USR1) or a terminal sends before it takes the machine away."""


@contextmanager
def heard(
    numbers: Sequence[signal.Signals],
    tell: Callable[[signal.Signals], None],
    *,
    handler: Callable[[int], None] | None = None,
) -> Iterator[None]:
    """Tell of each of these signals; outside the main thread nobody is listened to.

    Args:
        numbers: Which signals; one that the process was started to ignore (`nohup`) stays ignored.
        tell: Called in a thread of its own, at once. Whoever takes a signal over inside the block
            has it for himself.
        handler: Called in the main thread, when it comes to it; may raise.
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
    """The process ends at once when it is asked to, with the exit code of the preempted.

    For work that a kill loses nothing of. A signal that a handler of the user's own takes is left
    to it.
    """
    free = [number for number in ASKING if signal.getsignal(number) is signal.SIG_DFL]
    with heard(free, end_at_once):
        yield


def end_at_once(number: signal.Signals) -> None:
    """End the process now; what it has published stays."""
    line = f"stoker: ended by {number.name}; run it again to go on from what is saved.\n"
    os.write(2, line.encode())
    os._exit(EXIT_PREEMPTED)
