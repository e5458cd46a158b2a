"""Caches parsed headers by their bytes: a client sends the same ones again and again.

What a head says is read once, by the parser that reads every head. One that came before, byte for
byte, with its body and nothing more behind it, needs no parser.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_PATH, _METHOD = b"/v1/models/", b":predict"

_NOT_PLAIN = frozenset(
    (b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"traceparent")
)
"""Headers of a request that is not taken."""

_TENSOR = b"octet-stream"

_END = b"\r\n\r\n"

MOST_HEADS = 1024
"""Most headers that are cached; another body length counts as another one."""

_MOST_BYTES = 2048
"""Longest head that is kept."""

MAX_BYTES = 16 << 10
"""Largest body that is taken: the loop reads nothing else meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The line and the headers of a request."""

    raw_path: bytes
    """The path as sent; there is no query."""

    path: str
    """The same as text."""

    http_version: str
    """1.0 or 1.1."""

    headers: list[tuple[bytes, bytes]]
    """Their names in lower case."""

    keep_alive: bool
    """Whether the connection stays after the answer."""

    takes_gzip: bool
    """Whether the answer may be compressed."""


class HeaderCache:
    """Those that came lately; used by the loop's thread only."""

    def __init__(self) -> None:
        """Know none."""
        self._known: dict[bytes, tuple[Head, int]] = {}
        self.hits = self.misses = 0

    def find(self, data: bytes) -> tuple[Head, bytes] | None:
        """The head and the body of a request that is one, whole, of a known head; else None."""
        end = data.find(_END) + len(_END)
        known = self._known.get(data[:end])
        if known is None or len(data) - end != known[1]:
            return None
        self.hits += 1
        return known[0], data[end:]

    def add(self, data: bytes, head: Head, *, body_bytes: int) -> None:
        """Know the head of a request that came whole and alone in `data`; else nothing."""
        end = data.find(_END) + len(_END)
        if end > _MOST_BYTES or len(data) - end != body_bytes:
            return
        if len(self._known) >= MOST_HEADS:
            self._known.clear()  # those in use are back at once
        self._known[data[:end]] = head, body_bytes
        self.misses += 1


_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


def without_upgrade(data: bytes) -> bytes:
    """The bytes of a request without its offer of another protocol, which a server may pass over.

    Java's client makes one by default; the parser would give up at it, and lose the body.
    """
    end = data.find(_END)
    if end < 0 or b"upgrade:" not in data[:end].lower():
        return data
    return _UPGRADE.sub(b"", data[: end + 2]) + data[end + 2 :]


def is_small(method: bytes, target: bytes, given: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether a request is one for the lane, by its line and headers.

    Args:
        method: POST.
        target: Path and query as sent.
        given: Headers, their names in lower case.
    """
    named = method == b"POST" and target.startswith(_PATH) and target.endswith(_METHOD)
    if not named or b"%" in target or b"?" in target or b"#" in target:
        return False
    size = MAX_BYTES + 1
    for name, value in given:
        if name == b"content-length":
            size = int(value)
        elif name in _NOT_PLAIN or (
            name in (b"content-type", b"accept") and _TENSOR in value.lower()
        ):
            return False
    return size <= MAX_BYTES
