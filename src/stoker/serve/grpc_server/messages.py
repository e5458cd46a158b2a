"""Reads length-prefixed gRPC messages from the bytes of a stream.

Source: grpc/grpc, `doc/PROTOCOL-HTTP2.md`, Length-Prefixed-Message.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from stoker.serve.errors import Code, ServeError

PREFIX = struct.Struct(">BI")
"""Layout of the prefix of each message: whether it is compressed, and its length."""

_WBITS = {"gzip": 31, "deflate": 15}
"""Message encoding -> zlib's argument `wbits` for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedMessage:
    """A message that is still compressed. A thread decompresses it, because this takes long."""

    raw: bytes
    """The compressed bytes."""

    encoding: str
    """The compression, as `grpc-encoding` named it."""

    max_bytes: int
    """Maximum accepted size after decompression, bytes."""

    def decompress(self) -> bytes:
        """Return the message.

        Raises:
            ServeError: the message is too large or damaged, or its compression is unknown.
        """
        wbits = _WBITS.get(self.encoding)
        if wbits is None:
            raise ServeError(
                Code.UNIMPLEMENTED,
                f"message encoding {self.encoding[:50]!r} is not supported; use gzip or deflate",
            )
        decompressor = zlib.decompressobj(wbits)
        try:
            raw = decompressor.decompress(self.raw, self.max_bytes + 1)
        except zlib.error:
            raise ServeError(
                Code.INVALID_ARGUMENT, f"a message is not valid {self.encoding}"
            ) from None
        if len(raw) > self.max_bytes:
            raise too_large(len(raw), self.max_bytes)
        if not decompressor.eof:
            raise ServeError(Code.INVALID_ARGUMENT, f"a {self.encoding} message is truncated")
        return raw


def too_large(size: int, most: int) -> ServeError:
    """Return the error for a message that is too large, with grpcio's message."""
    return ServeError(
        Code.RESOURCE_EXHAUSTED, f"Received message larger than max ({size} vs. {most})"
    )


Message = bytes | CompressedMessage
"""One message as received, maybe compressed."""


class MessageReader:
    """Splits the bytes of a stream into messages."""

    __slots__ = ("_encoding", "_max_bytes", "_max_decompressed", "_needed", "_parts", "_received")

    def __init__(self, *, encoding: str, max_bytes: int, max_decompressed: int) -> None:
        """Start at the first message.

        Args:
            encoding: Name of the compression that compressed messages of this stream have.
            max_bytes: Maximum size of a message as received, bytes.
            max_decompressed: Maximum size of a compressed message after decompression, bytes.
        """
        self._encoding = encoding
        self._max_bytes = max_bytes
        self._max_decompressed = min(max_bytes, max_decompressed)
        self._parts: list[bytes] = []
        self._received, self._needed = 0, PREFIX.size

    @property
    def is_partial(self) -> bool:
        """Whether the last message is incomplete."""
        return bool(self._parts)

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that these bytes complete.

        Raises:
            ServeError: a message is too large.
        """
        if self._parts or len(data) < self._needed:
            if data:
                self._parts.append(data)
                self._received += len(data)
            if self._received < self._needed:
                return []
            data = b"".join(self._parts)
            self._parts.clear()
        return self._split(data)

    def _split(self, data: bytes) -> list[Message]:
        messages: list[Message] = []
        at, end = 0, len(data)
        self._needed = PREFIX.size
        while end - at >= PREFIX.size:
            compressed, size = PREFIX.unpack_from(data, at)
            if size > self._max_bytes:
                raise too_large(size, self._max_bytes)
            begin = at + PREFIX.size
            if begin + size > end:
                self._needed = PREFIX.size + size
                break
            at = begin + size
            raw = data[begin:at]
            messages.append(self._compressed(raw) if compressed else raw)
        if at < end:
            self._parts.append(data[at:])
        self._received = end - at
        return messages

    def _compressed(self, raw: bytes) -> CompressedMessage:
        return CompressedMessage(raw=raw, encoding=self._encoding, max_bytes=self._max_decompressed)
