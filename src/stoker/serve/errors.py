"""Why a request got no answer: gRPC's canonical codes, mapped to HTTP in this one place.

ServeError               a code and one line for the client
|- SignatureNotFound     REST and gRPC have different messages for it
"""

from __future__ import annotations

import enum


class Code(enum.IntEnum):
    """gRPC's canonical codes.

    Source: google/rpc/code.proto.
    """

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16

    @property
    def http_status(self) -> int:
        """The HTTP status that TensorFlow Serving gives for this code."""
        return _HTTP_STATUS.get(self, 500)


_HTTP_STATUS = {
    Code.OK: 200,
    Code.CANCELLED: 499,
    Code.INVALID_ARGUMENT: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.OUT_OF_RANGE: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.ABORTED: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.UNAUTHENTICATED: 401,
}


_MAX_CHARS = 2000
"""Maximum number of characters of a message for a client. Messages quote the request, and gRPC allows 8 KiB only."""


def _cut(message: str) -> str:
    """Return a message as one line of limited length, whatever text of the request it contains."""
    message = message.replace("\n", "\\n").replace("\r", "\\r")
    return message if len(message) <= _MAX_CHARS else message[:_MAX_CHARS] + "..."


class ServeError(Exception):
    """A request cannot be answered. The message is for the client."""

    def __init__(self, code: Code, message: str) -> None:
        """Args: code: the kind of error; message: one line for the client."""
        self.code = code
        self.message = message = _cut(message)
        super().__init__(f"{code.name}: {message}")


class SignatureNotFound(ServeError):
    """The model has no signature of that name."""

    def __init__(self, signature: str) -> None:
        """Args: signature: the requested name."""
        self.signature = signature
        super().__init__(
            Code.FAILED_PRECONDITION, f'Serving signature key "{signature}" not found.'
        )
