"""Compressed bodies: gzip there and back, deflate from clients that know nothing else."""

from __future__ import annotations

import gzip
import zlib

from stoker.serve.rest.http_error import HttpError

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
