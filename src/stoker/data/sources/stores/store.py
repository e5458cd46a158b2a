"""Requests to an object store through `pyarrow.fs`, with a limited number of attempts and errors of one line.

These environment variables and the options in the URI say how a store is reached: `AWS_ENDPOINT_URL_S3`,
`AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_DEFAULT_REGION`, `STORAGE_EMULATOR_HOST`. Credentials are found by the
store's own library, in the environment, in its files or by the machine's role; Stoker never reads them.
"""

from __future__ import annotations

import functools
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from stoker.core.errors import DataError, Plain, UserError
from stoker.data.sources.uri import StoreUri

PIECE_BYTES = 8 << 20
"""Number of bytes per request: enough that the latency does not matter, and little is lost if the request fails."""

LONGEST_PAUSE_S = 30.0
"""Maximum pause between two attempts, seconds."""

_INNER_ATTEMPTS = 3
"""Number of attempts that the S3 library makes for a request, so that a list of 1,000 pages does not start again
because of one page. Each of Stoker's own attempts has this many."""

_INNER_RETRY_S = 5
"""Time for which the GCS library repeats a request, seconds."""

_TIMEOUT_S = 30.0

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("STORAGE_EMULATOR_HOST",),
}

_SPREAD = random.Random()  # noqa: S311 - no secret
"""A separate generator, because draws from the process's own generator would change the results of a training."""

_T = TypeVar("_T")

_STRANGER = (
    r"EXPIRED_TOKEN|REQUEST_EXPIRED|INVALID_ACCESS_KEY_ID|INVALID_CLIENT_TOKEN|UNAUTHENTICATED"
    r"|SIGNATURE_DOES_NOT_MATCH|INVALID_SIGNATURE|MISSING_AUTHENTICATION|ExpiredToken"
    r"|InvalidToken|InvalidAccessKeyId|[Dd]efault credentials"
)

_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        _STRANGER,
        "credentials that are missing, wrong or expired",
        "Renew the credentials and run the command again; files that were downloaded are kept.",
    ),
    (
        r"ACCESS_DENIED|PERMISSION_DENIED|HTTP (?:status|response code:) 403",
        "access denied (403)",
        "Check that the credentials have not expired, and allow to list and read; downloaded files are kept.",
    ),
    (
        # For a request without a body, S3 reports nothing more specific.
        r"HTTP status 400",
        "a request that the store refuses (400)",
        "Check that the credentials have not expired, and that AWS_REGION is the bucket's region.",
    ),
    (
        r"HTTP status 301",
        "a bucket in a different region (301)",
        "Set AWS_REGION, or add ?region=REGION to data.source.",
    ),
    (
        r"NO_SUCH_BUCKET|NO_SUCH_KEY|RESOURCE_NOT_FOUND|\bNOT_FOUND\b|HTTP status 404",
        "no such bucket or object",
        "Check data.source.",
    ),
)
"""Errors that another attempt cannot fix: (pattern of the library's text, what was received, what to do)."""


class ChangedMeanwhile(Exception):
    """Raised if an object has changed since it was listed or opened."""


class Store:
    """Requests to one bucket of a store."""

    def __init__(self, uri: StoreUri, *, attempts: int, backoff_s: float) -> None:
        """Keep the settings; nothing is sent before the first request.

        Args:
            uri: URI of the bucket, or of an object or folder in it.
            attempts: Number of attempts for a request.
            backoff_s: Pause after the first failed attempt, seconds; it is doubled after each further one.
        """
        self.endpoint = _endpoint(uri)
        self._uri = uri
        self._attempts, self._backoff_s = attempts, backoff_s
        self._made: fs.FileSystem | None = None
        self._making = threading.Lock()

    def status(self, key: str) -> fs.FileInfo:
        """Return the status of a key, which says whether it is an object, a folder (a prefix of keys) or nothing."""
        path = self._path(key)
        return self._request(key, lambda system: system.get_file_info(path))

    def below(self, key: str) -> list[fs.FileInfo]:
        """Return all objects and folders in a folder, at any depth."""
        wanted = fs.FileSelector(self._path(key), recursive=True, allow_not_found=True)
        return self._request(key, lambda system: system.get_file_info(wanted))

    def key_of(self, info: fs.FileInfo) -> str:
        """Return the key of a listed object."""
        return str(info.path).removeprefix(f"{self._uri.bucket}/")

    def pieces(self, key: str, *, size_bytes: int, mtime_ns: int) -> Iterator[bytes]:
        """Yield an object's content in pieces; if the connection breaks, only one piece is read again.

        Args:
            key: Key of the object.
            size_bytes: Length of the object when it was listed, bytes.
            mtime_ns: Modification time of the object when it was listed, nanoseconds.

        Raises:
            ChangedMeanwhile: the object has a different length, was removed, or was written while it was
                read.
            UserError: the store fails or refuses the request.
        """
        reading = _Reading(path=self._path(key), size_bytes=size_bytes)
        try:
            for start in range(0, size_bytes, PIECE_BYTES):
                if is_ending():
                    raise InterruptedError("the program has ended")
                yield self._request(key, functools.partial(reading.piece, start))
            # A single request reads one version of an object; several requests may read different versions.
            if reading.requests > 1:
                self._request(key, reading.check_etag)
                if self._uri.scheme == "gs" and self.status(key).mtime_ns != mtime_ns:
                    raise ChangedMeanwhile
        except DataError as gone:
            raise ChangedMeanwhile from gone

    def put(self, key: str, content: bytes) -> None:
        """Write an object; until it is complete, the store may hold a part of it.

        Raises:
            UserError: the store fails or refuses the request.
        """

        def write(system: fs.FileSystem) -> None:
            with system.open_output_stream(self._path(key), compression=None) as stream:
                stream.write(content)

        self._request(key, write)

    def _path(self, key: str) -> str:
        return f"{self._uri.bucket}/{key}" if key else self._uri.bucket

    def _system(self) -> fs.FileSystem:
        with self._making:
            if self._made is None:
                self._made = _filesystem(self._uri, self.endpoint)
            return self._made

    def _request(self, key: str, request: Callable[[fs.FileSystem], _T]) -> _T:
        """Send a request; if it fails with an error that may be temporary, repeat it after a pause."""
        attempt = 1
        while True:
            try:
                return request(self._system())
            except (OSError, pa.ArrowException) as error:
                meaning = _meaning(error)
                if meaning is not None or attempt >= self._attempts or is_ending():
                    location = self._uri.location(key)
                    raise _failure(location, error, meaning, attempt) from error
            pause_s = min(LONGEST_PAUSE_S, self._backoff_s * 2 ** (attempt - 1))
            # The pause is random, because readers that fail at the same time should not retry at the same time.
            time.sleep(pause_s * _SPREAD.uniform(0.5, 1.0))  # a busy store needs time to recover
            attempt += 1


class _Reading:
    """Reads one object in pieces, from the first to the last."""

    def __init__(self, *, path: str, size_bytes: int) -> None:
        self.requests = 0
        self._path = path
        self._size_bytes = size_bytes
        self._stream: pa.NativeFile | None = None
        self._file: pa.NativeFile | None = None
        self._etag: object = None

    def piece(self, start: int, system: fs.FileSystem) -> bytes:
        """Return the piece that begins at byte `start`; after a failure, call it again with the same `start`."""
        wanted = min(PIECE_BYTES, self._size_bytes - start)
        data = self._read(start, wanted, system)
        if len(data) != wanted:
            if system.get_file_info(self._path).size != self._size_bytes:
                raise ChangedMeanwhile
            raise OSError(f"{len(data):,} bytes were received instead of {wanted:,}")
        return data

    def check_etag(self, system: fs.FileSystem) -> None:
        """Check that S3 still has the version that was opened; for GCS, `Store.pieces` checks it."""
        if self._etag is not None and _etag(self._open(system)) != self._etag:
            raise ChangedMeanwhile

    def _open(self, system: fs.FileSystem) -> pa.NativeFile:
        # Arrow would decompress an object whose name ends in .gz.
        return system.open_input_stream(self._path, compression=None)

    def _read(self, start: int, wanted: int, system: fs.FileSystem) -> bytes:
        """Read from a stream or, after the stream has failed, by position.

        Streams are the normal case: to read a GCS file by position, Arrow 26 opens it while it holds the GIL, and
        downloads it once more.
        """
        self.requests += 1
        if self._file is not None:
            return bytes(self._file.read_at(wanted, start))
        if start and self._stream is None:
            self._file = system.open_input_file(self._path)
            return bytes(self._file.read_at(wanted, start))
        stream, self._stream = self._stream or self._open(system), None
        if self._etag is None and isinstance(system, fs.S3FileSystem):
            self._etag = _etag(stream)
        data = bytes(stream.read(wanted))
        if start + wanted == self._size_bytes and stream.read(1):
            raise ChangedMeanwhile
        self._stream = stream
        return data


def _etag(opened: pa.NativeFile) -> object:
    return opened.metadata().get("ETag")


def is_ending() -> bool:
    """Return whether the main thread has ended; then no reader waits for downloads in advance."""
    return not threading.main_thread().is_alive()


def _endpoint(uri: StoreUri) -> str:
    """Return the store's endpoint as scheme, host and port; "" for the default."""
    names = _ENDPOINTS[uri.scheme]
    given = uri.options.get("endpoint_override") or next(
        filter(None, map(os.environ.get, names)), ""
    )
    if not given:
        return ""
    # STORAGE_EMULATOR_HOST may have a scheme or not; without it, it is HTTP, which emulators use.
    default = "https" if uri.scheme == "s3" or "endpoint_override" in uri.options else "http"
    parts = urlsplit(given if "://" in given else f"{uri.options.get('scheme', default)}://{given}")
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname}{port}"


def _filesystem(uri: StoreUri, endpoint: str) -> fs.FileSystem:
    parts = urlsplit(endpoint)
    reached = {"endpoint_override": parts.netloc, "scheme": parts.scheme} if endpoint else {}
    anonymous = uri.options.get("anonymous") == "true"
    if uri.scheme == "s3":
        return fs.S3FileSystem(
            anonymous=anonymous,
            region=_region(uri, endpoint),
            connect_timeout=_TIMEOUT_S,
            request_timeout=_TIMEOUT_S,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_INNER_ATTEMPTS),
            **reached,
        )
    return fs.GcsFileSystem(
        # An emulator needs no credentials, and this machine may have none.
        anonymous=anonymous or "STORAGE_EMULATOR_HOST" in os.environ,
        retry_time_limit=timedelta(seconds=_INNER_RETRY_S),
        **reached,
    )


def _region(uri: StoreUri, endpoint: str) -> str:
    given = (
        uri.options.get("region"),
        os.environ.get("AWS_REGION"),
        os.environ.get("AWS_DEFAULT_REGION"),
        "us-east-1" if endpoint else None,
    )
    found = next(filter(None, given), None)
    return found or str(fs.resolve_s3_region(uri.bucket))


def _meaning(error: Exception) -> tuple[str, str] | None:
    """Return what an error means and what to do; None if another attempt may succeed."""
    if isinstance(error, FileNotFoundError):
        return _CAUSES[-1][1:]
    for pattern, cause, fix in _CAUSES:
        if re.search(pattern, str(error)):
            return cause, fix
    return None if isinstance(error, OSError) else (_text_of(error), "Check data.source.")


def _failure(
    location: str, error: Exception, meaning: tuple[str, str] | None, attempts: int
) -> UserError:
    cause, fix = meaning or (
        f"{_text_of(error)}, after {attempts} attempts",
        "Run the command again when the store answers; files that were downloaded are kept.",
    )
    # Only a missing object is an error of the data; all other errors may not occur in another run.
    kind = DataError if cause == _CAUSES[-1][1] else UserError
    return kind(f"{location} must be readable", got=Plain(cause), fix=fix)


def _text_of(error: Exception) -> str:
    """Return the useful part of the text of an error that a store's library raised."""
    text = " ".join(str(error).split())
    for pattern in (r"last message of (.*?) error_info=", r"AWS Error (.*?)(?: \(Request ID.*)?$"):
        if found := re.search(pattern, text):
            return found[1].rstrip(".")
    return text or type(error).__name__
