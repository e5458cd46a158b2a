"""Read text files, also gzip and UTF-16, as UTF-8."""

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
    """Yield the text of a file as UTF-8, whatever its name is: gzip is decompressed, UTF-16 is converted.

    Args:
        path: The file.
        location: Name of the file in messages.

    Raises:
        DataError: the file is empty, is not text, or its UTF-16 is damaged.
    """
    kind = kind_of(path)
    if kind not in ("", "gzip", UTF16):
        raise DataError(
            f"{location} must be CSV text in UTF-8",
            got=Plain(kind),
            fix="Set data.format to the format of the file, or convert the file to CSV.",
        )
    if not path.stat().st_size:
        raise DataError(
            f"{location} must hold a header line with the names of its columns",
            got=Plain("an empty file"),
            fix="Download or write the file again, or remove it from the source.",
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
    """Convert UTF-16 with a byte order mark, as Windows programs save it, to UTF-8 without the mark.

    Raises:
        DataError: the text is damaged.
    """
    try:
        with path.open(encoding="utf-16", newline="") as stream:
            while text := stream.read(CHUNK_BYTES):
                yield text.encode()
    except UnicodeError as error:
        raise DataError(
            f"{location} must be complete, undamaged UTF-16 text",
            got=Plain(str(error)),
            fix="Save the file again, preferably as UTF-8.",
        ) from error


class EndMarked(io.RawIOBase):
    """A stream of UTF-8 with an additional line at its end.

    If a quote is never closed, Arrow reads everything up to the end of the file as one value, and reports no
    error. Then the additional line is part of that value, so the missing line shows the error.

    PyArrow raises an error if a record with too few or too many fields is not UTF-8. So each byte that is not
    part of a UTF-8 character, and each NUL, is replaced by a NUL and two hexadecimal digits.
    """

    is_escaped = False
    """Whether a byte was replaced."""

    def __init__(self, chunks: Iterator[bytes], *, last_line: bytes) -> None:
        self._chunks = chunks
        self._tail = b"\n" + last_line + b"\n"
        self._held = b""
        self._ends_with_cr = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(_ESCAPING)

    def readable(self) -> bool:
        """Return True; Arrow's readers check it."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes of the stream, then of the additional line; fewer than `size` only at the end.

        Arrow 26 loses records after a block that is shorter than `size`. And if a block ends with a carriage
        return, Arrow drops a line feed at the beginning of the next block, even inside quotes. So this line feed
        is repeated. Outside quotes, the repeated line feed is an empty line, which Arrow ignores.
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
        """Return the next bytes; b"" at the end."""
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
    """Return values with the bytes that they have in the file.

    Args:
        values: [rows] binary, read from an `EndMarked` stream with `is_escaped`.
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
