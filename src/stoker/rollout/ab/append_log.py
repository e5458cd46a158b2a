"""Logs in JSON Lines. Each process writes its own files; `kill -9` of a process loses no line.

folder/<name>-0001.jsonl ...        at most 16 MiB each

A line is written by one system call, so the kernel has it when the call returns: only a crash of the machine can lose
or cut it. Readers leave out and count incomplete lines.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.core.files import full_disk_is_named

FILE_BYTES = 16 << 20
"""Size at which the next file begins, bytes."""

_READ_BYTES = 4 << 20
"""Number of bytes read at a time."""


class LogWriter:
    """Appends lines to `<name>-0001.jsonl` and the files that follow; used by one thread at a time."""

    def __init__(self, folder: Path, name: str, *, file_bytes: int = FILE_BYTES) -> None:
        """Create a writer; the first line creates its file.

        Args:
            folder: Folder of the files.
            name: Name of the files, unique among all processes that write to the folder at the same time.
            file_bytes: Size at which the next file begins, bytes.
        """
        self._folder, self._name, self._file_bytes = folder, name, file_bytes
        self._file: int | None = None
        self._size = 0
        self._number = 0
        self._is_synced = True

    def append(self, lines: Sequence[bytes]) -> None:
        """Append all of the lines, or none of them.

        Args:
            lines: Lines without line ends.

        Raises:
            UserError: the disk is full.
            OSError: the folder cannot be written.
        """
        with full_disk_is_named(self._folder):
            file = self._open()
            raw = b"".join(line + b"\n" for line in lines)
            written = 0
            try:
                while written < len(raw):
                    written += os.write(file, raw[written:])
            except OSError:
                os.ftruncate(file, self._size)
                raise
            self._size += written
            self._is_synced = False

    def sync(self) -> None:
        """Flush the appended lines to the disk."""
        handle = self.to_sync()
        if handle is not None:
            sync_and_close(handle)

    def to_sync(self) -> int | None:
        """Return a copy of the file's handle for `sync_and_close`, in any thread; None if all lines are flushed."""
        if self._file is None or self._is_synced:
            return None
        self._is_synced = True
        return os.dup(self._file)

    def close(self) -> None:
        """Flush, and close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self.sync()
            os.close(self._file)
        self._file = None

    def _open(self) -> int:
        """Return the handle of the current file, or of a new one if the current file is full."""
        if self._file is not None and self._size < self._file_bytes:
            return self._file
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            self._number += 1
            path = self._folder / f"{self._name}-{self._number:04d}.jsonl"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._size = os.fstat(file).st_size
            if self._size < self._file_bytes:
                break
            os.close(file)
        if self._size and os.pread(file, 1, self._size - 1) != b"\n":
            self._size += os.write(file, b"\n")  # end a line that was cut when the machine crashed
        self._file = file
        return file


def sync_and_close(handle: int) -> None:
    """Flush a file to the disk, which may take long, and close this handle."""
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(kw_only=True, slots=True)
class _Position:
    """Position up to which a file has been read."""

    offset: int = 0
    is_cut: bool = False


class LogReader:
    """Reads the lines of all writers. Each call continues where the last one stopped."""

    def __init__(self, folder: Path, pattern: str) -> None:
        """Create a reader that starts at the beginning of each file.

        Args:
            folder: Folder of the files.
            pattern: Glob pattern of the files' names, such as `outcomes-*`.
        """
        self._folder, self._pattern = folder, f"{pattern}.jsonl"
        self._positions: dict[str, _Position] = {}

    @property
    def cut(self) -> int:
        """Number of files whose last line is incomplete and was left out."""
        return sum(each.is_cut for each in self._positions.values())

    def blocks(self, *, but: str = "") -> Iterator[bytes]:
        """Yield blocks of complete lines that were not read yet, in the order of each file.

        Args:
            but: Files whose names start with this are left out.
        """
        for path in sorted(self._folder.glob(self._pattern)):
            if but and path.name.startswith(but):
                continue
            position = self._positions.setdefault(path.name, _Position())
            with contextlib.suppress(FileNotFoundError):
                yield from self._blocks(path, position)

    @staticmethod
    def _blocks(path: Path, position: _Position) -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(position.offset)
            rest = b""
            while block := file.read(_READ_BYTES):
                lines, end, rest = (rest + block).rpartition(b"\n")
                if end:
                    position.offset += len(lines) + 1
                    yield lines + end
            position.is_cut = bool(rest)


def objects_of(block: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line; a line that is not a JSON object is left out."""
    for line in block.splitlines():
        with contextlib.suppress(ValueError):
            content = json.loads(line)
            if isinstance(content, dict):
                yield content
