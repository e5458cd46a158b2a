"""Counters that outlive their process: rows of floats by key, in a mapped file that other processes read.

The counts of a killed worker are not lost, because the kernel keeps the pages of the file. The next worker with the
same file continues from these counts, so no counter decreases.

The file is a sequence of chunks. A chunk is a sequence of rows. A row has a head (length of the key in bytes, number of
values), the key, padded to 8 bytes, and the values. The head is written last. So a head of zeros means the end of the
chunk, and a reader never reads a partial row.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from stoker.serve.runtime.gil_yield import YieldGil, no_yield

_CHUNK_BYTES = 1 << 20
"""Bytes by which the file grows; a row is always within one chunk."""

_HEAD = struct.Struct("<II")
_ALIGN = 8


class SharedCounters:
    """The rows of one process; only this process writes them."""

    def __init__(self, path: Path | None = None) -> None:
        """Args: path: the file; existing rows are continued. None: only in memory."""
        self._lock = threading.Lock()
        self._rows: dict[str, memoryview[float]] = {}
        self._file = None if path is None else os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._chunk = memoryview(b"")
        self._chunks = 0
        self._used = 0
        if self._file is not None:
            for _ in range(os.fstat(self._file).st_size // _CHUNK_BYTES):
                self._next_chunk()
                for key, start, size in _rows_in(self._chunk):
                    self._rows[key] = _values(self._chunk, start, size)
                    self._used = start + size * _ALIGN

    def row(self, key: str, size: int) -> memoryview[float]:
        """Return the row of a key, zeros if it is new. All readers see values that are written to it.

        Args:
            key: Name of the row; not empty.
            size: Number of floats of the row; always the same for a key.
        """
        with self._lock:
            found = self._rows.get(key)
            if found is None or len(found) != size:
                found = self._rows[key] = self._added(key, size)
            return found

    def has_room(self, key: str, *, max_rows: int) -> bool:
        """Return whether a key has a row, or fewer than `max_rows` rows exist."""
        with self._lock:
            return key in self._rows or len(self._rows) < max_rows

    def rows(self) -> dict[str, list[float]]:
        """Return key -> values, of all rows."""
        with self._lock:
            rows = dict(self._rows)
        return {key: list(values) for key, values in rows.items()}

    def close(self) -> None:
        """Close the file. The rows stay usable."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _added(self, key: str, size: int) -> memoryview[float]:
        if self._file is None:
            return memoryview(bytearray(size * _ALIGN)).cast("d")
        raw = key.encode()
        start = self._used + _HEAD.size + _padded(len(raw))
        end = start + size * _ALIGN
        if end > len(self._chunk):
            self._next_chunk()
            start = _HEAD.size + _padded(len(raw))
            end = start + size * _ALIGN
        head = start - _padded(len(raw)) - _HEAD.size
        self._chunk[head + _HEAD.size : head + _HEAD.size + len(raw)] = raw
        self._chunk[head : head + _HEAD.size] = _HEAD.pack(len(raw), size)
        self._used = end
        return _values(self._chunk, start, size)

    def _next_chunk(self) -> None:
        assert self._file is not None
        begin = self._chunks * _CHUNK_BYTES
        self._chunks += 1
        if os.fstat(self._file).st_size < begin + _CHUNK_BYTES:
            os.ftruncate(self._file, begin + _CHUNK_BYTES)
        self._chunk = memoryview(mmap.mmap(self._file, _CHUNK_BYTES, offset=begin))
        self._used = 0


def read_counters(path: Path, yield_gil: YieldGil = no_yield) -> dict[str, list[float]]:
    """Return key -> values, of all rows in another process's file; empty if the file is missing.

    Args:
        path: The file.
        yield_gil: Called often.
    """
    try:
        raw = memoryview(path.read_bytes())
    except FileNotFoundError:
        return {}
    found = {}
    for begin in range(0, len(raw) - _CHUNK_BYTES + 1, _CHUNK_BYTES):
        chunk = raw[begin : begin + _CHUNK_BYTES]
        for key, start, size in _rows_in(chunk):
            found[key] = list(_values(chunk, start, size))
            yield_gil()
    return found


def _rows_in(chunk: memoryview) -> Iterator[tuple[str, int, int]]:
    """Yield the key, the offset of the values, and their number, of every row in a chunk."""
    place = 0
    while place + _HEAD.size <= len(chunk):
        key_bytes, size = _HEAD.unpack_from(chunk, place)
        if not key_bytes:
            return
        key = place + _HEAD.size
        start = key + _padded(key_bytes)
        yield bytes(chunk[key : key + key_bytes]).decode(), start, size
        place = start + size * _ALIGN


def _values(chunk: memoryview, start: int, size: int) -> memoryview[float]:
    return chunk[start : start + size * _ALIGN].cast("d")


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
