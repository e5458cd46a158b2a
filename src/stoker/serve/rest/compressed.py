"""gzip bodies, there and back."""

from __future__ import annotations

import gzip
import zlib

from stoker.serve.rest.refused import Refused

_GZIP_BITS = 31
_WORTH_BYTES = 1024
"""Smallest answer that is compressed: below, the header costs what is saved."""

_LEVEL = 1
"""Digits compress to the same within a few per cent at every level; this one is the quickest."""


def decompressed(body: bytes, *, limit: int) -> bytes:
    """A gzip body, read no further than to its limit.

    Raises:
        Refused: it is damaged, goes on after its end, or is larger.
    """
    reader = zlib.decompressobj(_GZIP_BITS)
    try:
        found = reader.decompress(body, limit + 1)
    except zlib.error as error:
        raise Refused(400, "the body must be gzip, as its header says") from error
    if len(found) > limit:
        raise Refused(413, f"the body must have at most {limit:,} bytes")
    if not reader.eof or reader.unused_data:
        raise Refused(400, "the body must be one whole gzip stream")
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
