"""Linux's inotify for reads below a folder: reports which files any process reads.

Source: inotify(7).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_LOG = logging.getLogger(__name__)

_ACCESS, _CLOSE_NOWRITE, _OVERFLOW, _IS_FOLDER = 0x1, 0x10, 0x4000, 0x40000000
_EVENT = struct.Struct("iIII")
_BUFFER_BYTES = 1 << 16

PAUSE_S = 0.02
"""Pause between two reads of the queue: a file read in pieces gives one event per piece."""


def is_available() -> bool:
    """Whether this system has inotify."""
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "inotify_init1")


class FolderWatch:
    """Reports files that are read below a folder, until it is closed."""

    def __init__(
        self,
        folder: Path,
        *,
        skip: Callable[[Path], bool],
        on_read: Callable[[Path], None],
        on_overflow: Callable[[], None],
        on_pause: Callable[[], None],
    ) -> None:
        """Start watching; folders created later are not watched.

        Args:
            folder: The folder to watch.
            skip: Folders that are left out.
            on_read: Called in a thread with each file that was read, often more than once.
            on_overflow: Called if events were lost.
            on_pause: Called after each read of the queue.

        Raises:
            OSError: the system's limit of watches is reached.
        """
        self._on_read, self._on_overflow, self._on_pause = on_read, on_overflow, on_pause
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._queue = self._checked(
            self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK), "inotify_init1"
        )
        self._end_read, self._end_write = os.pipe2(os.O_CLOEXEC)
        self._places: dict[int, Path] = {}
        self._seen: set[tuple[int, bytes]] = set()
        try:
            self._watch(folder, skip)
        except OSError:
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name="observed-reads", daemon=True)
        self._thread.start()

    def _watch(self, folder: Path, skip: Callable[[Path], bool]) -> None:
        for place, folders, names in os.walk(folder):
            here = Path(place)
            folders[:] = [name for name in folders if not skip(here / name)]
            self._add(here)
            for name in names:
                # A read through a link is an event of the file that it names.
                if (here / name).is_symlink() and (here / name).is_file() and not skip(here / name):
                    self._add(here / name)

    def _add(self, place: Path) -> None:
        number = self._libc.inotify_add_watch(
            self._queue, os.fsencode(place), _ACCESS | _CLOSE_NOWRITE
        )
        self._places[self._checked(number, f"inotify_add_watch {place}")] = place

    def _checked(self, result: int, what: str) -> int:
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"{what}: {os.strerror(code)}")
        return result

    def _run(self) -> None:
        queue = select.poll()
        for number in (self._queue, self._end_read):
            queue.register(number, select.POLLIN)
        ends = False
        while not ends:
            ends = any(number == self._end_read for number, _ in queue.poll(1000))
            try:
                self._drain()
                self._on_pause()
            except Exception:  # noqa: BLE001 - whatever it is: what was missed counts as read
                _LOG.exception("reads were not observed for a moment: every file counts as read")
                self._on_overflow()
            if not ends:
                time.sleep(PAUSE_S)

    def _drain(self) -> None:
        while True:
            try:
                data = os.read(self._queue, _BUFFER_BYTES)
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    return
                raise
            self._take(data)

    def _take(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            number, mask, _, length = _EVENT.unpack_from(data, at)
            name = data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
            at += _EVENT.size + length
            if mask & _OVERFLOW:
                self._on_overflow()
            elif mask & _IS_FOLDER or (number, name) in self._seen or number not in self._places:
                continue
            else:
                # One event of a file is enough.
                self._seen.add((number, name))
                place = self._places[number]
                self._on_read(place / os.fsdecode(name) if name else place)

    def close(self) -> None:
        """Report the remaining reads, and stop."""
        os.write(self._end_write, b"x")
        self._thread.join()
        self._release()

    def _release(self) -> None:
        for number in (self._queue, self._end_read, self._end_write):
            os.close(number)
