"""Watch folders with Linux's inotify: report each file and folder there that any process reads.

Source: inotify(7).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_LOG = logging.getLogger(__name__)

_ACCESS, _CLOSE_NOWRITE, _MOVED_TO, _CREATE = 0x1, 0x10, 0x80, 0x100
_OVERFLOW, _IS_FOLDER = 0x4000, 0x40000000
_READ = _ACCESS | _CLOSE_NOWRITE
_EVENT = struct.Struct("iIII")
_BUFFER_BYTES = 1 << 16

PAUSE_S = 0.02
"""Pause between two reads of the event queue, seconds. A file that is read in pieces causes many events; the pause
lets them collect."""


class FolderWatch:
    """Reports files that are read in some folders, until it is closed."""

    def __init__(
        self,
        places: Iterable[Path],
        *,
        on_read: Callable[[Path], None],
        on_list: Callable[[Path], None],
        on_create: Callable[[Path], None],
        on_overflow: Callable[[], None],
        on_pause: Callable[[], None],
    ) -> None:
        """Start watching. Folders that are created later are not watched.

        Args:
            places: Folders, to be watched without their subfolders; and links to files in other folders.
            on_read: Called with each file that was read, sometimes more than once. All callbacks run
                in a thread.
            on_list: Called with each watched folder that was listed.
            on_create: Called with each file or folder that was created in a watched folder.
            on_overflow: Called if events were lost.
            on_pause: Called after each read of the queue.

        Raises:
            OSError: the system allows no more watches.
        """
        self._on_read, self._on_list, self._on_create = on_read, on_list, on_create
        self._on_overflow, self._on_pause = on_overflow, on_pause
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._queue = self._checked(
            self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK), "inotify_init1"
        )
        self._end_read, self._end_write = os.pipe2(os.O_CLOEXEC)
        self._places: dict[int, Path] = {}
        self._seen: set[tuple[int, bytes, int]] = set()
        try:
            for place in places:
                self._add(place)
        except OSError:
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name="observed-reads", daemon=True)
        self._thread.start()

    def _add(self, place: Path) -> None:
        mask = _READ | _CREATE | _MOVED_TO
        number = self._libc.inotify_add_watch(self._queue, os.fsencode(place), mask)
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
            except Exception:  # noqa: BLE001 - after any error the missed files must count as read
                _LOG.exception("some reads were not observed: every file is recorded as read")
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
            elif (
                key := (number, name, mask & ~_READ)
            ) not in self._seen and number in self._places:
                # Report each combination of event and file only once.
                self._seen.add(key)
                place = self._places[number]
                self._report(mask, place / os.fsdecode(name) if name else place, of_place=not name)

    def _report(self, mask: int, path: Path, *, of_place: bool) -> None:
        if mask & (_CREATE | _MOVED_TO):
            self._on_create(path)
        elif not mask & _IS_FOLDER:
            self._on_read(path)
        elif of_place:
            # Only the event of the folder itself counts: its parent reports the same listing, under this folder's name.
            self._on_list(path)

    def close(self) -> None:
        """Report the remaining reads, and stop."""
        os.write(self._end_write, b"x")
        self._thread.join()
        self._release()

    def _release(self) -> None:
        for number in (self._queue, self._end_read, self._end_write):
            os.close(number)
