"""The headers of a call: read from HPACK, once for those that come again; and those of an answer.

Source: RFC 7541; grpc/grpc, `doc/PROTOCOL-HTTP2.md`.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable, table_entry_size

from stoker.serve.errors import Code
from stoker.serve.grpc.http2.frames import ConnectionFault, Error

_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}

_NOT_METADATA = frozenset(
    ("content-type", "te", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding")
)
"""Headers that are gRPC's own."""

_OF_CONNECTIONS = frozenset(("connection", "keep-alive", "proxy-connection", "upgrade"))
"""Headers that HTTP/2 forbids."""

_PSEUDO = frozenset((":method", ":scheme", ":path", ":authority"))

_KNOWN = 64
"""Most heads of a connection that are remembered."""

_KNOWN_BYTES = 1024
"""Largest of them, unpacked: a few bytes of HPACK may mean thousands."""

_MAX_SAID = 4096
"""Longest reason as it is sent: all headers must fit a frame of any client."""

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallHead:
    """What a call says of itself before its messages."""

    path: str = ""
    """`/package.Service/Method`."""

    timeout_s: float | None = None
    """How long its client waits, seconds; None for ever."""

    encoding: str = "identity"
    """How compressed messages are."""

    metadata: Metadata = ()
    """All else; values of names ending `-bin` are bytes."""

    malformed: bool = False
    """Whether it breaks a rule of HTTP/2: its stream is reset."""

    http_status: int = 0
    """The HTTP status that refuses what is no call of gRPC; 0 for a call."""

    refusal: tuple[Code, str] | None = None
    """gRPC's refusal of a call whose headers are wrong."""


class HeaderBlocks:
    """The header blocks of a connection.

    A client's calls are alike, and HPACK gives what came before a number: a block that changes
    nothing in the table of those numbers means the same for as long as nothing changes it.
    """

    def __init__(self, max_bytes: int) -> None:
        """Args: max_bytes: largest headers of a call that is answered, as RFC 9113 counts them."""
        self._max_bytes = max_bytes
        # Beyond it the table is lost, and all calls with it; up to it only the call is refused.
        self._decoder = Decoder(max_header_list_size=4 * max_bytes)
        self._known: dict[bytes, CallHead] = {}

    def read(self, block: bytes) -> CallHead:
        """The head that a whole block holds.

        Raises:
            ConnectionFault: it is no HPACK, or far too large.
        """
        found = self._known.get(block)
        if found is not None:
            return found
        table = self._decoder.header_table
        size, count, newest = _state(table)
        try:
            fields = [
                (bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)
            ]
        except OversizedHeaderListError as error:
            raise ConnectionFault(Error.ENHANCE_YOUR_CALM, "headers are too large") from error
        except HPACKError as error:
            raise ConnectionFault(Error.COMPRESSION_ERROR, "headers must be HPACK") from error
        head = self._head(fields)
        after = _state(table)
        if after[:2] != (size, count) or after[2] is not newest or len(self._known) >= _KNOWN:
            self._known.clear()
        elif len(block) + sum(len(name) + len(value) for name, value in fields) <= _KNOWN_BYTES:
            self._known[block] = head
        return head

    def _head(self, fields: list[tuple[bytes, bytes]]) -> CallHead:
        if sum(table_entry_size(name, value) for name, value in fields) > self._max_bytes:
            refusal = (Code.RESOURCE_EXHAUSTED, f"metadata must be at most {self._max_bytes} bytes")
            return CallHead(refusal=refusal)
        try:
            return _head_of([(name.decode(), value.decode()) for name, value in fields])
        except UnicodeDecodeError:
            return CallHead(malformed=True)


def _state(table: HeaderTable) -> tuple[int, int, object]:
    """What is another after every change: entries only come in front, and each is a new object."""
    entries = table.dynamic_entries
    return table.maxsize, len(entries), entries[0] if entries else None


def _head_of(fields: list[tuple[str, str]]) -> CallHead:
    pseudo = dict(pair for pair in fields if pair[0].startswith(":"))
    rest = fields[len(pseudo) :]
    named = dict(rest)
    if _is_malformed(pseudo, rest):
        return CallHead(malformed=True)
    if pseudo[":method"] != "POST":
        return CallHead(http_status=405)
    kind = named.get("content-type", "").lower()
    if not re.match(r"application/grpc($|[;+])", kind):
        return CallHead(http_status=415)
    try:
        timeout_s = _timeout_s(named.get("grpc-timeout"))
        metadata = tuple(_pairs(rest))
    except ValueError as error:
        return CallHead(refusal=(Code.INVALID_ARGUMENT, str(error)))
    return CallHead(
        path=pseudo[":path"],
        timeout_s=timeout_s,
        encoding=named.get("grpc-encoding", "identity"),
        metadata=metadata,
    )


def _is_malformed(pseudo: dict[str, str], rest: list[tuple[str, str]]) -> bool:
    """RFC 9113, 8.2 and 8.3."""
    return (
        not {":method", ":scheme", ":path"} <= pseudo.keys() <= _PSEUDO
        or any(name.startswith(":") or name != name.lower() or not name for name, _ in rest)
        or any(name in _OF_CONNECTIONS for name, _ in rest)
    )


def _timeout_s(text: str | None) -> float | None:
    if text is None:
        return None
    found = _TIMEOUT.fullmatch(text)
    if found is None:
        raise ValueError("grpc-timeout must be up to 8 digits and one of H, M, S, m, u, n")
    return int(found[1]) * _SECONDS[found[2]]


def _pairs(fields: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str | bytes]]:
    for name, value in fields:
        if name in _NOT_METADATA:
            continue
        if not name.endswith("-bin"):
            yield name, value
            continue
        for part in value.split(","):
            try:
                yield name, base64.b64decode(part + "=" * (-len(part) % 4), validate=True)
            except binascii.Error:
                raise ValueError(f"metadata {name[:100]!r} must be base64") from None


def block_of(fields: Iterable[tuple[str, str]]) -> bytes:
    """A header block that needs no table: literals that are not remembered."""
    parts = []
    for name, value in fields:
        parts += [b"\x00", _text(name.encode()), _text(value.encode())]
    return b"".join(parts)


def _text(raw: bytes) -> bytes:
    """RFC 7541, 5.1 and 5.2, without Huffman's code."""
    size = len(raw)
    if size < 127:
        return bytes((size,)) + raw
    head, size = [127], size - 127
    while size >= 128:
        head.append(size % 128 | 128)
        size //= 128
    return bytes((*head, size)) + raw


_STATUS_200 = b"\x88"
"""`:status: 200` by its number in the fixed table."""

ANSWER = _STATUS_200 + block_of([("content-type", "application/grpc")])
"""The headers before the messages of every answer."""

OK = block_of([("grpc-status", "0")])
"""The end of one that is right."""


def ending(code: int, said: str) -> bytes:
    """The end of an answer.

    Args:
        code: gRPC's status.
        said: The reason.
    """
    fields = [("grpc-status", str(code))]
    if said:
        text = quote(said, safe=_PLAIN, errors="replace")
        cut = text[:_MAX_SAID]
        if len(text) > _MAX_SAID and "%" in cut[-2:]:  # amid a byte
            cut = cut[: cut.rindex("%")]
        fields.append(("grpc-message", cut))
    return block_of(fields)


def refusal(status: int) -> bytes:
    """The headers that refuse what is no call of gRPC: an HTTP status alone."""
    return block_of([(":status", str(status))])


_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
"""What a status message has as it is."""


def waits_s(head: CallHead) -> float:
    """How long the client of a call waits, seconds."""
    return math.inf if head.timeout_s is None else head.timeout_s
