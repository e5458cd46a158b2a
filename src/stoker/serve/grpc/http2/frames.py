"""The frames of HTTP/2 that a server of gRPC reads and writes.

Source: RFC 9113, sections 4 to 7.
"""

from __future__ import annotations

import enum
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What every client says first."""

HEAD = struct.Struct(">HBBBI")
"""A frame's head: its length in two parts, its kind, its flags, its stream."""

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
PRIORITISED = 0x20

STREAM_BITS = 0x7FFFFFFF
"""A stream's number, and the largest of all windows; the bit beside them is reserved."""

MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, MAX_HEADERS = 3, 4, 5, 6
"""The settings that are read or sent."""

DEFAULT_WINDOW = 65_535
DEFAULT_FRAME = 16_384
"""What holds until the other side says otherwise."""


class Error(enum.IntEnum):
    """Why a stream or a connection ends."""

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
    """The other side broke a rule that all streams share; the connection ends."""

    def __init__(self, error: Error, said: str) -> None:
        """Args: error: the rule's number; said: which rule, for whoever debugs the client."""
        super().__init__(said)
        self.error = error


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    size = len(payload)
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    """What this side asks of the other."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in values.items()))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """What the other side asks for.

    Raises:
        ConnectionFault: the frame has another length than settings have.
    """
    if len(payload) % 6:
        raise ConnectionFault(Error.FRAME_SIZE_ERROR, "a setting has 6 bytes")
    return list(struct.iter_unpack(">HI", payload))


def window_update(stream: int, by: int) -> bytes:
    """Leave to send more, bytes."""
    return frame(WINDOW_UPDATE, 0, stream, by.to_bytes(4, "big"))


def reset(stream: int, error: Error) -> bytes:
    """The end of a stream, at once."""
    return frame(RST_STREAM, 0, stream, error.to_bytes(4, "big"))


def goaway(last: int, error: Error, said: str = "") -> bytes:
    """The end of the connection for streams after `last`."""
    return frame(GOAWAY, 0, 0, struct.pack(">II", last, error) + said.encode())


def content(flags: int, payload: bytes) -> bytes:
    """What a frame holds without its padding and its priority.

    Raises:
        ConnectionFault: there is more padding than frame.
    """
    begin, end = 0, len(payload)
    if flags & PADDED:
        begin, end = 1, end - (payload[0] if payload else 0)
    if flags & PRIORITISED:
        begin += 5
    if begin > end:
        raise ConnectionFault(Error.PROTOCOL_ERROR, "there is more padding than frame")
    return payload[begin:end]
