"""gzip and zlib, unpacked piece by piece, so that neither a bomb nor a cut is a surprise.

Source: RFC 1952 (gzip, also of several members), RFC 1950 (zlib).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from stoker.core.errors import DataError, Plain

CHUNK_BYTES = 1 << 20
"""What is read from a file, or unpacked, at a time."""

_GZIP, _ZLIB = b"\x1f\x8b\x08", b"\x78"
_ANY_WBITS = 32 + zlib.MAX_WBITS
"""Tells zlib to unpack gzip and zlib alike, and to check the checksum of either."""


def is_packed(head: bytes) -> bool:
    """True where some bytes begin as gzip or zlib does."""
    is_zlib = head[:1] == _ZLIB and len(head) > 1 and int.from_bytes(head[:2], "big") % 31 == 0
    return head.startswith(_GZIP) or is_zlib


def unpacked_head(head: bytes, size: int) -> bytes:
    """The first bytes of what a file unpacks to, b"" where it does not unpack.

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
    """What a gzip or zlib file unpacks to, `CHUNK_BYTES` at a time."""

    def __init__(self, path: Path, *, location: str) -> None:
        """Start at the file's first byte.

        Args:
            path: The file.
            location: What a message calls it.
        """
        self.is_cut = False
        """True once the file has ended before what is packed in it."""
        self._path, self._location = path, location

    def __iter__(self) -> Iterator[bytes]:
        """Unpack everything.

        Raises:
            DataError: the packed data is damaged, or something else follows it.
        """
        unpacker = zlib.decompressobj(_ANY_WBITS)
        read = 0
        try:
            for chunk in plain_chunks(self._path):
                read += len(chunk)
                # After the end of a member zeros may stand, and another member.
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
