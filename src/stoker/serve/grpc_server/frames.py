"""The frames of HTTP/2 that a gRPC server reads and writes.

Source: RFC 9113, sections 4 to 7.
"""

from __future__ import annotations

import enum
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes that every client sends."""

HEADER = struct.Struct(">HBBBI")
"""Layout of a frame's header: length in two parts, type, flags, stream."""

(
    DATA,
    HEADERS,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    PUSH_PROMISE,
    PING,
    GOAWAY,
    WINDOW_UPDATE,
    CONTINUATION,
) = range(10)

ACK = END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

MAX_31_BITS = 0x7FFFFFFF
"""Maximum stream number and window size; the highest bit of both fields is reserved."""

HEADER_TABLE, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, MAX_HEADERS = 1, 3, 4, 5, 6
"""Numbers of the settings that are read or sent."""

DEFAULT_HEADER_TABLE = 4096
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME = 16_384
"""Window and frame size that apply until the peer's settings change them, bytes."""


class Error(enum.IntEnum):
    """Error codes that say why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ConnectionFault(Exception):
    """The peer broke a rule that concerns the whole connection, which is closed."""

    def __init__(self, error: Error, reason: str) -> None:
        """Args: error: the code for the peer; reason: the broken rule, sent for debugging."""
        super().__init__(reason)
        self.error = error


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return one frame."""
    size = len(payload)
    return HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in values.items()))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the peer's settings in their order.

    Raises:
        ConnectionFault: the length of the payload is not a multiple of a setting's length.
    """
    if len(payload) % 6:
        raise ConnectionFault(Error.FRAME_SIZE_ERROR, "a setting has 6 bytes")
    return list(struct.iter_unpack(">HI", payload))


def window_update(stream: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def reset(stream: int, error: Error) -> bytes:
    """Return a RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream, error.to_bytes(4, "big"))


def goaway(last_stream: int, error: Error, reason: str = "") -> bytes:
    """Return a GOAWAY frame: streams with numbers above `last_stream` are not processed."""
    return frame(GOAWAY, 0, 0, struct.pack(">II", last_stream, error) + reason.encode())


def without_padding(flags: int, payload: bytes) -> bytes:
    """Return the payload of a DATA or HEADERS frame without padding and priority.

    Raises:
        ConnectionFault: the padding is larger than the frame.
    """
    begin, end = 0, len(payload)
    if flags & PADDED:
        begin, end = 1, end - (payload[0] if payload else 0)
    if flags & HAS_PRIORITY:
        begin += 5
    if begin > end:
        raise ConnectionFault(Error.PROTOCOL_ERROR, "the padding is larger than the frame")
    return payload[begin:end]
