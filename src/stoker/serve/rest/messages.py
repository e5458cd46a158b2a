"""One HTTP request, whole, and its answer."""

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
TEXT = "text/plain; version=0.0.4; charset=utf-8"
RAW = "application/octet-stream"

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One HTTP request."""

    scope: Scope
    """ASGI's; the headers are looked for only where they are asked for."""

    body: bytes
    """The whole body, decompressed."""

    deadline: Deadline
    """How long its client waits."""

    @property
    def method(self) -> str:
        """What is asked for: GET, POST."""
        return self.scope["method"]

    @property
    def path(self) -> str:
        """The path, unescaped."""
        return self.scope["path"]

    def header(self, name: str) -> str:
        """The last value of a header, empty if there is none; the name in lower case."""
        return header(self.scope, name.encode())

    @property
    def media_type(self) -> str:
        """The content type without its parameters, in lower case."""
        return self.header("content-type").partition(";")[0].strip().lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One HTTP answer."""

    status: int = 200
    """The HTTP status."""

    body: str | bytes
    """The text, or what is no text."""

    content_type: str = JSON
    """Its media type."""

    headers: Headers = field(default=())
    """More of its headers."""

    close: bool = False
    """Whether the connection must end: a part of the request was not read."""

    def raw(self) -> bytes:
        """The body as it goes over the wire."""
        return self.body.encode() if isinstance(self.body, str) else self.body


def header(scope: Scope, wanted: bytes) -> str:
    """The last value of a header, empty if there is none; the name in lower case."""
    found = b""
    for name, value in scope["headers"]:
        if name == wanted:
            found = value
    return found.decode("latin-1")


def headers(scope: Scope) -> dict[str, str]:
    """The last value of every header, by its name in lower case."""
    return named(scope["headers"])


def named(given: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The last value of every header, by its name, as it is written in `given`."""
    return {n.decode("latin-1"): v.decode("latin-1") for n, v in given}


class HttpError(Exception):
    """A request that HTTP itself has a status for."""

    def __init__(self, status: int, message: str) -> None:
        """Args: status: the HTTP status; message: one line for the client."""
        self.status = status
        self.body = error_body(message)
        super().__init__(message)


def error_body(message: str) -> str:
    """An error as TensorFlow Serving's clients expect it."""
    return json.dumps({"error": message})


CODINGS = {"gzip": 31, "deflate": 15}
"""Content coding of a request -> zlib's number for it. Source: RFC 9110, 8.4.1."""

_WORTH_BYTES = 1024
"""Smallest answer that is compressed: below, the header costs what is saved."""

_LEVEL = 1
"""Digits compress to the same within a few per cent at every level; this one is the quickest."""


def decompressed(body: bytes, *, coding: str, limit: int) -> bytes:
    """A compressed body, read no further than to its limit.

    Args:
        body: As it came.
        coding: One of `CODINGS`.
        limit: Most bytes that it may have when it is not compressed.

    Raises:
        HttpError: it is damaged, goes on after its end, or is larger.
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
    """Whether a client that sends this `Accept-Encoding` reads gzip."""
    for part in accept.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def compressed(body: bytes) -> bytes | None:
    """The body as gzip; None where that is not worth it."""
    return gzip.compress(body, _LEVEL, mtime=0) if len(body) >= _WORTH_BYTES else None
