"""A bounded cache of a store's objects on this machine's disk, each with its checksum.

objects/KEY[:3]/KEY-SHA256   one object; the name holds the checksum of its content
parts/KEY[:3].part           one that is being fetched, at its full length from the start
slots/KEY[:3].lock           held while it is fetched: by one process at a time, so each object is fetched once
lock, used                   held while room is made; the bytes that objects and parts take up

KEY is made from the object's place, length and time, so that a changed object is another entry.
A reader of an entry holds a shared lock on it, and a locked entry is not evicted. The kernel gives
every lock when its owner dies. Deliberately, nothing is flushed to the disk: an entry that a
power cut damaged has a wrong checksum, and is fetched again.

Source: git's rule for files that are as young as their record of them (racy-git) is `SETTLED_S`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from stoker.core.errors import BusyError, Plain, UserError
from stoker.core.files import alone, sha256_file
from stoker.core.fingerprint import fingerprint

SETTLED_S = 3.0
"""Stores report times in seconds. An object fetched within that second may have been replaced in the
same second without a visible change; later processes fetch it again."""

ROOM_SHARE = 0.05
"""Additional share of the limit that is freed, since finding the oldest entries takes a moment."""

WAIT_S = 300.0
"""Longest wait for space that other readers hold, seconds."""

_POLL_S = 0.05
"""Interval in which the space is looked at, seconds."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One version of one object."""

    endpoint: str
    """Endpoint of its store; "" for the default."""

    location: str
    """Its URI, without options."""

    size_bytes: int
    """Its length."""

    mtime_ns: int
    """Time of its last modification, nanoseconds; stores report seconds or milliseconds."""

    @property
    def key(self) -> str:
        """Name of the entry, hexadecimal digits."""
        return fingerprint([self.endpoint, self.location, self.size_bytes, self.mtime_ns])


Fetch = Callable[[Wanted], Iterator[bytes]]
"""Returns an object's content in pieces."""


@functools.cache
def shared_cache(folder: Path, *, limit_bytes: int) -> Cache:
    """Return this process's only cache for a folder: checked objects are not checked again."""
    return Cache(folder, limit_bytes=limit_bytes)


class Cache:
    """A folder of fetched objects with a size limit."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        """Use a folder; it is created when an object is fetched.

        Args:
            folder: The folder; several processes may share it.
            limit_bytes: Most bytes of objects, including incomplete ones.
        """
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._checked: dict[str, tuple[int, ...]] = {}
        self._digests: dict[str, str] = {}
        self._counted = False

    @contextlib.contextmanager
    def pinned(self, wanted: Wanted, fetch: Fetch) -> Iterator[Path]:
        """The object as a local file, until the block ends.

        Args:
            wanted: The object.
            fetch: Called if the object is missing or incomplete.

        Raises:
            UserError: the object is larger than the limit, the disk is full or not writable, or
                `fetch` fails.
            BusyError: other readers hold the space for too long.
        """
        path, stream = self._acquire(wanted, fetch, wait_s=WAIT_S)
        with stream:
            yield path

    def prefetch(self, wanted: Wanted, fetch: Fetch) -> None:
        """Fetch an object that will be read soon, if there is space now."""
        with contextlib.suppress(BusyError):
            self._acquire(wanted, fetch, wait_s=0.0)[1].close()

    def known_sha256(self, wanted: Wanted) -> str | None:
        """The SHA-256 of an object that this process has used, even if it was evicted since."""
        return self._digests.get(wanted.key)

    def _acquire(self, wanted: Wanted, fetch: Fetch, *, wait_s: float) -> tuple[Path, BinaryIO]:
        until_s = time.monotonic() + wait_s
        with self._faults_named(wanted):
            while (found := self._pin(wanted)) is None:
                self._fetch(wanted, fetch, until_s=until_s)
        return found

    def _pin(self, wanted: Wanted) -> tuple[Path, BinaryIO] | None:
        """Lock the entry, if it exists and is intact."""
        path = self._entry(wanted.key)
        if path is None:
            return None
        try:
            stream = path.open("rb")
        except FileNotFoundError:
            return None
        fcntl.flock(stream, fcntl.LOCK_SH)
        status = os.fstat(stream.fileno())
        # It may have been evicted between the search and the lock.
        if status.st_nlink and self._is_good(wanted, path, status):
            # The access time orders eviction; the modification time stays the time of the fetch.
            os.utime(stream.fileno(), ns=(time.time_ns(), status.st_mtime_ns))
            return path, stream
        stream.close()
        return None

    def _entry(self, key: str) -> Path | None:
        folder = self._folder / "objects" / key[:3]
        try:
            with os.scandir(folder) as found:
                return next((Path(each.path) for each in found if each.name.startswith(key)), None)
        except FileNotFoundError:
            return None

    def _is_good(self, wanted: Wanted, path: Path, status: os.stat_result) -> bool:
        """Whether this process has fetched or checked the entry before, or its checksum is right."""
        key, now = wanted.key, (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._checked.get(key) == now:
            return True
        if status.st_mtime_ns < wanted.mtime_ns + SETTLED_S * 1e9:
            return False
        if sha256_file(path) != sha256_in(path):
            _LOG.warning("the cached copy of %s is damaged: fetched again", wanted.location)
            return False
        self._note(key, path, now)
        return True

    def _note(self, key: str, path: Path, status: tuple[int, ...]) -> None:
        self._checked[key] = status
        self._digests[key] = sha256_in(path)

    def _fetch(self, wanted: Wanted, fetch: Fetch, *, until_s: float) -> None:
        if wanted.size_bytes > self._limit_bytes:
            raise UserError(
                f"{wanted.location} must fit into data.cache_bytes, which is {self._limit_bytes:,}",
                got=Plain(f"an object of {wanted.size_bytes:,} bytes"),
                fix=f"Set data.cache_bytes to more than {wanted.size_bytes:,}, or split the file.",
            )
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with alone(self._slot(wanted.key)):
            # Another process may have fetched it while this one waited for the slot.
            if (found := self._pin(wanted)) is not None:
                found[1].close()
                return
            part = self._folder / "parts" / f"{wanted.key[:3]}.part"
            self._make_room(wanted, part, until_s=until_s)
            try:
                digest = _write(part, fetch(wanted))
                self._publish(wanted, part, digest)
            except BaseException:
                self._give_up(part, wanted.size_bytes)
                raise

    def _make_room(self, wanted: Wanted, part: Path, *, until_s: float) -> None:
        """Reserve space for an object; evict the least recently used ones."""
        while True:
            with self._alone():
                used = self._used()
                if part.exists():  # left by a killed process: this one holds the slot
                    used -= part.stat().st_size
                    part.unlink()
                if used + wanted.size_bytes > self._limit_bytes:
                    used = self._evicted(wanted.size_bytes)
                if used + wanted.size_bytes <= self._limit_bytes:
                    # Update the number first: after a kill in between it is too large, never too small.
                    self._write_used(used + wanted.size_bytes)
                    _allocate(part, wanted.size_bytes)
                    return
            if time.monotonic() >= until_s:
                raise BusyError(
                    f"data.cache_bytes ({self._limit_bytes:,}) must be enough for all files that are read at once",
                    got=Plain(f"{used:,} bytes held by readers, {wanted.size_bytes:,} wanted"),
                    fix="Set a larger data.cache_bytes, or wait until the other run has ended.",
                )
            time.sleep(_POLL_S)  # other processes announce no end of a read

    def _publish(self, wanted: Wanted, part: Path, digest: str) -> None:
        old, key = self._entry(wanted.key), wanted.key
        final = self._folder / "objects" / key[:3] / f"{key}-{digest}"
        with self._alone():
            final.parent.mkdir(parents=True, exist_ok=True)
            if old is not None:  # damaged, or too recent to be trusted
                size_bytes = old.stat().st_size
                old.unlink()
                self._write_used(self._used() - size_bytes)
            os.replace(part, final)
            status = final.stat()  # still alone: a moment later it may be evicted
        self._note(key, final, (status.st_ino, status.st_size, status.st_mtime_ns))

    def _give_up(self, part: Path, size_bytes: int) -> None:
        with self._alone():
            if part.exists():
                part.unlink()
                self._write_used(self._used() - size_bytes)

    def _evicted(self, need_bytes: int) -> int:
        """Remove the least recently used entries without a reader; return the bytes that remain."""
        for part in (self._folder / "parts").glob("*.part"):
            _remove_orphan(part, self._slot(part.stem))
        entries, used = self._counts()
        aim = self._limit_bytes - max(need_bytes, round(self._limit_bytes * ROOM_SHARE))
        for _, size_bytes, path in sorted(entries):
            if used <= aim:
                break
            if _remove_unread(path):
                used -= size_bytes
        self._write_used(used)
        return used

    def _counts(self) -> tuple[list[tuple[int, int, str]], int]:
        """Last use, bytes and path of every object; the bytes of all objects, and of incomplete ones."""
        entries, parts = [], 0
        for folder in (self._folder / "objects").glob("*"):
            with os.scandir(folder) as found:
                for each in found:
                    status = each.stat(follow_symlinks=False)
                    entries.append((status.st_atime_ns, status.st_size, each.path))
        for part in (self._folder / "parts").glob("*.part"):
            parts += part.stat().st_size
        return entries, parts + sum(size for _, size, _ in entries)

    def _used(self) -> int:
        """Bytes in use; counted once per process, since a killed one leaves a wrong number."""
        if self._counted:
            with contextlib.suppress(FileNotFoundError, ValueError):
                return int((self._folder / "used").read_text())
        used = self._counts()[1]
        self._write_used(used)
        self._counted = True
        return used

    def _write_used(self, used: int) -> None:
        (self._folder / "used").write_text(str(used))

    def _slot(self, key: str) -> Path:
        return self._folder / "slots" / f"{key[:3]}.lock"

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        return alone(self._folder / "lock")

    @contextlib.contextmanager
    def _faults_named(self, wanted: Wanted) -> Iterator[None]:
        """Report an error of the disk as one line with the object, the need and the free space."""
        try:
            yield
        except OSError as error:
            another = "another folder with --set data.cache_dir=DIR."
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise UserError(
                    f"data.cache_dir {self._folder} must be a folder that can be written",
                    got=Plain(error.strerror or str(error)),
                    fix=f"Name {another}",
                ) from error
            free = shutil.disk_usage(self._folder).free
            raise UserError(
                f"data.cache_dir {self._folder} must have room for {wanted.location}",
                got=Plain(f"{wanted.size_bytes:,} bytes needed, {free:,} bytes free"),
                fix=f"Free some space there, or name {another}",
            ) from error


def sha256_in(path: Path) -> str:
    """Return the SHA-256 in the name of a pinned file."""
    return path.name.partition("-")[2]


def _allocate(part: Path, size_bytes: int) -> None:
    """Reserve the space on the disk now, so that a full disk is found before the fetch."""
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("wb") as stream:
            if size_bytes:
                os.posix_fallocate(stream.fileno(), 0, size_bytes)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _write(part: Path, pieces: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    with part.open("r+b") as stream:
        for piece in pieces:
            digest.update(piece)
            stream.write(piece)
    return digest.hexdigest()


def _remove_unread(path: str) -> bool:
    try:
        with open(path, "rb") as stream:  # noqa: PTH123 - thousands of them
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    except (BlockingIOError, FileNotFoundError):
        return False
    return True


def _remove_orphan(part: Path, slot: Path) -> None:
    """Remove what a killed process left, unless its slot is held: then the object is being fetched."""
    with contextlib.suppress(BlockingIOError, FileNotFoundError), slot.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.unlink(missing_ok=True)
