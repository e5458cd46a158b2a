"""Lock files that contain the name of the process that holds them, so that a waiting process can report it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
import time
from pathlib import Path
from typing import IO

from stoker.core.errors import BusyError, Plain

NOTICE_S = 5.0
"""After waiting this long, a process logs who holds the lock, seconds."""

_POLL_S = 0.001, 0.1
"""First and longest pause between two attempts, seconds."""

_OWNER = re.compile(r"pid (\d+) on (\S+)")

_log = logging.getLogger(__name__)


def owner_line() -> str:
    """Return the line that this process writes into a lock file to identify itself."""
    return f"pid {os.getpid()} on {socket.gethostname()}"


def take_lock(lock: Path, *, give_up_s: float | None = None) -> IO[str]:
    """Wait for a lock file, and hold it until the returned stream is closed or the process ends.

    Args:
        lock: The file, in a folder that exists.
        give_up_s: Maximum wait, seconds; None: no limit, because the holder may work for hours.

    Raises:
        BusyError: another process held the lock all this time.
    """
    began_s, pause_s, noticed = time.monotonic(), _POLL_S[0], False
    while True:
        with contextlib.ExitStack() as opened:
            # Open the file again for each attempt: a user may meanwhile delete the file of a machine that is gone.
            stream = opened.enter_context(lock.open("a+", encoding="utf-8", errors="replace"))
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held = _held(stream)
            else:
                if _is_at(stream, lock):
                    _write_owner(stream)
                    opened.pop_all()
                    return stream
                continue
        waited_s = time.monotonic() - began_s
        if give_up_s is not None and waited_s > give_up_s:
            fix = "Wait until that process ends, or stop it."
            raise BusyError(f"{lock} was not free after {give_up_s:g} s", got=Plain(held), fix=fix)
        if waited_s > NOTICE_S and not noticed:
            noticed = True
            _log.warning("waiting for %s: %s", lock, held)
        time.sleep(pause_s)  # a blocking call could not end after `give_up_s`
        pause_s = min(2 * pause_s, _POLL_S[1])


def _is_at(stream: IO[str], lock: Path) -> bool:
    """Whether the opened file is still the one at this path; if not, another process may hold a new file there."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), lock.stat())
    except FileNotFoundError:
        return False


def _write_owner(stream: IO[str]) -> None:
    # On a full disk the lock still works, without the name of its holder.
    with contextlib.suppress(OSError):
        os.ftruncate(stream.fileno(), 0)
        os.write(stream.fileno(), f"{owner_line()}\n".encode())


def _held(stream: IO[str]) -> str:
    """Return who holds a lock, for how long, and what to do if that process cannot free it."""
    stream.seek(0)
    owner = _OWNER.match(stream.read(200))
    if owner is None:
        return "another process holds it"
    held_s = max(0.0, time.time() - os.fstat(stream.fileno()).st_mtime)
    text = f"{owner[0]} has held it for {held_s:.0f} s"
    if owner[2] != socket.gethostname():
        return f"{text}; if that machine is gone, delete the file"
    if _is_suspended(int(owner[1])):
        return f"{text} and is suspended; continue it by `kill -CONT {owner[1]}`, or end it"
    return text


def _is_suspended(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False  # the process is in another container
    return text.rpartition(")")[2].split()[0] in ("T", "t")
