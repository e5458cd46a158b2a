"""A state that processes and machines share through a folder, without a database and without comparing clocks.

folder/00000001.json ...        one file for each change; the highest number is the current state

A file appears complete or not at all, because it is written under another name and then linked. If two writers create
the same number, one succeeds; the other must read the new state. So all changes have one order, and the files are the
history.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.core.errors import DataError, Plain, UserError
from stoker.core.files import fsync_folder, writable
from stoker.core.fingerprint import fingerprint

_log = logging.getLogger(__name__)

_DIGITS = 8
_NAME = re.compile(rf"([0-9]{{{_DIGITS}}})\.json")
_SCRATCH = re.compile(rf"\.([0-9]{{{_DIGITS}}})\.json\..*\.tmp")

_RESERVE = ".reserve"
_RESERVE_BYTES = 16 << 10
"""Disk space reserved for one urgent change on a full disk, bytes; a state takes about 3 KiB."""


class Conflict(Exception):
    """Another writer changed the state first: read the state and decide again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A state and its number in the sequence."""

    number: int
    content: Mapping[str, Any]


class StateFiles:
    """The states in a folder; processes on many machines may use it at the same time."""

    def __init__(self, folder: Path) -> None:
        """Args: folder: Folder of the files; the first `append` creates it."""
        self._folder = folder
        self._latest: Stored | None = None

    def latest(self) -> Stored | None:
        """Return the newest state; None if no state was written yet.

        It opens files of increasing numbers until one is missing: over NFS, neither a folder's modification time nor a
        notification shows that another machine has just created a file. A state whose file was removed, as the message
        about a damaged file tells users to do, is dropped.

        Raises:
            DataError: a file is damaged or unreadable; the caller may continue to use the last state.
            FileNotFoundError: a state existed, but no file is left, for example because a mount was lost.
        """
        known = self._latest
        if known is None or self._is_replaced(known):
            self._latest = self._read(max(self._numbers(), default=0))
            if known is not None and self._latest is None:
                self._latest = known
                raise FileNotFoundError(errno.ENOENT, "the state is gone", str(self._folder))
        while (following := self._read(self._next())) is not None:
            self._latest = following
        return self._latest

    def append(
        self, content: Mapping[str, Any], *, after: Stored | None, is_urgent: bool = False
    ) -> Stored:
        """Append a state, which becomes the newest.

        Args:
            content: A JSON object.
            after: The state that was changed; None for the first state.
            is_urgent: Whether the change may use the space that is reserved for a full disk.

        Raises:
            Conflict: `after` is no longer the newest state.
            UserError: the disk is full or read-only, or the file system has no hard links.
        """
        number = 1 if after is None else after.number + 1
        text = json.dumps({**content, "sha256": fingerprint(content)}, indent=1, sort_keys=True)
        fix = "Run it as a user who may write there; nothing has changed."
        with writable(self._folder, what="the state of a rollout", fix=fix):
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                _create(self._path(number), text.encode())
            except OSError as error:
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                if not (is_urgent and is_full and self._reserve.exists()):
                    raise
                self._reserve.unlink()
                _create(self._path(number), text.encode())
            self._sweep(number)
            self._keep_reserve()
        self._latest = Stored(number=number, content=content)
        return self._latest

    def latest_whole(self) -> Stored | None:
        """Return the newest undamaged state; None if no state is left."""
        for number in sorted(self._numbers(), reverse=True):
            with contextlib.suppress(DataError):
                return self._read(number)
        return None

    def history(self) -> Iterator[Stored]:
        """Return all states, oldest first. A damaged state is left out and logged, unless it is the newest.

        Raises:
            DataError: the newest state is damaged.
        """
        numbers = sorted(self._numbers())
        for number in numbers:
            try:
                stored = self._read(number)
            except DataError as error:
                if number == numbers[-1]:
                    raise
                _log.error("the history lacks a change: %s", error.line())
                continue
            if stored is not None:
                yield stored

    @property
    def _reserve(self) -> Path:
        return self._folder / _RESERVE

    def _keep_reserve(self) -> None:
        with contextlib.suppress(OSError):  # the disk is full: the next change tries again
            if not self._reserve.exists() or self._reserve.stat().st_size < _RESERVE_BYTES:
                # Random bytes, because a compressing file system would reserve no space for zeros.
                self._reserve.write_bytes(os.urandom(_RESERVE_BYTES))

    def _next(self) -> int:
        return 1 if self._latest is None else self._latest.number + 1

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:0{_DIGITS}}.json"

    def _numbers(self) -> list[int]:
        return [number for _, number in self._found(_NAME)]

    def _found(self, pattern: re.Pattern[str]) -> list[tuple[Path, int]]:
        """Return number -> file, for the files of one kind."""
        try:
            found = [(path, pattern.fullmatch(path.name)) for path in self._folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(self._folder, error) from error
        return [(path, int(match[1])) for path, match in found if match is not None]

    def _is_replaced(self, known: Stored) -> bool:
        """Return whether a state's file now has another content than when it was read."""
        with contextlib.suppress(DataError):
            return self._read(known.number) != known
        return False

    def _sweep(self, number: int) -> None:
        """Remove temporary files of killed writers. A slow writer that loses its file this way gets a `Conflict`."""
        for path, theirs in self._found(_SCRATCH):
            if theirs <= number:
                path.unlink(missing_ok=True)

    def _read(self, number: int) -> Stored | None:
        path = self._path(number)
        try:
            content = json.loads(path.read_bytes())
            digest = content.pop("sha256")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(path, error) from error
        except (ValueError, KeyError, AttributeError, TypeError):
            digest, content = "", None
        if content is None or digest != fingerprint(content):
            raise DataError(
                f"{path} is damaged",
                got=Plain("bytes that differ from the written ones"),
                fix=f"Restore it from a backup, or delete it to go back to state {number - 1}.",
            )
        return Stored(number=number, content=content)


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        "The state of a rollout must be readable",
        got=Plain(f"{path}: {error.strerror or type(error).__name__}"),
        fix="Run Stoker as a user who may read the file, or restore the file from a backup.",
    )


def _create(path: Path, content: bytes) -> None:
    """Create a file in one step; it must not exist yet."""
    # The temporary name is unique: two threads of a process, or containers with the same process number, may write at
    # once.
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    scratch = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
        try:
            os.link(scratch, path)
        except FileNotFoundError:  # the writer that was first has removed the file
            raise Conflict from None
        except FileExistsError:
            # Over NFS, the client may repeat the request and get this error for the link that it has created itself.
            if not _is_linked(scratch):
                raise Conflict from None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
            raise UserError(
                "The state of a rollout needs a file system with hard links",
                got=str(path.parent),
                fix="Keep the model repository on a local disk or on NFS.",
            ) from None
    finally:
        scratch.unlink(missing_ok=True)
    fsync_folder(path.parent)


def _is_linked(scratch: Path) -> bool:
    # the file was removed: the link is another writer's state
    with contextlib.suppress(FileNotFoundError):
        return scratch.stat().st_nlink == 2
    return False
