"""Ends a process while a thread is inside of native code that cannot be interrupted.

Python's end takes the interpreter and the libraries away below such a thread, which crashes, or
changes the exit code. So a process of ours ends without that, once everything else is done; in a
process of the user's, whose exit code only Python knows, the thread is waited for.
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
from typing import NoReturn

_LOG = logging.getLogger("stoker")

LONGEST_WAIT_S = 300.0
"""Longest wait for such a thread at the end of a process of the user's."""

_threads: list[tuple[threading.Thread, str]] = []


def outlives_python(thread: threading.Thread, *, does: str) -> None:
    """Register a daemon thread that may still run when the process ends.

    Args:
        thread: Has been started.
        does: For the line that tells what is waited for, e.g. `XLA compiles`.
    """
    if not _threads:
        atexit.register(_wait)
    _threads[:] = [*_running(), (thread, does)]


def _running() -> list[tuple[threading.Thread, str]]:
    return [each for each in _threads if each[0].is_alive()]


def _wait() -> None:
    for thread, does in _running():
        _LOG.warning("%s, which cannot be interrupted: waiting for its end", does)
        thread.join(LONGEST_WAIT_S)


def end_process(code: int) -> NoReturn:
    """End the process, which is ours, with this exit code; everything must be on the disk.

    What is registered with `atexit` runs in any case.
    """
    if not _running():
        sys.exit(code)
    atexit.unregister(_wait)
    try:
        # As Python does: it joins threads that are not daemons, and ends executors.
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - nothing public does
    except BaseException:  # noqa: BLE001 - Ctrl-C too: the exit code stays
        traceback.print_exc()
    # The user's callbacks may have registered something, such as the end of a tracker's upload.
    atexit._run_exitfuncs()  # noqa: SLF001 - nothing public runs them
    _flush_files()
    os._exit(code)


def _flush_files() -> None:
    """Write what open files hold in Python's buffers, as their removal at Python's end would."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    everything = gc.get_objects()
    # A text's buffer goes into the bytes' one. The type, because a lazy module answers for its class.
    for kinds in ((io.TextIOWrapper,), (io.BufferedWriter, io.BufferedRandom)):
        for each in everything:
            if issubclass(type(each), kinds):
                with contextlib.suppress(Exception):
                    each.flush()
