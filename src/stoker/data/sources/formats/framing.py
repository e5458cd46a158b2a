"""TFRecord's framing: checks every length and checksum before TensorFlow sees a byte.

A record is its length (uint64), the length's check (uint32), the payload and the payload's check;
a check is a masked CRC32C, all little-endian. A file may be plain, gzip or zlib; its first bytes
say which, not its name.

TensorFlow trusts a header of 64 GiB and crashes, and accepts a file that is truncated inside its last
header as complete. Here each fault is a `Damage` with record and byte, and the records after it are
found again: by the length if its check holds, else by searching for the next position at which both
checks of a record hold, which happens by chance once in 2^64 positions.

Source: tensorflow/core/lib/io/record_writer.h; tensorflow/core/lib/hash/crc32c.h (the mask); RFC
3720, B.4 (CRC32C).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import DataError, Plain
from stoker.data.sources.files.file_kind import (
    CHUNK_BYTES,
    Unpacked,
    is_packed,
    kind_of,
    plain_chunks,
    unpacked_head,
)

HEADER, LENGTH, CHECK = struct.Struct("<QI"), struct.Struct("<Q"), struct.Struct("<I")
"""Structures of a record's header: its length and the length's check; and each of them alone."""

_MASK_DELTA = 0xA282EAD8


def masked_crc(data: bytes) -> int:
    """The checksum that TFRecord stores for some bytes."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def header_holds(head: bytes) -> bool:
    """True if some bytes begin with a length and its checksum."""
    if len(head) < HEADER.size:
        return False
    return masked_crc(head[:8]) == CHECK.unpack_from(head, 8)[0]


def headers_in(window: NDArray[np.uint8]) -> NDArray[np.intp]:
    """[found] the positions of lengths followed by their checksum.

    A CRC is linear: that of eight bytes is the exclusive or of one term for each of them.
    """
    count = len(window) - HEADER.size + 1
    crc = np.full(count, _CRC_OF_ZEROS, np.uint32)
    stored = np.zeros(count, np.uint32)
    for index in range(8):
        crc ^= _CRC_TERMS[index][window[index : index + count]]
    for index in range(4):
        stored |= window[8 + index : 8 + index + count].astype(np.uint32) << np.uint32(8 * index)
    masked = (crc >> np.uint32(15) | crc << np.uint32(17)) + np.uint32(_MASK_DELTA)
    return np.flatnonzero(masked == stored)


def _crc_terms() -> NDArray[np.uint32]:
    """[8, 256] how each value of each byte of a length changes the CRC of a zero length."""
    terms = [
        [google_crc32c.value(LENGTH.pack(value << 8 * index)) for value in range(256)]
        for index in range(8)
    ]
    return np.array(terms, np.uint32) ^ _CRC_OF_ZEROS


_CRC_OF_ZEROS = np.uint32(google_crc32c.value(bytes(8)))
_CRC_TERMS = _crc_terms()


MAX_RECORD_BYTES = 256 << 20
"""Longest record that is read: memory is allocated only for lengths up to this."""

BLOCK_BYTES = 16 << 20
"""Payload that is returned at a time, unless a single record is longer."""

BLOCK_RECORDS = 8192
"""Most records that are returned at a time."""

_MIN_BYTES = HEADER.size + CHECK.size
_HEAD_BYTES = 512
"""Bytes of a compressed file that suffice to decompress its first header."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A position in a TFRecord file without a complete record."""

    row: int
    """1-based number of the record expected there, as far as records can be counted."""

    offset: int
    """Its first byte, counted in the file, or in the decompressed content."""

    reason: str
    """What is wrong there, and the number of bytes skipped if they are more than the record."""

    def __str__(self) -> str:
        return f"at byte {self.offset:,}: {self.reason}"


@dataclass(kw_only=True, slots=True)
class Frames:
    """Some records of one file, in order."""

    payloads: list[bytes] = field(default_factory=list)
    """The complete records."""

    rows: list[int] = field(default_factory=list)
    """The 1-based number of each in the file."""

    damages: list[Damage] = field(default_factory=list)
    """The damaged parts between them."""


def read_frames(path: Path, *, location: str) -> Iterator[Frames]:
    """All records of a TFRecord file, in blocks of bounded size.

    Args:
        path: The file.
        location: Its name in messages.

    Raises:
        DataError: the file is empty, is not a TFRecord, or its gzip or zlib data is damaged.
    """
    reader = _Reader(path, location)
    yield from reader.blocks()
    if not reader.is_tfrecord:
        raise _no_tfrecord(path, location)


class _Buffer:
    """The part of a stream that is in memory."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.data = b""
        self.at = 0
        self._chunks = chunks
        self._start = 0

    @property
    def offset(self) -> int:
        """Position of `at` in the stream."""
        return self._start + self.at

    @property
    def left(self) -> int:
        """Number of bytes in memory."""
        return len(self.data) - self.at

    def has(self, size: int) -> bool:
        """Read until this many bytes are in memory; False if the stream ends before."""
        if self.left >= size:
            return True
        parts, have = [self.data[self.at :]], self.left
        for chunk in self._chunks:
            parts.append(chunk)
            have += len(chunk)
            if have >= size:
                break
        self._start, self.at, self.data = self.offset, 0, b"".join(parts)
        return have >= size


class _Reader:
    """Walks through one file from record to record."""

    def __init__(self, path: Path, location: str) -> None:
        self.is_tfrecord = False
        self._location = location
        self._unpacked = Unpacked(path, location=location) if _is_packed(path) else None
        self._size = path.stat().st_size
        self._buffer = _Buffer(iter(self._unpacked or plain_chunks(path)))
        self._row = 1

    def blocks(self) -> Iterator[Frames]:
        """Yield all records, in order."""
        buffer = self._buffer
        while buffer.has(1):
            frames, until = Frames(), buffer.offset + BLOCK_BYTES
            while len(frames.rows) + len(frames.damages) < BLOCK_RECORDS and buffer.offset < until:
                self._read_next(frames)
                if not buffer.has(1):
                    break
            yield frames
        if self._unpacked is not None and self._unpacked.is_cut:
            # The number of lost records is unknown, so `data.max_bad_rows` cannot permit it.
            raise DataError(
                f"{self._location} must be whole gzip or zlib data",
                got=Plain(f"a file that is cut, the last record in it being {self._row - 1:,}"),
                fix="Fetch or write the file again.",
            )

    def _read_next(self, frames: Frames) -> None:
        """Read the next record, or describe the damage at its position."""
        buffer = self._buffer
        buffer.has(HEADER.size)
        head = buffer.data[buffer.at : buffer.at + HEADER.size]
        offset, length, reason = buffer.offset, 0, ""
        if header_holds(head):
            self.is_tfrecord = True
            (length,) = LENGTH.unpack_from(head)
            reason = self._length_fault(length)
        elif len(head) < HEADER.size:
            reason = f"the file ends inside a header, {len(head)} of {HEADER.size} bytes"
        else:
            reason = "the checksum of the length is wrong"
        if reason:
            reason += self._find_next()
        else:
            start = buffer.at + HEADER.size
            payload = buffer.data[start : start + length]
            (check,) = CHECK.unpack_from(buffer.data, start + length)
            buffer.at = start + length + CHECK.size
            if masked_crc(payload) == check:
                frames.payloads.append(payload)
                frames.rows.append(self._row)
            else:
                reason = "the checksum of the payload is wrong"
        if reason:
            frames.damages.append(Damage(row=self._row, offset=offset, reason=reason))
        self._row += 1

    def _length_fault(self, length: int) -> str:
        """Return why no record of this length starts here, "" if one does; read until its end."""
        size, buffer = length + _MIN_BYTES, self._buffer
        # The decompressed size is not known before.
        fits = self._unpacked is not None or size <= self._size - buffer.offset
        if fits and length > MAX_RECORD_BYTES:
            return f"the record is {length >> 20:,} MiB long, {MAX_RECORD_BYTES >> 20} are the most"
        if fits and buffer.has(size):
            return ""
        left = self._size - buffer.offset if self._unpacked is None else buffer.left
        return f"the record is cut, or its length is wrong: {size:,} bytes, of which {left:,} are there"

    def _find_next(self) -> str:
        """Go to the next complete record, or to the end; return which, for the message."""
        buffer, offset = self._buffer, self._buffer.offset
        buffer.at += 1
        while buffer.has(_MIN_BYTES):
            window = np.frombuffer(buffer.data, np.uint8)[buffer.at :][:CHUNK_BYTES]
            for ahead in headers_in(window).tolist():
                if self._is_record_at(ahead):
                    buffer.at += ahead
                    skipped = buffer.offset - offset
                    return f"; {skipped:,} bytes are left out, up to the next whole record"
            buffer.at += len(window) - HEADER.size + 1
        buffer.at = len(buffer.data)
        return f"; {buffer.offset - offset:,} bytes are left out, up to the end"

    def _is_record_at(self, ahead: int) -> bool:
        """Whether a complete record starts this many bytes ahead, at a valid header."""
        buffer = self._buffer
        (length,) = LENGTH.unpack_from(buffer.data, buffer.at + ahead)
        if length > MAX_RECORD_BYTES or not buffer.has(ahead + _MIN_BYTES + length):
            return False
        start = buffer.at + ahead + HEADER.size
        (check,) = CHECK.unpack_from(buffer.data, start + length)
        return masked_crc(buffer.data[start : start + length]) == check


def _is_packed(path: Path) -> bool:
    """True if decompression gives a TFRecord, or the file is gzip and can be nothing else."""
    with path.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    if header_holds(head) or not is_packed(head):
        return False
    return kind_of(path) == "gzip" or header_holds(unpacked_head(head, HEADER.size))


def _no_tfrecord(path: Path, location: str) -> DataError:
    kind = kind_of(path) if path.stat().st_size else "an empty file"
    return DataError(
        f"{location} must hold TFRecord data",
        got=Plain(kind or "no record with a valid checksum"),
        fix="Fetch or write the file again, or take it out of the source.",
    )
