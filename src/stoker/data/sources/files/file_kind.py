"""Find the kind of a file by its first bytes, whatever its name is, and decompress it.

gzip and zlib are decompressed piece by piece, so that a small file cannot fill the memory, and a truncated
file is detected.

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
"""The kind of a file that begins with a byte order mark of UTF-16."""

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
    """Report a reader's error about a damaged or unreadable file as a `DataError` that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError) as error:
        text = str(error).strip().splitlines()
        raise DataError(
            f"{location} must be a complete, readable {what} file",
            got=Plain(text[0] if text else type(error).__name__),
            fix="Download or write the file again.",
        ) from error


def kind_of(path: Path) -> str:
    """Return the kind of a file, found by its first bytes; "" for text and for unknown kinds."""
    with path.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    return next((kind for magic, kind in _MAGIC if head.startswith(magic)), "")


CHUNK_BYTES = 1 << 20
"""Number of bytes that are read or decompressed at a time."""

_ZLIB = b"\x78"
_ANY_WBITS = 32 + zlib.MAX_WBITS
"""Argument for zlib to decompress both gzip and zlib, and to verify their checksums."""


def is_packed(head: bytes) -> bool:
    """Return whether bytes start like gzip or zlib data."""
    is_zlib = head[:1] == _ZLIB and len(head) > 1 and int.from_bytes(head[:2], "big") % 31 == 0
    return head.startswith(_GZIP + b"\x08") or is_zlib


def unpacked_head(head: bytes, size: int) -> bytes:
    """Return the first bytes of a file's decompressed content; b"" if it cannot be decompressed.

    Args:
        head: The file's first bytes.
        size: Maximum number of bytes to return.
    """
    try:
        return zlib.decompressobj(_ANY_WBITS).decompress(head, size)
    except zlib.error:
        return b""


def plain_chunks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes, `CHUNK_BYTES` at a time."""
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


class Unpacked:
    """The decompressed content of a gzip or zlib file, `CHUNK_BYTES` at a time."""

    def __init__(self, path: Path, *, location: str) -> None:
        """Start at the file's first byte.

        Args:
            path: The file.
            location: Name of the file in messages.
        """
        self.is_cut = False
        """Whether the file ended before its compressed content did; set at the end of the iteration."""
        self._path, self._location = path, location

    def __iter__(self) -> Iterator[bytes]:
        """Yield the decompressed content.

        Raises:
            DataError: the compressed data is damaged, or is followed by data of a different kind.
        """
        unpacker = zlib.decompressobj(_ANY_WBITS)
        read = 0
        try:
            for chunk in plain_chunks(self._path):
                read += len(chunk)
                # The end of a member may be followed by zeros, or by another member.
                left = chunk.lstrip(b"\0") if unpacker.eof else chunk
                while left:
                    if unpacker.eof:
                        unpacker = zlib.decompressobj(_ANY_WBITS)
                    yield unpacker.decompress(left, CHUNK_BYTES)
                    left = unpacker.unconsumed_tail or unpacker.unused_data.lstrip(b"\0")
        except zlib.error as error:
            reason = f"{error}, in the {CHUNK_BYTES >> 20} MiB before byte {read:,}"
            raise DataError(
                f"{self._location} must be complete, undamaged gzip or zlib data",
                got=Plain(reason),
                fix="Download or write the file again.",
            ) from None
        self.is_cut = not unpacker.eof
