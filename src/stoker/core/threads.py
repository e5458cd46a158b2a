"""Patches shared by threads, calls after a time limit, and the end of a process whose threads cannot be stopped.

A thread may be in native code when the process ends. Python's own end removes the interpreter and libraries that the
thread still uses, which crashes the process or changes its exit code. So Stoker's own processes skip this part of
Python's end once everything else is done. A user's process must not skip it, because only Python knows its exit code:
it waits for the thread.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn


class Replaced:
    """A patch of another library; a context manager that several threads may enter at the same time.

    A mirrored strategy traces each replica in a separate thread, and switches threads where replicas exchange values:
    so the second thread enters before the first one leaves. If each thread restored the value that it found, the
    second thread would restore the patched value, and the patch would remain.
    """

    def __init__(self, owner: Any, **values: Any) -> None:
        """Store the values; no attribute is replaced yet.

        Args:
            owner: A module or a class.
            values: Attribute -> its value while a thread is inside.
        """
        self._owner, self._values = owner, values
        self._lock, self._inside = threading.Lock(), 0
        self._kept: dict[str, Any] = {}

    def __enter__(self) -> None:
        """Replace the attributes if no other thread is inside."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._kept = {name: getattr(self._owner, name) for name in self._values}
                self._set(self._values)

    def __exit__(self, *_: object) -> None:
        """Restore the attributes if no other thread is inside."""
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._set(self._kept)

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._owner, name, value)


_LOG = logging.getLogger("stoker")

LONGEST_WAIT_S = 300.0
"""Maximum wait for a thread in native code at the end of a user's process, seconds."""

_threads: list[tuple[threading.Thread, str]] = []


def outlives_python(thread: threading.Thread, *, does: str) -> None:
    """Register a daemon thread that may still run when the process ends.

    Args:
        thread: A started thread.
        does: What the thread does, a clause for the log line about the wait, e.g. `XLA compiles`.
    """
    if not _threads:
        atexit.register(_wait)
    _threads[:] = [*_running(), (thread, does)]


def _running() -> list[tuple[threading.Thread, str]]:
    return [each for each in _threads if each[0].is_alive()]


def _wait() -> None:
    for thread, does in _running():
        _LOG.warning("%s and cannot be interrupted: waiting for its end", does)
        thread.join(LONGEST_WAIT_S)


def end_process(code: int) -> NoReturn:
    """End this process of Stoker with an exit code; all results must already be on disk.

    Functions registered with `atexit` are still called.
    """
    if not _running():
        sys.exit(code)
    atexit.unregister(_wait)
    try:
        # Does what Python does at its end: joins the threads that are not daemons, and ends executors.
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - nothing public does
    except BaseException:  # noqa: BLE001 - Ctrl-C too: the exit code stays
        traceback.print_exc()
    # The user's callbacks may have registered functions, such as one that completes a tracker's upload.
    atexit._run_exitfuncs()  # noqa: SLF001 - nothing public runs them
    _flush_files()
    os._exit(code)


def _flush_files() -> None:
    """Write the buffers of all open files, as Python's own end would."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    everything = gc.get_objects()
    # Flush text streams first: they flush into byte streams. Check type(), not isinstance(): a lazy module fakes its
    # class.
    for kinds in ((io.TextIOWrapper,), (io.BufferedWriter, io.BufferedRandom)):
        for each in everything:
            if issubclass(type(each), kinds):
                with contextlib.suppress(Exception):
                    each.flush()


@contextlib.contextmanager
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
