"""Reads and writes records of TFRecord files of `PredictionLog`: warm-up requests and request logs.

Source: tensorflow/core/lib/io/record_writer.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import google_crc32c

from stoker.core.errors import DataError, Plain

_HEADER = struct.Struct("<QI")
_LENGTH, _CHECK = struct.Struct("<Q"), struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8
_BITS32 = 0xFFFFFFFF


def framed(data: bytes) -> bytes:
    """Return a record as bytes of the file: with its length and checksums."""
    length = _LENGTH.pack(len(data))
    return length + _CHECK.pack(_masked(length)) + data + _CHECK.pack(_masked(data))


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file, after checking every length and checksum.

    Raises:
        DataError: the file is damaged.
    """
    left = path.stat().st_size
    with path.open("rb") as file:
        while header := file.read(_HEADER.size):
            left -= _HEADER.size + 4
            if len(header) != _HEADER.size:
                raise damaged(path, "it ends inside a record")
            length, crc = _HEADER.unpack(header)
            if _masked(header[:8]) != crc or length > left:
                raise damaged(path, "a record's length is damaged")
            left -= length
            yield _checked(path, file, length)


def damaged(path: Path, got: str) -> DataError:
    """Return the error for an invalid file."""
    return DataError(f"{path} must be a TFRecord file of PredictionLog", got=Plain(got))


def _checked(path: Path, file: IO[bytes], length: int) -> bytes:
    data, crc = file.read(length), file.read(4)
    if len(crc) != 4 or _masked(data) != int.from_bytes(crc, "little"):
        raise damaged(path, "a record's content is damaged")
    return data


def _masked(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & _BITS32
