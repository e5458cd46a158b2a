"""Caches parsed headers by their bytes, because a client sends the same headers again and again.

A request needs no parser if exactly the same header bytes are cached, and if it arrives complete and without a part of
another request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.serve.rest.messages import value_of

_PATH, _METHOD = b"/v1/models/", b":predict"

_NOT_PLAIN = frozenset(
    (b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"traceparent")
)
"""Headers because of which a request is not answered in the event loop."""

_TENSOR = b"octet-stream"

_END = b"\r\n\r\n"

MAX_HEADS = 1024
"""Maximum number of cached headers. Headers that differ only in the body's length count as different."""

_MAX_BYTES = 2048
"""Maximum size of cached headers, bytes."""

MAX_BYTES = 16 << 10
"""Maximum size of a body that is answered in the event loop, bytes. The loop reads nothing else meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The request line and the headers of a request."""

    raw_path: bytes
    """The path as sent; it has no query."""

    path: str
    """The path as `str`."""

    http_version: str
    """1.0 or 1.1."""

    headers: list[tuple[bytes, bytes]]
    """Names in lower case, and values."""

    keep_alive: bool
    """Whether the connection stays open after the answer."""

    takes_gzip: bool
    """Whether the answer may be compressed."""

    def value_of(self, wanted: str) -> bytes | None:
        """Return the last value of a header; None if it is missing. The name is in lower case."""
        return value_of({"headers": self.headers}, wanted)


class HeaderCache:
    """A cache of recently received headers. Only the event loop's thread uses it."""

    def __init__(self) -> None:
        """Start empty."""
        self._known: dict[bytes, tuple[Head, int]] = {}
        self.hits = self.misses = 0

    def find(self, data: bytes) -> tuple[Head, bytes] | None:
        """Return head and body if the data is exactly one request whose headers are cached; else None."""
        end = data.find(_END) + len(_END)
        known = self._known.get(data[:end])
        if known is None or len(data) - end != known[1]:
            return None
        self.hits += 1
        return known[0], data[end:]

    def add(self, data: bytes, head: Head, *, body_bytes: int) -> None:
        """Cache the head of a request if `data` is exactly that request."""
        end = data.find(_END) + len(_END)
        if end > _MAX_BYTES or len(data) - end != body_bytes:
            return
        if len(self._known) >= MAX_HEADS:
            self._known.clear()  # headers in use are soon cached again
        self._known[data[:end]] = head, body_bytes
        self.misses += 1


_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


def without_upgrade(data: bytes) -> bytes:
    """Return a request without its `Upgrade` header, which a server may ignore.

    Java's HTTP client sends this header by default; the parser would stop after the headers and lose the body.
    """
    end = data.find(_END)
    if end < 0 or b"upgrade:" not in data[:end].lower():
        return data
    return _UPGRADE.sub(b"", data[: end + 2]) + data[end + 2 :]


def is_small(method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Return whether request line and headers allow an answer in the event loop.

    Args:
        method: The HTTP method.
        target: Path and query as sent.
        headers: Names in lower case, and values.
    """
    named = method == b"POST" and target.startswith(_PATH) and target.endswith(_METHOD)
    if not named or b"%" in target or b"?" in target or b"#" in target:
        return False
    size = MAX_BYTES + 1
    for name, value in headers:
        if name == b"content-length":
            size = int(value)
        elif name in _NOT_PLAIN or (
            name in (b"content-type", b"accept") and _TENSOR in value.lower()
        ):
            return False
    return size <= MAX_BYTES
