"""HTTP requests and answers, their errors, and compressed bodies."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from stoker.serve.deadline import Deadline

Scope = MutableMapping[str, Any]

JSON = "application/json"
RAW = "application/octet-stream"

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpRequest:
    """A complete HTTP request."""

    scope: Scope
    """ASGI's scope; its headers are read only when they are needed."""

    body: bytes
    """The whole body, decompressed."""

    deadline: Deadline
    """How long the client waits."""

    @property
    def method(self) -> str:
        """The HTTP method."""
        return self.scope["method"]

    @property
    def path(self) -> str:
        """The unescaped path."""
        return self.scope["path"]

    def header(self, name: str) -> str:
        """Return the last value of a header; "" if it is missing. The name is in lower case."""
        return header(self.scope, name.encode())

    @property
    def media_type(self) -> str:
        """The content type without its parameters, in lower case."""
        return self.header("content-type").partition(";")[0].strip().lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An HTTP answer."""

    status: int = 200
    """The HTTP status."""

    body: str | bytes
    """The body, as text or bytes."""

    content_type: str = JSON
    """Its media type."""

    headers: Headers = field(default=())
    """Further headers."""

    close: bool = False
    """Whether to close the connection, because a part of the request was not read."""

    packed: bytes | None = None
    """The body compressed with gzip, if this was done already; sent only to clients that accept gzip."""

    def raw(self) -> bytes:
        """Return the body as bytes."""
        return self.body.encode() if isinstance(self.body, str) else self.body


def value_of(scope: Scope, wanted: str) -> bytes | None:
    """Return the last value of a header; None if it is missing. The name is in lower case."""
    named_so = [value for name, value in scope["headers"] if name == wanted.encode("latin-1")]
    return named_so[-1] if named_so else None


def header(scope: Scope, wanted: bytes) -> str:
    """Return the last value of a header; "" if it is missing. The name is in lower case."""
    found = b""
    for name, value in scope["headers"]:
        if name == wanted:
            found = value
    return found.decode("latin-1")


def headers(scope: Scope) -> dict[str, str]:
    """Return the last value of every header, by its name in lower case."""
    return named(scope["headers"])


def named(given: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the last value of every header, by its name as received."""
    return {n.decode("latin-1"): v.decode("latin-1") for n, v in given}


class HttpError(Exception):
    """A request gets an HTTP error status because of a rule of HTTP, not of the dataplane."""

    def __init__(self, status: int, message: str) -> None:
        """Args: status: the HTTP status; message: one line for the client."""
        self.status = status
        self.body = error_body(message)
        super().__init__(message)


def error_body(message: str) -> str:
    """Return the JSON body of an error, in the form that TensorFlow Serving's clients expect."""
    return json.dumps({"error": message})


CODINGS = {"gzip": 31, "deflate": 15}
"""Content coding -> zlib's argument `wbits` for it. Source: RFC 9110, 8.4.1."""

_WORTH_BYTES = 1024
"""Minimum size of an answer that is compressed, bytes. For a smaller answer, gzip's header takes as much as is
saved."""

_LEVEL = 1
"""Compression level. For digits, the size differs by only a few percent between levels; this level is the fastest."""


def decompressed(body: bytes, *, coding: str, limit: int) -> bytes:
    """Return a decompressed body, without exceeding the limit.

    Args:
        body: The body as received.
        coding: One of `CODINGS`.
        limit: Maximum number of bytes after decompression.

    Raises:
        HttpError: the body is damaged, has trailing bytes, or is too large.
    """
    reader = zlib.decompressobj(CODINGS[coding])
    try:
        found = reader.decompress(body, limit + 1)
    except zlib.error as error:
        raise HttpError(400, f"the body must be {coding}, as its header says") from error
    if len(found) > limit:
        raise HttpError(413, f"the body must have at most {limit:,} bytes")
    if not reader.eof or reader.unused_data:
        raise HttpError(400, f"the body must be one whole {coding} stream")
    return found


def takes_gzip(accept: str) -> bool:
    """Return whether a client with this `Accept-Encoding` accepts gzip."""
    for part in accept.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def compressed(body: bytes) -> bytes | None:
    """Return the body compressed with gzip; None if it is too small."""
    return gzip.compress(body, _LEVEL, mtime=0) if len(body) >= _WORTH_BYTES else None
