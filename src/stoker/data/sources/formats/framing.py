"""Read the framing of TFRecord files: check every length and checksum before TensorFlow gets a byte.

A record is its length (uint64), a checksum of the length (uint32), the payload, and a checksum of the payload
(uint32), all little-endian; a checksum is a masked CRC32C. A file may be plain, gzip or zlib, which is found by
its first bytes, not by its name.

TensorFlow crashes on a damaged header that says 64 GiB, and accepts a file that is truncated inside its last
header as complete. Here, each fault becomes a `Damage` with the record's number and position, and reading
continues after it. If the checksum of the length is right, the next record is found by the length. Otherwise, the
file is searched for the next position at which both checksums of a record are right; by chance, this happens at one
in 2^64 positions.

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
"""Structures: a record's header (length and its checksum), a length, a checksum."""

_MASK_DELTA = 0xA282EAD8


def masked_crc(data: bytes) -> int:
    """Return the checksum that TFRecord stores for these bytes."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def header_holds(head: bytes) -> bool:
    """Return whether the bytes begin with a length and the right checksum of it."""
    if len(head) < HEADER.size:
        return False
    return masked_crc(head[:8]) == CHECK.unpack_from(head, 8)[0]


def headers_in(window: NDArray[np.uint8]) -> NDArray[np.intp]:
    """Return all positions at which a length and the right checksum of it begin.

    A CRC is linear: the CRC of eight bytes is the exclusive or of one term for each byte.
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
    """Return [8, 256] terms: how each value of each byte of a length changes the CRC of the length 0."""
    terms = [
        [google_crc32c.value(LENGTH.pack(value << 8 * index)) for value in range(256)]
        for index in range(8)
    ]
    return np.array(terms, np.uint32) ^ _CRC_OF_ZEROS


_CRC_OF_ZEROS = np.uint32(google_crc32c.value(bytes(8)))
_CRC_TERMS = _crc_terms()


MAX_RECORD_BYTES = 256 << 20
"""Maximum length of a record, bytes; for a larger length, no memory is allocated."""

BLOCK_BYTES = 16 << 20
"""Size of the records that are returned at a time, bytes; a single record may be longer."""

BLOCK_RECORDS = 8192
"""Maximum number of records returned at a time."""

_MIN_BYTES = HEADER.size + CHECK.size
_HEAD_BYTES = 512
"""Number of bytes of a compressed file that are sufficient to decompress the header of its first record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A position in a TFRecord file at which no complete record begins."""

    row: int
    """Number of the record that should begin there, from 1; damaged parts count as one record each."""

    offset: int
    """Position of its first byte in the file or, if the file is compressed, in the decompressed content."""

    reason: str
    """What is wrong, and the number of bytes that were skipped if the next record had to be searched."""

    def __str__(self) -> str:
        return f"at byte {self.offset:,}: {self.reason}"


@dataclass(kw_only=True, slots=True)
class Frames:
    """Some records of one file, in order."""

    payloads: list[bytes] = field(default_factory=list)
    """The complete records."""

    rows: list[int] = field(default_factory=list)
    """The number of each complete record in the file, from 1."""

    damages: list[Damage] = field(default_factory=list)
    """The damaged parts between the records."""


def read_frames(path: Path, *, location: str) -> Iterator[Frames]:
    """Yield all records of a TFRecord file, in blocks of limited size.

    Args:
        path: The file.
        location: Name of the file in messages.

    Raises:
        DataError: the file is empty, is not a TFRecord file, or its gzip or zlib data is damaged.
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
        """Position in the stream that `at` (a position in `data`) corresponds to."""
        return self._start + self.at

    @property
    def left(self) -> int:
        """Number of bytes in memory after `at`."""
        return len(self.data) - self.at

    def has(self, size: int) -> bool:
        """Read until `size` bytes are in memory after `at`; return False if the stream ends before that."""
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
    """Reads one file record by record."""

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
            # An error whatever `data.max_bad_rows` is, because the number of lost records is not known.
            raise DataError(
                f"{self._location} must be complete, undamaged gzip or zlib data",
                got=Plain(f"a file that is truncated after record {self._row - 1:,}"),
                fix="Download or write the file again.",
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
        """Read until the end of a record of this length; return "", or why it cannot begin here."""
        size, buffer = length + _MIN_BYTES, self._buffer
        # The size of decompressed content is not known in advance.
        fits = self._unpacked is not None or size <= self._size - buffer.offset
        if fits and length > MAX_RECORD_BYTES:
            return f"the record is {length >> 20:,} MiB long, the maximum is {MAX_RECORD_BYTES >> 20} MiB"
        if fits and buffer.has(size):
            return ""
        left = self._size - buffer.offset if self._unpacked is None else buffer.left
        return (
            f"the record is truncated, or its length is wrong: {size:,} bytes, but only {left:,} are left "
            "in the file"
        )

    def _find_next(self) -> str:
        """Go to the next complete record, or to the end; return a text that says what was skipped."""
        buffer, offset = self._buffer, self._buffer.offset
        buffer.at += 1
        while buffer.has(_MIN_BYTES):
            window = np.frombuffer(buffer.data, np.uint8)[buffer.at :][:CHUNK_BYTES]
            for ahead in headers_in(window).tolist():
                if self._is_record_at(ahead):
                    buffer.at += ahead
                    skipped = buffer.offset - offset
                    return f"; {skipped:,} bytes are skipped, up to the next complete record"
            buffer.at += len(window) - HEADER.size + 1
        buffer.at = len(buffer.data)
        return f"; {buffer.offset - offset:,} bytes are skipped, up to the end"

    def _is_record_at(self, ahead: int) -> bool:
        """Return whether a complete record starts `ahead` bytes after `at`; its header must be valid."""
        buffer = self._buffer
        (length,) = LENGTH.unpack_from(buffer.data, buffer.at + ahead)
        if length > MAX_RECORD_BYTES or not buffer.has(ahead + _MIN_BYTES + length):
            return False
        start = buffer.at + ahead + HEADER.size
        (check,) = CHECK.unpack_from(buffer.data, start + length)
        return masked_crc(buffer.data[start : start + length]) == check


def _is_packed(path: Path) -> bool:
    """Return whether the file must be decompressed: it is gzip, or zlib that holds a TFRecord."""
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
        fix="Download or write the file again, or remove it from the source.",
    )
