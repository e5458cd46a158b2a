"""A cache of limited size for a store's objects on this machine's disk; each has a checksum.

objects/KEY[:3]/KEY-SHA256   an object; the name holds the checksum of its content
parts/KEY[:3].part           an object during its download; it has its full length from the start
slots/KEY[:3].lock           locked by the process that downloads the object, so that only one process does
lock                         locked while space is reserved or freed
used                         total size of objects and parts, bytes

KEY is a hash of the object's location, length and time, so a changed object gets a new entry. A reader of an
entry holds a shared lock on it, and a locked entry is not evicted. The kernel releases all locks of a process
that dies. Nothing is flushed to the disk: if a power cut damages an entry, its checksum is wrong, and the object
is downloaded again.

Source of `SETTLED_S`: git's rule for files that are as new as the index that lists them (racy-git).
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
"""An object that was downloaded less than this after its modification, seconds, is downloaded again by later
processes: stores report times in seconds, so it may have been replaced in the same second, with the same time."""

ROOM_SHARE = 0.05
"""Minimum share of the limit that is freed when objects are evicted: to find the oldest entries takes a while."""

WAIT_S = 300.0
"""Maximum wait for space that other readers hold, seconds."""

_POLL_S = 0.05
"""Interval between two checks of the free space, seconds."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One version of one object."""

    endpoint: str
    """Endpoint of the object's store; "" for the default."""

    location: str
    """URI of the object, without options."""

    size_bytes: int
    """Length of the object, bytes."""

    mtime_ns: int
    """Time of the object's last modification, nanoseconds; stores report seconds or milliseconds."""

    @property
    def key(self) -> str:
        """Key of the object's entry in the cache: hexadecimal digits."""
        return fingerprint([self.endpoint, self.location, self.size_bytes, self.mtime_ns])


Fetch = Callable[[Wanted], Iterator[bytes]]
"""Function that downloads an object, and yields its content in pieces."""


@functools.cache
def shared_cache(folder: Path, *, limit_bytes: int) -> Cache:
    """Return the cache for a folder, always the same one, so that checked objects are not checked again."""
    return Cache(folder, limit_bytes=limit_bytes)


class Cache:
    """A folder of downloaded objects, with a limit for their total size."""

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        """Use a folder, which is created when the first object is downloaded.

        Args:
            folder: The folder; several processes may share it.
            limit_bytes: Maximum total size of objects, including incomplete objects.
        """
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._checked: dict[str, tuple[int, ...]] = {}
        self._digests: dict[str, str] = {}
        self._counted = False

    @contextlib.contextmanager
    def pinned(self, wanted: Wanted, fetch: Fetch) -> Iterator[Path]:
        """Provide the object as a local file until the end of the `with` block.

        Args:
            wanted: The object.
            fetch: Called if the object is not in the cache, or its entry is damaged.

        Raises:
            UserError: the object is larger than the limit, the disk is full or not writable, or `fetch` fails.
            BusyError: other readers did not release enough space in time.
        """
        path, stream = self._acquire(wanted, fetch, wait_s=WAIT_S)
        with stream:
            yield path

    def prefetch(self, wanted: Wanted, fetch: Fetch) -> None:
        """Download an object that will be read soon; do nothing if there is not enough space now."""
        with contextlib.suppress(BusyError):
            self._acquire(wanted, fetch, wait_s=0.0)[1].close()

    def known_sha256(self, wanted: Wanted) -> str | None:
        """Return the SHA-256 of an object if this process has used it, even if it was evicted since; else None."""
        return self._digests.get(wanted.key)

    def _acquire(self, wanted: Wanted, fetch: Fetch, *, wait_s: float) -> tuple[Path, BinaryIO]:
        until_s = time.monotonic() + wait_s
        with self._faults_named(wanted):
            while (found := self._pin(wanted)) is None:
                self._fetch(wanted, fetch, until_s=until_s)
        return found

    def _pin(self, wanted: Wanted) -> tuple[Path, BinaryIO] | None:
        """Lock the object's entry and return it; None if it does not exist or is damaged."""
        path = self._entry(wanted.key)
        if path is None:
            return None
        try:
            stream = path.open("rb")
        except FileNotFoundError:
            return None
        fcntl.flock(stream, fcntl.LOCK_SH)
        status = os.fstat(stream.fileno())
        # The entry may have been evicted after it was found and before it was locked.
        if status.st_nlink and self._is_good(wanted, path, status):
            # Eviction goes by the access time; the modification time remains the time of the download.
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
        """Return whether an entry can be used: this process knows it is good, or its checksum is right."""
        key, now = wanted.key, (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._checked.get(key) == now:
            return True
        if status.st_mtime_ns < wanted.mtime_ns + SETTLED_S * 1e9:
            return False
        if sha256_file(path) != sha256_in(path):
            _LOG.warning(
                "the copy of %s in the cache is damaged; it is downloaded again", wanted.location
            )
            return False
        self._note(key, path, now)
        return True

    def _note(self, key: str, path: Path, status: tuple[int, ...]) -> None:
        self._checked[key] = status
        self._digests[key] = sha256_in(path)

    def _fetch(self, wanted: Wanted, fetch: Fetch, *, until_s: float) -> None:
        if wanted.size_bytes > self._limit_bytes:
            raise UserError(
                f"{wanted.location} must not be larger than data.cache_bytes, {self._limit_bytes:,}",
                got=Plain(f"an object of {wanted.size_bytes:,} bytes"),
                fix=f"Set data.cache_bytes to at least {wanted.size_bytes:,}, or split the file.",
            )
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with alone(self._slot(wanted.key)):
            # Another process may have downloaded the object while this one waited for the lock.
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
        """Reserve space for an object; evict the least recently used objects if necessary."""
        while True:
            with self._alone():
                used = self._used()
                if part.exists():  # left by a killed process, because this one holds the lock
                    used -= part.stat().st_size
                    part.unlink()
                if used + wanted.size_bytes > self._limit_bytes:
                    used = self._evicted(wanted.size_bytes)
                if used + wanted.size_bytes <= self._limit_bytes:
                    # `used` is written first: if this process is killed in between, it is too large, never too small.
                    self._write_used(used + wanted.size_bytes)
                    _allocate(part, wanted.size_bytes)
                    return
            if time.monotonic() >= until_s:
                raise BusyError(
                    f"data.cache_bytes ({self._limit_bytes:,}) must be enough for all files that are read at "
                    "the same time",
                    got=Plain(f"{used:,} bytes in use, and {wanted.size_bytes:,} bytes needed"),
                    fix="Set a larger data.cache_bytes, or wait until other runs have ended.",
                )
            time.sleep(_POLL_S)  # other processes do not announce the end of a read

    def _publish(self, wanted: Wanted, part: Path, digest: str) -> None:
        old, key = self._entry(wanted.key), wanted.key
        final = self._folder / "objects" / key[:3] / f"{key}-{digest}"
        with self._alone():
            final.parent.mkdir(parents=True, exist_ok=True)
            if old is not None:  # it is damaged, or too recent to be trusted
                size_bytes = old.stat().st_size
                old.unlink()
                self._write_used(self._used() - size_bytes)
            os.replace(part, final)
            status = final.stat()  # while the lock is held: later, the entry may be evicted
        self._note(key, final, (status.st_ino, status.st_size, status.st_mtime_ns))

    def _give_up(self, part: Path, size_bytes: int) -> None:
        with self._alone():
            if part.exists():
                part.unlink()
                self._write_used(self._used() - size_bytes)

    def _evicted(self, need_bytes: int) -> int:
        """Remove the least recently used entries that no reader holds; return the total size of the rest."""
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
        """Return (last use, size, path) of every object, and the total size of objects and parts."""
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
        """Return the number of bytes in use.

        Each process counts them once, because a killed process may leave a wrong number in the file.
        """
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
        """Report a disk error as a `UserError`; for a full disk, with the object, the needed and the free space."""
        try:
            yield
        except OSError as error:
            another = "a different folder with --set data.cache_dir=DIR."
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise UserError(
                    f"data.cache_dir {self._folder} must be a folder that can be written",
                    got=Plain(error.strerror or str(error)),
                    fix=f"Set {another}",
                ) from error
            free = shutil.disk_usage(self._folder).free
            raise UserError(
                f"data.cache_dir {self._folder} must have enough free space for {wanted.location}",
                got=Plain(f"{wanted.size_bytes:,} bytes needed, {free:,} bytes free"),
                fix=f"Free some space there, or set {another}",
            ) from error


def sha256_in(path: Path) -> str:
    """Return the SHA-256 that the name of an entry's file contains."""
    return path.name.partition("-")[2]


def _allocate(part: Path, size_bytes: int) -> None:
    """Reserve the space on the disk, so that a full disk is found before the download."""
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
        with open(path, "rb") as stream:  # noqa: PTH123 - there may be thousands, and a Path is slower
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    except (BlockingIOError, FileNotFoundError):
        return False
    return True


def _remove_orphan(part: Path, slot: Path) -> None:
    """Remove a part that a killed process left; if its lock is held, it is being downloaded, and is kept."""
    with contextlib.suppress(BlockingIOError, FileNotFoundError), slot.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.unlink(missing_ok=True)
