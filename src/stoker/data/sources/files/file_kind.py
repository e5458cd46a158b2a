"""The kind of a file by its first bytes, whatever its name is, and its decompression.

gzip and zlib are decompressed in pieces, so that bombs and truncated files are detected.

Source: RFC 1952 (gzip, also of several members), RFC 1950 (zlib).
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from stoker.core.errors import DataError, Plain

_GZIP = b"\x1f\x8b"

UTF16 = "UTF-16 text"
"""The kind of a file that begins with that byte order mark."""

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (_GZIP, "gzip"),
    (b"PAR1", "Parquet"),
    (b"PK\x03\x04", "a zip archive"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\xff\xfe", UTF16),
    (b"\xfe\xff", UTF16),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"%PDF", "a PDF"),
    (b"<!DOCTYPE", "a web page (HTML)"),
    (b"<!doctype", "a web page (HTML)"),
    (b"<html", "a web page (HTML)"),
)

_HEAD_BYTES = 16


@contextlib.contextmanager
def reading(location: str, what: str) -> Iterator[None]:
    """Report a reader's error about a damaged or unreadable file as one line that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError) as error:
        text = str(error).strip().splitlines()
        raise DataError(
            f"{location} must be whole {what}",
            got=Plain(text[0] if text else type(error).__name__),
            fix="Fetch or write the file again.",
        ) from error


def kind_of(path: Path) -> str:
    """Describe a file by its first bytes; "" for text and anything else."""
    with path.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    return next((kind for magic, kind in _MAGIC if head.startswith(magic)), "")


CHUNK_BYTES = 1 << 20
"""Bytes that are read or decompressed at a time."""

_ZLIB = b"\x78"
_ANY_WBITS = 32 + zlib.MAX_WBITS
"""Makes zlib decompress both gzip and zlib, and check the checksum of either."""


def is_packed(head: bytes) -> bool:
    """Whether bytes start like gzip or zlib."""
    is_zlib = head[:1] == _ZLIB and len(head) > 1 and int.from_bytes(head[:2], "big") % 31 == 0
    return head.startswith(_GZIP + b"\x08") or is_zlib


def unpacked_head(head: bytes, size: int) -> bytes:
    """The first bytes of a file's decompressed content; b"" if it cannot be decompressed.

    Args:
        head: The file's first bytes.
        size: Most bytes wanted.
    """
    try:
        return zlib.decompressobj(_ANY_WBITS).decompress(head, size)
    except zlib.error:
        return b""


def plain_chunks(path: Path) -> Iterator[bytes]:
    """A file's bytes, `CHUNK_BYTES` at a time."""
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


class Unpacked:
    """The decompressed content of a gzip or zlib file, `CHUNK_BYTES` at a time."""

    def __init__(self, path: Path, *, location: str) -> None:
        """Start at the file's first byte.

        Args:
            path: The file.
            location: Its name in messages.
        """
        self.is_cut = False
        """True once the file has ended before its compressed content."""
        self._path, self._location = path, location

    def __iter__(self) -> Iterator[bytes]:
        """Decompress everything.

        Raises:
            DataError: the compressed data is damaged, or other data follows it.
        """
        unpacker = zlib.decompressobj(_ANY_WBITS)
        read = 0
        try:
            for chunk in plain_chunks(self._path):
                read += len(chunk)
                # After the end of a member, zeros or another member may follow.
                left = chunk.lstrip(b"\0") if unpacker.eof else chunk
                while left:
                    if unpacker.eof:
                        unpacker = zlib.decompressobj(_ANY_WBITS)
                    yield unpacker.decompress(left, CHUNK_BYTES)
                    left = unpacker.unconsumed_tail or unpacker.unused_data.lstrip(b"\0")
        except zlib.error as error:
            reason = f"{error}, in the {CHUNK_BYTES >> 20} MiB before byte {read:,}"
            raise DataError(
                f"{self._location} must be whole gzip or zlib data",
                got=Plain(reason),
                fix="Fetch or write the file again.",
            ) from None
        self.is_cut = not unpacker.eof
