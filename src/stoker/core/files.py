"""Files that are either complete or absent, and whose damage is detected.

Everything that a run publishes goes through `write_atomic` or `publish_folder`. In a job, both functions first check
that no later start of the job has begun (`incarnation`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stoker.core.errors import DataError, Plain, UserError
from stoker.core.incarnation import own_incarnation, require_newest
from stoker.core.lock_file import take_lock

_READ_BYTES = 1 << 20
"""Bytes read at a time when a file is hashed: so many that the system calls cost almost nothing."""


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def fsync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk; without this a rename may be lost in a power failure."""
    _fsync(folder)


def _fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def full_disk_is_named(
    target: Path, *, need_bytes: Callable[[], int | None] = lambda: None
) -> Iterator[None]:
    """Turn "no space left on device" into an error that says how much space is free.

    Args:
        target: The file or folder that is written.
        need_bytes: Called for the error; returns how many more bytes have to be written, None if unknown.
    """
    try:
        yield
    except FullDisk as inner:
        # The writer of a small file does not know how much more follows.
        if inner.need_bytes is not None or need_bytes() is None:
            raise
        raise FullDisk(target, need_bytes=need_bytes()) from inner
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise FullDisk(target, need_bytes=need_bytes()) from error


_IN_THE_WAY = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST),
    *(errno.ELOOP, errno.ENAMETOOLONG),
)


@contextlib.contextmanager
def writable(folder: Path, *, what: str, fix: str) -> Iterator[None]:
    """Turn errors of creating a folder, or of writing in it, into one line.

    Args:
        folder: The folder.
        what: Its name for messages, e.g. "the runs folder".
        fix: The next action.

    Raises:
        UserError: the disk is full or read-only, the folder belongs to another user, a file has the folder's name, or
            the name is not allowed.
    """
    try:
        with full_disk_is_named(folder):
            yield
    except OSError as error:
        nowhere = error.errno == errno.ENOENT and not folder.exists()
        if error.errno not in _IN_THE_WAY and not nowhere:
            raise
        raise UserError(
            f"{what} {folder} must be a folder that can be written",
            got=Plain(error.strerror or str(error)),
            fix=fix,
        ) from None


class FullDisk(UserError):
    """The disk is full; no partly written file is visible."""

    def __init__(self, target: Path, *, need_bytes: int | None) -> None:
        """Build the message from the free space on the disk of `target` and from the space that is still needed."""
        self.need_bytes = need_bytes
        folder = next(parent for parent in [target, *target.parents] if parent.exists())
        needed = (
            "" if need_bytes is None else f", and about {need_bytes:,} bytes more to be written"
        )
        super().__init__(
            f"the disk that holds {target} must have room for it",
            got=Plain(f"{shutil.disk_usage(folder).free:,} bytes free{needed}"),
            fix="Free some space, or write elsewhere (a run: --set runs=DIR), and run it again.",
        )


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a file so that a reader sees the old or the new content, never a part of it.

    Raises:
        UserError: the disk is full; the old file is untouched.
        Superseded: a later start of this process's job has begun; the old file is untouched.
    """
    raw = content.encode() if isinstance(content, str) else content
    with full_disk_is_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(raw)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(name, 0o644)
            require_newest()
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
    fsync_folder(path.parent)


def write_json(path: Path, value: object) -> None:
    """Write a value as sorted JSON, atomically; NaN is an error, because it is not JSON."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file that Stoker wrote.

    Raises:
        DataError: the file does not exist, is truncated or is not JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(
            f"{path} must exist", got=Plain("no such file"), fix="Run the stage that writes it."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} must be whole JSON",
            got=Plain(str(error)),
            fix="It was damaged: delete it, and run the stage that writes it again.",
        ) from error


@contextlib.contextmanager
def alone(lock: Path, *, give_up_s: float | None = None) -> Iterator[None]:
    """Wait for a lock file, and hold it inside the block; the kernel frees it if the process dies.

    Args:
        lock: The file.
        give_up_s: Maximum wait, seconds; None: no limit.

    Raises:
        BusyError: another process held the lock all this time.
    """
    with full_disk_is_named(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        stream = take_lock(lock, give_up_s=give_up_s)
    with stream:
        yield


@contextlib.contextmanager
def lasting_folder(final: Path, key: str) -> Iterator[Path]:
    """Yield a hidden folder next to `final`; if this process is killed, the next one finds the folder by its key.

    Folders of other keys are removed, because no process would continue their work. At the end of the block the folder
    is removed if it holds no file, unless it was renamed. In a job the name of the folder also depends on the start of
    the job, so that an earlier start that wakes up cannot touch the files of a later one.

    Args:
        final: The final path of the content.
        key: Identifies the work to continue, hexadecimal digits.
    """
    own, same = own_incarnation(), f".{final.name}.{key[:12]}."
    folder = final.parent / f"{same}{f'{own.number}.' if own else ''}partial"
    with full_disk_is_named(final):
        require_newest()
        for other in final.parent.glob(f".{final.name}.*.partial"):
            if other.name.startswith(same) and not folder.exists():
                os.rename(other, folder)
            elif other != folder:
                remove(other)
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        if folder.is_dir() and not list_files(folder):
            remove(folder)


def sweep(folder: Path, name: str) -> None:
    """Remove the partial files that a killed writer of `name` (`*`: any name) left in a folder.

    Call it only if no other process writes there. The one exception is an earlier start of the same job: it must not
    publish anything more, so its partial files are removed too.

    Raises:
        Superseded: a later start of this process's job has begun.
    """
    require_newest()
    for left in folder.glob(f".{name}.*.tmp"):
        remove(left)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def list_files(folder: Path) -> list[Path]:
    """Return all regular files below a folder, sorted by the bytes of their relative names."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(found, key=lambda path: os.fsencode(path.relative_to(folder).as_posix()))


def hash_folder(folder: Path) -> dict[str, str]:
    """Return relative name -> SHA-256 of every file below a folder, sorted by name."""
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in list_files(folder)}


def fsync_tree(folder: Path) -> None:
    """Flush every file and every name below a folder to disk."""
    for path in list_files(folder):
        _fsync(path)
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir() and not path.is_symlink():
            fsync_folder(path)


def publish_folder(made: Path, final: Path) -> None:
    """Rename a finished folder to its final name in one step; `final` must be absent or empty.

    Raises:
        FileExistsError: `final` exists and is not empty.
        Superseded: a later start of this process's job has begun.
    """
    fsync_tree(made)
    final.parent.mkdir(parents=True, exist_ok=True)
    require_newest()
    try:
        os.rename(made, final)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(f"{final} exists already") from error
        raise
    fsync_folder(final.parent)


@contextlib.contextmanager
def scratch_folder(near: Path) -> Iterator[Path]:
    """Yield a new hidden folder next to `near`; it is removed at the end unless it was renamed."""
    with full_disk_is_named(near):
        near.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{near.name}.", suffix=".tmp", dir=near.parent))
        os.chmod(folder, 0o755)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
