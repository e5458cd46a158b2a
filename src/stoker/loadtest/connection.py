"""A non-blocking HTTP/1.1 connection with one request at a time."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
from collections.abc import Sequence

import httptools

from stoker.client.connection import Address
from stoker.client.rows import Request
from stoker.loadtest.config import SocketAddress

_CHUNK_BYTES = 1 << 18

_READ, _BOTH = selectors.EVENT_READ, selectors.EVENT_READ | selectors.EVENT_WRITE

_CONNECTING = (errno.EINPROGRESS, errno.EWOULDBLOCK)

CLOSED = "connection closed"
"""Error text: the server closed the connection before the answer was complete."""

NOT_HTTP = "no HTTP answer"
"""Error text: the answer could not be parsed."""


class HttpConnection:
    """Sends one request at a time and reads its answer; opens a new connection if the server closed the old one."""

    def __init__(self, address: SocketAddress, selector: selectors.BaseSelector) -> None:
        """Create the object; `open` or the first request connects."""
        self._address = address
        self._selector = selector
        self._socket: socket.socket | None = None
        self._watched = _BOTH
        self._left = memoryview(b"")
        self._status = 0
        self._whole = False
        self._parser = httptools.HttpResponseParser(self)
        self.due_s = 0.0
        """Due time of the current request."""
        self.began_s = 0.0
        """Time at which the connection got the current request."""

    def open(self) -> str:
        """Start to connect; return the error if this fails immediately, else ""."""
        family, address = self._address
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = made.connect_ex(address)
        if code not in (0, *_CONNECTING):
            made.close()
            return _error_text(code)
        self._socket = made
        self._parser = httptools.HttpResponseParser(self)
        self._watched = _BOTH
        self._selector.register(made, _BOTH, self)
        return ""

    def send(self, request: bytes, *, due_s: float, now_s: float) -> str:
        """Start to send a request; return the error if this fails immediately, else ""."""
        self.due_s, self.began_s = due_s, now_s
        self._left, self._whole, self._status = memoryview(request), False, 0
        return self.open() if self._socket is None else self._write()

    def on_ready(self, events: int) -> str | None:
        """Read and write without blocking.

        Returns:
            None while the answer is incomplete; "" after an answer with status 200; else the error.
        """
        if events & selectors.EVENT_WRITE and (fault := self._write()):
            return fault
        if not events & selectors.EVENT_READ:
            return None
        return self._read()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._socket is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._socket)
            self._socket.close()
        self._socket = None

    # -- called by httptools

    def on_message_complete(self) -> None:
        """Record that the answer is complete."""
        self._status = self._parser.get_status_code()
        self._whole = True

    def _write(self) -> str:
        if self._socket is None:
            return ""
        try:
            if self._left:
                self._left = self._left[self._socket.send(self._left) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self.close()
            return _error_text(error.errno or 0)
        wanted = _BOTH if self._left else _READ
        if wanted != self._watched:
            self._selector.modify(self._socket, wanted, self)
            self._watched = wanted
        return ""

    def _read(self) -> str | None:
        if self._socket is None:
            return None
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            self.close()
            return _error_text(error.errno or 0)
        if not data:
            self.close()
            return CLOSED
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
            return NOT_HTTP
        return self._answered() if self._whole else None

    def _answered(self) -> str:
        if self._left or not self._parser.should_keep_alive():
            self.close()  # the answer came before the whole request was sent, or the server closes the connection
        return "" if self._status == 200 else f"HTTP {self._status}"


def _error_text(code: int) -> str:
    if code in (errno.ECONNRESET, errno.EPIPE):
        return CLOSED
    return os.strerror(code).lower() if code else CLOSED


def http_requests(
    address: Address, path: str, requests: Sequence[Request], headers: dict[str, str]
) -> list[bytes]:
    """Return the bytes of each request.

    Args:
        address: Address of the server; its host and path are part of each request.
        path: `/v1/models/...:predict`.
        requests: The requests to encode.
        headers: Additional headers.
    """
    made = []
    for request in requests:
        body = json.dumps(request.body).encode()
        lines = [f"POST {address.path}{path} HTTP/1.1", f"Host: {address}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
        made.append("\r\n".join(lines).encode() + body)
    return made
