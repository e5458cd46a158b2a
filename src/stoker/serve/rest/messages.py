"""One HTTP request, whole, and its answer."""

from __future__ import annotations

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


def value_of(scope: Scope, wanted: str) -> bytes | None:
    """The last value of a header, None if there is none; the name in lower case."""
    named_so = [value for name, value in scope["headers"] if name == wanted.encode("latin-1")]
    return named_so[-1] if named_so else None


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
