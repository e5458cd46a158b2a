"""gRPC's messages in the bytes of a stream.

Source: grpc/grpc, `doc/PROTOCOL-HTTP2.md`, Length-Prefixed-Message.
"""

from __future__ import annotations

import struct
import zlib

from stoker.serve.errors import Code, ServeError

_PREFIX = struct.Struct(">BI")
_WBITS = {"gzip": 31, "deflate": 15}
"""zlib's word for each way of compression."""


class Messages:
    """Cuts bytes into messages, and unpacks those that are compressed."""

    __slots__ = ("_encoding", "_have", "_max_bytes", "_need", "_parts")

    def __init__(self, *, encoding: str, max_bytes: int) -> None:
        """Args: encoding: how compressed ones are; max_bytes: largest that is taken."""
        self._encoding = encoding
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._have, self._need = 0, _PREFIX.size

    @property
    def is_amid(self) -> bool:
        """Whether a message has begun and not ended."""
        return bool(self._parts)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole with these bytes.

        Raises:
            ServeError: one is too large, or compressed in a way that is unknown.
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

    def _cut(self, data: bytes) -> list[bytes]:
        found, at, end = [], 0, len(data)
        self._need = _PREFIX.size
        while end - at >= _PREFIX.size:
            packed, size = _PREFIX.unpack_from(data, at)
            if size > self._max_bytes:
                raise self._too_large(size)
            begin = at + _PREFIX.size
            if begin + size > end:
                self._need = _PREFIX.size + size
                break
            at = begin + size
            message = data[begin:at]
            found.append(self._unpacked(message) if packed else message)
        if at < end:
            self._parts.append(data[at:])
        self._have = end - at
        return found

    def _unpacked(self, message: bytes) -> bytes:
        wbits = _WBITS.get(self._encoding)
        if wbits is None:
            raise ServeError(
                Code.UNIMPLEMENTED,
                f"a message is compressed by {self._encoding[:50]!r}; gzip and deflate are known",
            )
        unpacking = zlib.decompressobj(wbits)
        try:
            raw = unpacking.decompress(message, self._max_bytes + 1)
        except zlib.error:
            raise ServeError(Code.INVALID_ARGUMENT, f"a message must be {self._encoding}") from None
        if len(raw) > self._max_bytes:
            raise self._too_large(len(raw))
        if not unpacking.eof:
            raise ServeError(Code.INVALID_ARGUMENT, f"a message of {self._encoding} is cut")
        return raw

    def _too_large(self, size: int) -> ServeError:
        return ServeError(
            Code.RESOURCE_EXHAUSTED,
            f"Received message larger than max ({size} vs. {self._max_bytes})",
        )
