"""Decodes request headers from HPACK, with a cache, and encodes the headers and trailers of responses.

Source: RFC 7541; grpc/grpc, `doc/PROTOCOL-HTTP2.md`.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable, table_entry_size

from stoker.serve.errors import Code
from stoker.serve.grpc_server.frames import ConnectionFault, Error
from stoker.serve.grpc_server.limits import CACHED_BLOCK_BYTES, CACHED_BLOCKS, MAX_STATUS_MESSAGE

_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}

_NOT_METADATA = frozenset(
    ("content-type", "te", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding")
)
"""Headers that belong to gRPC itself, not to a call's metadata."""

_CONNECTION_HEADERS = frozenset(("connection", "keep-alive", "proxy-connection", "upgrade"))
"""Headers that HTTP/2 forbids."""

_PSEUDO = frozenset((":method", ":scheme", ":path", ":authority"))

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallHeaders:
    """The headers of a call."""

    path: str = ""
    """`/package.Service/Method`."""

    timeout_s: float | None = None
    """The client's deadline, seconds from now; None: no deadline."""

    encoding: str = "identity"
    """Name of the compression that compressed messages of the call have."""

    metadata: Metadata = ()
    """All other headers. Values are bytes where the name ends with `-bin`."""

    malformed: bool = False
    """Whether the headers break a rule of HTTP/2, so that the stream is reset."""

    http_status: int = 0
    """The HTTP status of the answer to a request that is not a gRPC call; 0: it is a gRPC call."""

    refusal: tuple[Code, str] | None = None
    """The gRPC status of a call with invalid headers; None: they are valid."""


class HeaderDecoder:
    """Decodes the header blocks of a connection.

    Calls of the same client have similar headers, and HPACK replaces repeated headers by indexes into a table. The
    meaning of a block that does not change the table is cached until another block changes the table.
    """

    def __init__(self, max_bytes: int) -> None:
        """Args: max_bytes: maximum size of the headers of an accepted call, counted as in RFC 9113."""
        self._max_bytes = max_bytes
        # Headers between max_bytes and the decoder's limit: only the call is refused. Larger ones: the decoder's table
        # is incomplete, so the connection is closed.
        self._decoder = Decoder(max_header_list_size=4 * max_bytes)
        self._cache: dict[bytes, CallHeaders] = {}

    def decode(self, block: bytes) -> CallHeaders:
        """Return the headers in a complete block.

        Raises:
            ConnectionFault: the block is not HPACK, or far too large.
        """
        cached = self._cache.get(block)
        if cached is not None:
            return cached
        table = self._decoder.header_table
        size, count, newest = _state(table)
        try:
            fields = [
                (bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)
            ]
        except OversizedHeaderListError as error:
            raise ConnectionFault(Error.ENHANCE_YOUR_CALM, "the headers are too large") from error
        except HPACKError as error:
            raise ConnectionFault(
                Error.COMPRESSION_ERROR, "the headers are not valid HPACK"
            ) from error
        headers = self._checked(fields)
        after = _state(table)
        unchanged = after[:2] == (size, count) and after[2] is newest
        if not unchanged or len(self._cache) >= CACHED_BLOCKS:
            self._cache.clear()
        elif len(block) + sum(map(len, (part for field in fields for part in field))) <= (
            CACHED_BLOCK_BYTES
        ):
            self._cache[block] = headers
        return headers

    def _checked(self, fields: list[tuple[bytes, bytes]]) -> CallHeaders:
        if sum(table_entry_size(name, value) for name, value in fields) > self._max_bytes:
            refusal = (Code.RESOURCE_EXHAUSTED, f"metadata must be at most {self._max_bytes} bytes")
            return CallHeaders(refusal=refusal)
        try:
            return _parsed([(name.decode(), value.decode()) for name, value in fields])
        except UnicodeDecodeError:
            return CallHeaders(malformed=True)


def _state(table: HeaderTable) -> tuple[int, int, object]:
    """Return a value that differs after every change of the table.

    Entries are only added in front, each as a new object.
    """
    entries = table.dynamic_entries
    return table.maxsize, len(entries), entries[0] if entries else None


def _parsed(fields: list[tuple[str, str]]) -> CallHeaders:
    pseudo = dict(pair for pair in fields if pair[0].startswith(":"))
    rest = fields[len(pseudo) :]
    by_name = dict(rest)
    if _is_malformed(pseudo, rest):
        return CallHeaders(malformed=True)
    if pseudo[":method"] != "POST":
        return CallHeaders(http_status=405)
    if not re.match(r"application/grpc($|[;+])", by_name.get("content-type", "").lower()):
        return CallHeaders(http_status=415)
    try:
        timeout_s = _timeout_s(by_name.get("grpc-timeout"))
        metadata = tuple(_metadata(rest))
    except ValueError as error:
        return CallHeaders(refusal=(Code.INVALID_ARGUMENT, str(error)))
    return CallHeaders(
        path=pseudo[":path"],
        timeout_s=timeout_s,
        encoding=by_name.get("grpc-encoding", "identity"),
        metadata=metadata,
    )


def _is_malformed(pseudo: dict[str, str], rest: list[tuple[str, str]]) -> bool:
    """Return whether headers break the rules of RFC 9113, sections 8.2 and 8.3."""
    return (
        not {":method", ":scheme", ":path"} <= pseudo.keys() <= _PSEUDO
        or any(name.startswith(":") or name != name.lower() or not name for name, _ in rest)
        or any(name in _CONNECTION_HEADERS for name, _ in rest)
    )


def _timeout_s(text: str | None) -> float | None:
    if text is None:
        return None
    found = _TIMEOUT.fullmatch(text)
    if found is None:
        raise ValueError("grpc-timeout must be up to 8 digits and one of H, M, S, m, u, n")
    return int(found[1]) * _SECONDS[found[2]]


def _metadata(fields: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str | bytes]]:
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


def encode(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return a header block of literals, which neither uses nor changes the HPACK table."""
    parts = []
    for name, value in fields:
        parts += [b"\x00", _string(name.encode()), _string(value.encode())]
    return b"".join(parts)


def _string(raw: bytes) -> bytes:
    """Return a string as HPACK encodes it without Huffman coding. Source: RFC 7541, 5.1 and 5.2."""
    size = len(raw)
    if size < 127:
        return bytes((size,)) + raw
    prefix, size = [127], size - 127
    while size >= 128:
        prefix.append(size % 128 | 128)
        size //= 128
    return bytes((*prefix, size)) + raw


_STATUS_200 = b"\x88"
"""`:status: 200`, by its index in the static table."""


@functools.lru_cache(maxsize=1024)
def metadata(fields: tuple[tuple[str, str], ...]) -> bytes:
    """Return metadata as a header block. Cached, because many calls have the same fields."""
    return encode(fields)


EMPTY_TABLE = b"\x20"
"""Sets the size of the dynamic table to 0; must be at the beginning of a header block."""

RESPONSE = _STATUS_200 + encode([("content-type", "application/grpc")])
"""The headers before the messages of a response."""

OK = encode([("grpc-status", "0")])
"""The trailers of a successful call."""


def trailers(code: int, message: str) -> bytes:
    """Return the trailers of a failed call.

    Args:
        code: The gRPC status.
        message: The status message.
    """
    fields = [("grpc-status", str(code))]
    if message:
        text = quote(message, safe=_UNQUOTED, errors="replace")
        cut = text[:MAX_STATUS_MESSAGE]
        if len(text) > MAX_STATUS_MESSAGE and "%" in cut[-2:]:  # the cut is inside an escaped byte
            cut = cut[: cut.rindex("%")]
        fields.append(("grpc-message", cut))
    return encode(fields)


def http_refusal(status: int) -> bytes:
    """Return the headers of the answer to a request that is not a gRPC call: only an HTTP status."""
    return encode([(":status", str(status))])


_UNQUOTED = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
"""Characters that need no escape in a status message."""
