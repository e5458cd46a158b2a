"""XLA's compiled programs on disk, for the next process: verified, private, and bounded.

A cached program is machine code. A damaged program fails the step or kills the process, and TensorFlow does not verify
what it reads. So TensorFlow never works in the store itself:

- The store, `xla/<key>/store`, holds files whose SHA-256 is in `xla/<key>/manifest.json`. The key is a hash of GPUs,
driver, CPU, TensorFlow version and flags.
- A new process links every file of its key into its own folder, `xla/<key>/work-<random>`, and removes the links to
files that do not match the manifest. TensorFlow reads and writes in this folder.
- `publish` moves the files that TensorFlow has written since then into the store: first the files, then the manifest.
  It runs after each compilation and at the end of the process. Files that a killed process had not yet published are
  deleted, because they may be incomplete.
- A lock protects the store. While a process holds it, it neither hashes a file nor flushes one to disk, so that
processes that start together can check their files in parallel.

Not yet tested: whether TensorFlow 2.21 can load a cached program on a GPU. If it cannot, only the folder with XLA's
autotuning results saves time there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from stoker.core.errors import DataError, UserError
from stoker.core.files import read_json, remove, sha256_file, write_json
from stoker.core.fingerprint import fingerprint

_LOG = logging.getLogger("stoker")

MAX_BYTES = 2 << 30
"""Maximum size of the files of all keys together; the least recently used files are removed first."""

MIN_FREE_BYTES = 256 << 20
"""With less free space on the disk, no cache is used: TensorFlow fails a step whose program it cannot write."""

_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it
"""Folder that Linux keeps in memory."""

LOCK_S = 10.0
"""Maximum wait for another process that uses the store, seconds; then this process runs without a cache."""

PROGRAMS, TUNING = "programs", "autotuning"
"""Kinds of files: compiled programs, and the results of XLA's autotuning for a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """How a process used the cache."""

    found: int
    """Number of programs in the cache when the process began."""

    read: int
    """Number of these programs that this process has read; known only if the file system records access times."""

    written: int
    """Number of programs that this process has added."""


class CompileCache:
    """This process's folder of compiled programs."""

    def __init__(self, root: Path, key: Mapping[str, Any]) -> None:
        """Create this process's folder, with links to all intact files of the store.

        Args:
            root: Folder that contains a folder for each key.
            key: Everything that a compiled program depends on, as JSON values.

        Raises:
            OSError: the folder cannot be created here.
        """
        self._root = root
        self._home = root / fingerprint(key)[:16]
        self._store = self._home / "store"
        self._linked: set[str] = set()
        self._done: set[str] = set()
        self._written = 0
        self._in_memory: Path | None = None
        self._held_memory = -1
        self._pid = os.getpid()
        _own_folders(root, self._home, self._store)
        _sweep_memory()
        with _alone(root / "lock"):
            _sweep(root)
            if shutil.disk_usage(root).free < MIN_FREE_BYTES:
                raise OSError(errno.ENOSPC, "little space is left")
            self._work = Path(tempfile.mkdtemp(prefix="work-", dir=self._home))
            # This process and its forks hold the lock; the kernel frees it when the last of them ends.
            self._alive = (self._work / "alive").open("w")
            fcntl.flock(self._alive, fcntl.LOCK_EX)
            try:
                write_json(self._home / "key.json", dict(key))
                held = self._hold()
                _shrink(root, MAX_BYTES)
            except BaseException:
                self._end()
                raise
        try:
            self._link_what_is_whole(held)
        except BaseException:
            self._end()
            raise

    def folder(self, kind: str) -> Path:
        """Folder in which TensorFlow reads and writes programs."""
        return self._work / kind

    @property
    def used(self) -> Used:
        """How this process has used the cache so far."""
        programs = [name for name in self._linked if name.startswith(PROGRAMS)]
        read = sum(self._was_read(name) for name in programs)
        return Used(found=len(programs), read=read, written=self._written)

    def publish(self) -> None:
        """Move new programs into the store. If the disk is full, none is kept, and no error is raised."""
        if self._in_memory is not None:
            return
        try:
            added = self._durable()
            with _alone(self._root / "lock"):
                self._publish(added)
                _shrink(self._root, MAX_BYTES)
        except (OSError, UserError) as error:
            _LOG.info("compiled programs are not cached: %s", error)

    def go_on_in_memory(self) -> None:
        """Redirect TensorFlow's folder into memory; programs written there are not kept.

        If TensorFlow cannot write a program, it fails the step, and its folder can be set only once. So the folder is
        replaced by a link into memory.
        """
        folder = self.folder(PROGRAMS)
        if self._in_memory is not None:
            raise FileExistsError(f"{folder} is already in memory, which is full, too")
        self._in_memory, self._held_memory = _memory_folder()
        folder.rename(folder.with_name("full"))
        folder.symlink_to(self._in_memory)

    def close(self) -> None:
        """Publish new programs, and remove this process's folder. A fork does nothing: its parent does it."""
        if os.getpid() != self._pid:
            return
        self.publish()
        self._end()

    def _end(self) -> None:
        remove(self._work)
        if self._in_memory is not None:
            remove(self._in_memory)
            os.close(self._held_memory)
        self._alive.close()

    def _durable(self) -> dict[str, dict[str, Any]]:
        """Flush TensorFlow's new files to disk; return their entries for the manifest."""
        added = {}
        for name, path in self._files():
            if name not in self._done:
                _fsync(path)
                added[name] = {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        return added

    def _publish(self, added: Mapping[str, Mapping[str, Any]]) -> None:
        listed = _manifest(self._home)
        now = int(time.time())
        for name in self._linked & set(listed):
            if self._was_read(name):
                listed[name]["used"] = now
        for name, record in added.items():
            self._done.add(name)
            # Another process may have compiled and published the same program in the meantime.
            with contextlib.suppress(FileExistsError):
                os.link(self._work / name, self._store / name)
                listed[name] = {**record, "used": now}
                self._written += name.startswith(PROGRAMS)
        write_json(self._home / "manifest.json", listed)

    def _was_read(self, name: str) -> bool:
        try:
            return (self._work / name).lstat().st_atime > _NEVER_READ
        except OSError:
            return False

    def _files(self) -> Iterator[tuple[str, Path]]:
        for kind in (PROGRAMS, TUNING):
            with os.scandir(self._work / kind) as entries:
                for entry in entries:
                    # TensorFlow writes both kinds of files under a temporary name, and renames them when they are
                    # complete.
                    whole = entry.is_file(follow_symlinks=False) and ".tmp" not in entry.name
                    if whole and entry.stat().st_size:
                        yield f"{kind}/{entry.name}", Path(entry.path)

    def _hold(self) -> dict[str, dict[str, Any]]:
        """Link all files of the store that the manifest lists into `_HELD`; return their entries."""
        listed = _manifest(self._home)
        held = {}
        for kind in (PROGRAMS, TUNING):
            self.folder(kind).mkdir(mode=0o700)
            (self._work / _HELD / kind).mkdir(mode=0o700, parents=True)
            folder = self._store / kind
            folder.mkdir(mode=0o700, exist_ok=True)
            for path in sorted(folder.iterdir()):
                name = f"{kind}/{path.name}"
                record = listed.get(name)
                if record is None or not _looks_whole(path, record):
                    remove(path)
                    continue
                os.link(path, self._work / _HELD / name)
                held[name] = record
        write_json(self._home / "manifest.json", held)
        return held

    def _link_what_is_whole(self, held: Mapping[str, Mapping[str, Any]]) -> None:
        """Link the held files with the right hash into TensorFlow's folder; remove damaged ones from the store."""
        damaged = set()
        for name, record in held.items():
            if sha256_file(self._work / _HELD / name) != record["sha256"]:
                damaged.add(name)
                continue
            # The access time of this link shows whether this process has read the file. The file's own access time
            # would not show it, because all processes share the file.
            link = self._work / name
            link.symlink_to(Path("..", _HELD, name))
            os.utime(link, (_NEVER_READ, link.lstat().st_mtime), follow_symlinks=False)
            self._linked.add(name)
        if damaged:
            with _alone(self._root / "lock"):
                self._remove_damaged(damaged)

    def _remove_damaged(self, names: set[str]) -> None:
        listed = _manifest(self._home)
        for name in names:
            held, stored = self._work / _HELD / name, self._store / name
            # Another process may have removed the file in the meantime, and stored it again.
            if os.path.lexists(stored) and held.samefile(stored):
                remove(stored)
                listed.pop(name, None)
            remove(held)
        write_json(self._home / "manifest.json", listed)


_HELD = "held"
"""Name of the folder with hard links to the store's files. These stay readable if another process removes them from
the store."""

_NEVER_READ = 1.0
"""Access time that a new link gets. A later access time shows that the file was read."""


def _sweep(root: Path) -> None:
    """Remove the folders that ended processes have left, for all keys."""
    for work in root.glob("*/work-*"):
        with contextlib.suppress(OSError), (work / "alive").open("a") as alive:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(work)


_IN_MEMORY = "stoker-programs-"
"""Prefix of the name of a folder in memory."""


def _memory_base() -> Path:
    return _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())


def _memory_folder() -> tuple[Path, int]:
    """Create a folder in memory; return it and its descriptor.

    The descriptor holds the folder's lock. The kernel frees the lock when this process and its forks
    have ended; then `_sweep_memory` of another process removes the folder.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_IN_MEMORY, dir=_memory_base()))
        with contextlib.suppress(FileNotFoundError):
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(held, fcntl.LOCK_EX)
            # Another process may have removed the folder before this one locked it.
            if os.path.lexists(folder):
                return folder, held
            os.close(held)


def _sweep_memory() -> None:
    """Remove the in-memory folders that processes of this user left behind when they ended."""
    for folder in _memory_base().glob(f"{_IN_MEMORY}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.geteuid():
                continue
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(folder)
            finally:
                os.close(held)


def _manifest(home: Path) -> dict[str, dict[str, Any]]:
    """Return the manifest's entries for the valid files of the store: name -> SHA-256, size, and time of last use."""
    try:
        found = read_json(home / "manifest.json")
    except (DataError, OSError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: record for name, record in found.items() if _is_sound(name, record)}


def _is_sound(name: str, record: Any) -> bool:
    kind, _, file = name.partition("/")
    return (
        kind in (PROGRAMS, TUNING)
        and bool(file)
        and "/" not in file
        and isinstance(record, dict)
        and isinstance(record.get("bytes"), int)
        and isinstance(record.get("used"), int)
        and isinstance(record.get("sha256"), str)
    )


def _looks_whole(path: Path, record: Mapping[str, Any]) -> bool:
    """Whether a file has the expected type, owner and size; its content is not checked."""
    facts = path.lstat()
    return (
        stat.S_ISREG(facts.st_mode)
        and facts.st_uid == os.geteuid()
        and facts.st_size == record["bytes"]
    )


def _shrink(root: Path, most_bytes: int) -> None:
    """Remove the least recently used files of all keys, until their total size is within the limit."""
    homes = [path.parent for path in root.glob("*/manifest.json")]
    manifests = {home: _manifest(home) for home in homes}
    files = sorted(
        (record.get("used", 0), home, name, record.get("bytes", 0))
        for home, listed in manifests.items()
        for name, record in listed.items()
    )
    total = sum(size for *_, size in files)
    changed = set()
    for _, home, name, size in files:
        if total <= most_bytes:
            break
        # Remove the file before its entry: an entry without a file does no harm, and is dropped later.
        remove(home / "store" / name)
        del manifests[home][name]
        changed.add(home)
        total -= size
    for home in changed:
        write_json(home / "manifest.json", manifests[home])


def _own_folders(*folders: Path) -> None:
    """Create folders that only this user can write, because files in them are executed.

    Args:
        folders: The folders. Missing parents of the first folder are created, too.

    Raises:
        OSError: one of the folders is a link, or another user can write or replace it.
    """
    for folder in folders:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=folder == folders[0])
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode):
            raise OSError(errno.ENOTDIR, f"{folder} is a link or a file")
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            raise OSError(errno.EPERM, f"{folder} can be written by another user")
        if facts.st_mode & 0o055:
            folder.chmod(0o700)
    for parent in folders[0].resolve().parents:
        facts = parent.stat()
        others = facts.st_mode & 0o002 or (facts.st_mode & 0o020 and facts.st_gid != os.getegid())
        # In a sticky folder such as /tmp, only the owner can replace our files.
        if facts.st_uid not in (0, os.geteuid()) or (others and not facts.st_mode & stat.S_ISVTX):
            raise OSError(errno.EPERM, f"{parent} can be written by another user")


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    give_up_s = time.monotonic() + LOCK_S
    with lock.open("a") as stream:
        while not _locked(stream):
            if time.monotonic() > give_up_s:
                raise OSError(errno.EAGAIN, f"{lock} is held by another process")
            time.sleep(0.05)  # flock has no timeout
        yield


def _locked(stream: IO[str]) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _fsync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
