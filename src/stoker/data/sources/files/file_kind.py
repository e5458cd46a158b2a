"""A file's first bytes say what it is; its name only says what it should be."""

from __future__ import annotations

import codecs
import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.compute as pc

from stoker.core.errors import DataError, Plain
from stoker.data.sources.files.utf16 import FromUtf16

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
    """Turn what a reader says of a damaged or unreadable file into one line that names it."""
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
    """What a file's first bytes say that it is, "" for text and anything else."""
    with path.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    return next((kind for magic, kind in _MAGIC if head.startswith(magic)), "")


def open_text(path: Path, *, location: str) -> BinaryIO:
    """Open a CSV file, unpacked where it is gzip, whatever its name says.

    Args:
        path: The file.
        location: What a message calls it.

    Raises:
        DataError: it is empty, or something that is no text.
    """
    kind = kind_of(path)
    if kind == UTF16:
        return cast(BinaryIO, FromUtf16(path.open("rb"), location=location))
    if kind not in ("", "gzip"):
        raise DataError(
            f"{location} must be CSV text in UTF-8",
            got=Plain(kind),
            fix="Name the right format in data.format, or convert the file to CSV.",
        )
    if not path.stat().st_size:
        raise DataError(
            f"{location} must hold a header line with the names of its columns",
            got=Plain("an empty file"),
            fix="Fetch or write the file again, or take it out of the source.",
        )
    if kind == "gzip":
        return pa.CompressedInputStream(pa.OSFile(str(path)), "gzip")
    return path.open("rb")


class EndMarked(io.RawIOBase):
    """A stream of UTF-8 with one more line at its end.

    Arrow takes a quote that is never closed for one value that reaches to the end of the file, and
    says nothing. Where that happens the line added here is swallowed too, and its absence tells.
    PyArrow raises for a record with too few or too many fields that is not UTF-8: a byte that is not
    part of a character, and a NUL, is given as a NUL and two hexadecimal digits.
    """

    is_escaped = False
    """True once there was such a byte."""

    def __init__(self, stream: BinaryIO, *, last_line: bytes) -> None:
        self._stream = stream
        self._tail = b"\n" + last_line + b"\n"
        self._held = b""
        self._ends_with_cr = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(_ESCAPING)

    def readable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """The stream's bytes, then the line's; less than was asked for only at the very end.

        Arrow 26 loses records after a block that is shorter than the others. It also drops a line feed
        at the beginning of a block if the last one ended with a carriage return, inside quotes too. So
        it gets this line feed twice; outside quotes the second one is an empty line, which it ignores.
        """
        parts: list[bytes] = []
        wanted = size
        if self._ends_with_cr and not self._held:
            self._held = self._next(wanted)
        if self._ends_with_cr and self._held.startswith(b"\n"):
            self._held = b"\n" + self._held
        while size < 0 or wanted > 0:
            found = self._held or self._next(wanted)
            if not found:
                break
            if size >= 0:
                found, self._held = found[:wanted], found[wanted:]
            parts.append(found)
            wanted -= len(found)
        self._ends_with_cr = bool(parts) and parts[-1].endswith(b"\r")
        return b"".join(parts)

    def _next(self, size: int) -> bytes:
        """Some more bytes, b"" at the end."""
        while found := bytes(self._stream.read(size)):
            if found.isascii() and b"\0" not in found and not self._decoder.getstate()[0]:
                return found
            if text := self._decoder.decode(found.replace(b"\0", _NUL)):
                self.is_escaped = self.is_escaped or "\0" in text
                return text.encode()
        text = self._decoder.decode(b"", final=True)
        self.is_escaped = self.is_escaped or bool(text)
        last, self._tail = text.encode() + self._tail, b""
        return last

    def close(self) -> None:
        """Close the stream below."""
        self._stream.close()
        super().close()


def unescaped(values: pa.Array) -> pa.Array:
    """The bytes as they stand in the file.

    Args:
        values: [rows] binary, of an `EndMarked` stream that is escaped.
    """
    if not pc.any(pc.match_substring(values, "\0")).as_py():
        return values
    return pa.array([_ESCAPED.sub(_byte, value) for value in values.to_pylist()], pa.binary())


_ESCAPING = "stoker-nul-and-hex"
_NUL = b"\x00" + b"00"
_ESCAPED = re.compile(rb"\x00([0-9a-f]{2})")


def _byte(found: re.Match[bytes]) -> bytes:
    return bytes.fromhex(found[1].decode())


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    bad = error.object[error.start : error.end]
    return "".join(f"\0{byte:02x}" for byte in bad), error.end


codecs.register_error(_ESCAPING, _escape)
