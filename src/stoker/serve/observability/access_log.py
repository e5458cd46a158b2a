"""The access log: who called what, with which result, and where the time went.

It contains neither bodies nor keys. Requests that were refused at the HTTP level (headers too large or too
slow, too many connections) reach no handler and are not logged.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from stoker.core.errors import ConfigError, Plain
from stoker.serve.observability.counters import Counter
from stoker.serve.request_record import RequestRecord
from stoker.serve.runtime.background import Background

_MAX_CHARS = 256
"""Maximum number of characters of a string from a client in a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One finished request."""

    protocol: str
    """ "REST" or "GRPC"."""

    method: str
    """ HTTP method and path, e.g. "POST /v1/models/M:predict"; over gRPC, the name of the method."""

    status: int | str
    """The HTTP status; over gRPC, the name of the status code."""

    record: RequestRecord
    """Facts about the request."""

    peer: str = ""
    """The client's address."""

    bytes_in: int = 0
    """Size of the received body, before decompression, bytes; over gRPC, size of the message."""

    bytes_out: int = 0
    """Size of the response body or message, bytes."""

    request_id: str = ""
    """The client's `X-Request-Id`, or a random ID."""

    key: str = ""
    """The name of the request's API key; never the key itself."""

    caller: Mapping[str, str] = field(default_factory=dict)
    """The trace headers of the request, from `caller_of`."""

    at_s: float = field(default_factory=time.time)
    """Time of the request's end, seconds of the wall clock."""

    def line(self, now_s: float) -> str:
        """Return the entry as JSON.

        Args:
            now_s: Time of the request's end, seconds of the monotonic clock.
        """
        record = self.record
        at = dt.datetime.fromtimestamp(self.at_s, dt.UTC)
        said = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "peer": self.peer,
            "protocol": self.protocol,
            "method": self.method[:_MAX_CHARS],
            "model": record.model[:_MAX_CHARS],
            "version": record.version,
            "signature": record.signature[:_MAX_CHARS],
            "rows": record.rows,
            "status": self.status,
            "ms_total": round((now_s - record.began_s) * 1e3, 3),
            "ms_queue": round(record.queued_s * 1e3, 3),
            "ms_run": round(record.run_s * 1e3, 3),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "request_id": self.request_id[:_MAX_CHARS],
            "key": self.key,
        }
        return json.dumps(said)


class AccessLog(Protocol):
    """Records finished requests without blocking."""

    def add(self, entry: Entry) -> None:
        """Record a request; returns at once."""

    def close(self) -> None:
        """Write the pending entries. No request may follow."""


@dataclass(frozen=True, slots=True)
class CombinedLog:
    """Records requests in several logs."""

    parts: tuple[AccessLog, ...]

    def add(self, entry: Entry) -> None:
        """Record a request in each log."""
        for part in self.parts:
            part.add(entry)

    def close(self) -> None:
        """Close each log."""
        for part in self.parts:
            part.close()


STANDARD_ERROR = "-"
"""The file name that means standard error."""


class AccessFile:
    """Appends a line of JSON per request to a file, and opens the file again after log rotation has moved it."""

    def __init__(self, path: str, *, dropped: Counter) -> None:
        """Args: path: the file; "-": standard error; dropped: counts lost lines.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._path = None if path == STANDARD_ERROR else Path(path)
        self._file = -1
        try:
            self._reopen_if_moved()
        except OSError as error:
            raise ConfigError(
                "the access log must be a writable file",
                got=Plain(f"{path} ({error.strerror})"),
            ) from error
        self._lines: Background[str] = Background(
            self._write,
            name="stoker-access-log",
            on_drop=lambda count: dropped.add(count, log="access"),
        )

    def add(self, entry: Entry) -> None:
        """Queue a line; returns at once."""
        self._lines.offer(entry.line(time.monotonic()))

    def close(self) -> None:
        """Write the pending lines, and close the file."""
        self._lines.close()
        if self._file >= 0:
            os.close(self._file)

    def _write(self, lines: Sequence[str]) -> None:
        text = "".join(line + "\n" for line in lines)
        if self._path is None:
            sys.stderr.write(text)
            sys.stderr.flush()
            return
        self._reopen_if_moved()
        raw = text.encode()
        while raw:  # usually one call, so that the lines of several workers do not mix
            raw = raw[os.write(self._file, raw) :]

    def _reopen_if_moved(self) -> None:
        if self._path is None:
            return
        if self._file >= 0:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file), self._path.stat()):
                    return
            os.close(self._file)
            self._file = -1
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)


_CALLER = frozenset((b"traceparent", b"tracestate", "traceparent", "tracestate"))
"""Headers that name the trace of a request. Source: W3C Trace Context."""


def caller_of(headers: Iterable[tuple[str | bytes, str | bytes]]) -> dict[str, str]:
    """Return the trace headers of a request.

    Args:
        headers: HTTP headers or gRPC metadata: names in lower case, and values.
    """
    return {_text(name): _text(value) for name, value in headers if name in _CALLER}


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def request_id_of(sent: str) -> str:
    """Return the client's ID of its request if it is printable, else a random ID."""
    return sent if sent and sent.isascii() and sent.isprintable() else os.urandom(8).hex()
