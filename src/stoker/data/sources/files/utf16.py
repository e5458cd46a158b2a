"""UTF-16 text, as Windows programs save it, as a stream of UTF-8."""

from __future__ import annotations

import codecs
import io
from typing import BinaryIO

from stoker.core.errors import DataError, Plain

_CHUNK_BYTES = 1 << 16


class FromUtf16(io.RawIOBase):
    """A stream of UTF-16 with a byte order mark, read as UTF-8 without one."""

    def __init__(self, stream: BinaryIO, *, location: str) -> None:
        """Take over a stream.

        Args:
            stream: At its beginning.
            location: What a message calls it.
        """
        self._stream, self._location = stream, location
        self._decoder = codecs.getincrementaldecoder("utf-16")()
        self._held = b""

    def readable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """As many bytes as are asked for; fewer only at the end.

        Raises:
            DataError: the text is damaged.
        """
        parts, wanted = [self._held], size - len(self._held)
        while size < 0 or wanted > 0:
            raw = self._stream.read(_CHUNK_BYTES)
            try:
                parts.append(self._decoder.decode(raw, final=not raw).encode())
            except UnicodeError as error:
                raise DataError(
                    f"{self._location} must be whole UTF-16 text",
                    got=Plain(str(error)),
                    fix="Save it again, best as UTF-8.",
                ) from error
            wanted -= len(parts[-1])
            if not raw:
                break
        text = b"".join(parts)
        stop = len(text) if size < 0 else size
        self._held = text[stop:]
        return text[:stop]

    def close(self) -> None:
        """Close the stream below."""
        self._stream.close()
        super().close()
