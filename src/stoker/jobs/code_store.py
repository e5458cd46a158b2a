"""Stores the code of jobs in a bucket. An object is named by its SHA-256 and verified after each download.

Credentials and endpoints are found as for `data.source` (`data.sources.stores.store`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from stoker.core.errors import DataError, Plain, UserError

BUCKETS = ("s3://", "gs://")
"""URL prefixes of folders in a bucket."""

ATTEMPTS, BACKOFF_S = 5, 0.5
"""Number of attempts of a request, and the pause after the first failure, seconds."""


def put_code(folder: str, digest: str, content: bytes) -> None:
    """Upload an archive to a bucket, unless it is there.

    Args:
        folder: `s3://BUCKET/FOLDER` or `gs://BUCKET/FOLDER`.
        digest: SHA-256 of the archive, hexadecimal.
        content: The archive.

    Raises:
        ConfigError: the folder is not a place in a bucket.
        UserError: the store fails or refuses the request.
    """
    from stoker.data.sources.stores.store import Store
    from stoker.data.sources.uri import parse_uri

    with _words_of_code():
        uri = parse_uri(folder)
        store, key = Store(uri, attempts=ATTEMPTS, backoff_s=BACKOFF_S), _key(uri.key, digest)
        # An object from an interrupted upload has another size.
        if store.status(key).size != len(content):
            store.put(key, content)


def fetch_code(folder: str, digest: str) -> bytes:
    """Download an archive from a bucket.

    Args:
        folder: `s3://BUCKET/FOLDER` or `gs://BUCKET/FOLDER`.
        digest: SHA-256 of the archive, hexadecimal.

    Raises:
        DataError: the archive is missing or damaged.
        UserError: the store fails or refuses the request.
    """
    from stoker.data.sources.stores.store import ChangedMeanwhile, Store
    from stoker.data.sources.uri import parse_uri

    with _words_of_code():
        uri = parse_uri(folder)
        store, key = Store(uri, attempts=ATTEMPTS, backoff_s=BACKOFF_S), _key(uri.key, digest)
        found = store.status(key)
        try:
            size = max(0, found.size or 0)
            pieces = store.pieces(key, size_bytes=size, mtime_ns=found.mtime_ns or 0)
            content = b"".join(pieces)
        except ChangedMeanwhile:
            content = b""
    if (got := hashlib.sha256(content).hexdigest()) != digest:
        raise DataError(
            f"{uri.location(key)} must be the code that was submitted",
            got=Plain(f"SHA-256 {got[:12]}..." if content else "no such object"),
            fix="Delete the object, and submit the experiment again.",
        )
    return content


def _key(folder: str, digest: str) -> str:
    return "/".join(filter(None, (folder, f"{digest}.tar.gz")))


@contextmanager
def _words_of_code() -> Iterator[None]:
    """Replace the name of the setting `data.source` by `code` in errors of the store."""
    try:
        yield
    except UserError as error:
        rule, fix = (text.replace("data.source", "code") for text in (error.rule, error.fix))
        raise type(error)(rule, got=error.got, fix=fix) from None
