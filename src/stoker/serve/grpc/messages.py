"""gRPC's messages in the bytes of a stream.

Source: grpc/grpc, `doc/PROTOCOL-HTTP2.md`, Length-Prefixed-Message.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from stoker.serve.errors import Code, ServeError

_PREFIX = struct.Struct(">BI")
_WBITS = {"gzip": 31, "deflate": 15}
"""zlib's word for each way of compression."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A compressed message as it came: unpacking takes long, and is a thread's work."""

    raw: bytes
    """The compressed bytes."""

    encoding: str
    """How they are compressed."""

    max_bytes: int
    """The largest that they may become."""

    def unpacked(self) -> bytes:
        """The message.

        Raises:
            ServeError: it is too large, damaged, or compressed in a way that is unknown.
        """
        wbits = _WBITS.get(self.encoding)
        if wbits is None:
            raise ServeError(
                Code.UNIMPLEMENTED,
                f"a message is compressed by {self.encoding[:50]!r}; gzip and deflate are known",
            )
        unpacking = zlib.decompressobj(wbits)
        try:
            raw = unpacking.decompress(self.raw, self.max_bytes + 1)
        except zlib.error:
            raise ServeError(Code.INVALID_ARGUMENT, f"a message must be {self.encoding}") from None
        if len(raw) > self.max_bytes:
            raise too_large(len(raw), self.max_bytes)
        if not unpacking.eof:
            raise ServeError(Code.INVALID_ARGUMENT, f"a message of {self.encoding} is cut")
        return raw


def too_large(size: int, most: int) -> ServeError:
    """The refusal of a message, in grpcio's words."""
    return ServeError(
        Code.RESOURCE_EXHAUSTED, f"Received message larger than max ({size} vs. {most})"
    )


Message = bytes | Packed
"""One message as it came."""


class Messages:
    """Cuts bytes into messages."""

    __slots__ = ("_encoding", "_have", "_max_bytes", "_need", "_parts", "_unpacked_bytes")

    def __init__(self, *, encoding: str, max_bytes: int, unpacked_bytes: int) -> None:
        """Cut a stream.

        Args:
            encoding: How its compressed messages are.
            max_bytes: Largest message that is taken.
            unpacked_bytes: Largest that a compressed one may become.
        """
        self._encoding = encoding
        self._max_bytes = max_bytes
        self._unpacked_bytes = min(max_bytes, unpacked_bytes)
        self._parts: list[bytes] = []
        self._have, self._need = 0, _PREFIX.size

    @property
    def is_amid(self) -> bool:
        """Whether a message has begun and not ended."""
        return bool(self._parts)

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole with these bytes.

        Raises:
            ServeError: one is too large.
        """
        if self._parts or len(data) < self._need:
            if data:
                self._parts.append(data)
                self._have += len(data)
            if self._have < self._need:
                return []
            data = b"".join(self._parts)
            self._parts.clear()
        return self._cut(data)

    def _cut(self, data: bytes) -> list[Message]:
        found: list[Message] = []
        at, end = 0, len(data)
        self._need = _PREFIX.size
        while end - at >= _PREFIX.size:
            packed, size = _PREFIX.unpack_from(data, at)
            if size > self._max_bytes:
                raise too_large(size, self._max_bytes)
            begin = at + _PREFIX.size
            if begin + size > end:
                self._need = _PREFIX.size + size
                break
            at = begin + size
            raw = data[begin:at]
            found.append(self._packed(raw) if packed else raw)
        if at < end:
            self._parts.append(data[at:])
        self._have = end - at
        return found

    def _packed(self, raw: bytes) -> Packed:
        return Packed(raw=raw, encoding=self._encoding, max_bytes=self._unpacked_bytes)
