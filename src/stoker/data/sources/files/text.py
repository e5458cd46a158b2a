"""Text files: gzip and UTF-16 read as plain UTF-8."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from stoker.core.errors import DataError, Plain
from stoker.data.sources.files.file_kind import CHUNK_BYTES, UTF16, kind_of, plain_chunks


def text_chunks(path: Path, *, location: str) -> Iterator[bytes]:
    """Yield the text of a file as UTF-8, whatever its name is: gzip is decompressed, UTF-16 recoded.

    Args:
        path: The file.
        location: Name of the file in messages.

    Raises:
        DataError: The file is empty, is not text, or its UTF-16 is damaged.
    """
    kind = kind_of(path)
    if kind not in ("", "gzip", UTF16):
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
    if kind == UTF16:
        yield from utf16_chunks(path, location=location)
    elif kind == "gzip":
        with pa.CompressedInputStream(pa.OSFile(str(path)), "gzip") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
    else:
        yield from plain_chunks(path)


def utf16_chunks(path: Path, *, location: str) -> Iterator[bytes]:
    """Recode UTF-16 with a byte order mark, as Windows programs save it, to UTF-8 without one.

    Raises:
        DataError: The text is damaged.
    """
    try:
        with path.open(encoding="utf-16", newline="") as stream:
            while text := stream.read(CHUNK_BYTES):
                yield text.encode()
    except UnicodeError as error:
        raise DataError(
            f"{location} must be whole UTF-16 text",
            got=Plain(str(error)),
            fix="Save it again, preferably as UTF-8.",
        ) from error


class EndMarked(io.RawIOBase):
    """A stream of UTF-8 with an additional line at its end.

    Arrow takes a quote that is never closed for one value that reaches to the end of the file, and
    reports nothing. Then that value also contains the line added here, so its absence shows the error.
    PyArrow raises for a record with too few or too many fields that is not UTF-8: a byte that is not
    part of a character, and a NUL, is given as a NUL and two hexadecimal digits.
    """

    is_escaped = False
    """True once the text contained such a byte."""

    def __init__(self, chunks: Iterator[bytes], *, last_line: bytes) -> None:
        self._chunks = chunks
        self._tail = b"\n" + last_line + b"\n"
        self._held = b""
        self._ends_with_cr = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(_ESCAPING)

    def readable(self) -> bool:
        """Return True: Arrow's readers ask."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Read from the stream, then from the additional line; less than `size` only at the very end.

        Arrow 26 loses records after a block that is shorter than the others. It also drops a line feed
        at the beginning of a block if the last one ended with a carriage return, inside quotes too. So
        it gets this line feed twice; outside quotes the second one is an empty line, which it ignores.
        """
        parts: list[bytes] = []
        wanted = size
        if self._ends_with_cr and not self._held:
            self._held = self._next()
        if self._ends_with_cr and self._held.startswith(b"\n"):
            self._held = b"\n" + self._held
        while size < 0 or wanted > 0:
            found = self._held or self._next()
            if not found:
                break
            if size >= 0:
                found, self._held = found[:wanted], found[wanted:]
            parts.append(found)
            wanted -= len(found)
        self._ends_with_cr = bool(parts) and parts[-1].endswith(b"\r")
        return b"".join(parts)

    def _next(self) -> bytes:
        """Read more bytes; b"" at the end."""
        for found in self._chunks:
            if found.isascii() and b"\0" not in found and not self._decoder.getstate()[0]:
                return found
            if text := self._decoder.decode(found.replace(b"\0", _NUL)):
                self.is_escaped = self.is_escaped or "\0" in text
                return text.encode()
        text = self._decoder.decode(b"", final=True)
        self.is_escaped = self.is_escaped or bool(text)
        last, self._tail = text.encode() + self._tail, b""
        return last


def unescaped(values: pa.Array) -> pa.Array:
    """The bytes as in the file.

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
