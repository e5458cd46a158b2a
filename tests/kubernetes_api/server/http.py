"""The server on 127.0.0.1: HTTP/1.1 with JSON, and streams in chunks."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.kubernetes_api.problems import Refusal, bad_request, conflict
from tests.kubernetes_api.resources import QUOTAS
from tests.kubernetes_api.server import port_forward
from tests.kubernetes_api.server.api import Answer, Api, Request
from tests.kubernetes_api.server.faults import Fault, Faults

LOOPBACK = "127.0.0.1"
CUT_AFTER = 2
"""Lines that a stream shows before it is cut."""


class ApiServer:
    """Listens until it is stopped; started again, it has the same port, as the storage has the same objects."""

    def __init__(self, api: Api, faults: Faults) -> None:
        self.api, self.faults = api, faults
        self.port = 0
        self._connections: set[socket.socket] = set()
        self._server: ThreadingHTTPServer | None = None
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def is_up(self) -> bool:
        """Whether it listens."""
        return self._server is not None

    def start(self) -> None:
        """Listen."""
        owner = self

        class Bound(_Handler):
            server_of = owner

        ThreadingHTTPServer.allow_reuse_address = True
        server = ThreadingHTTPServer((LOOPBACK, self.port), Bound)
        server.daemon_threads = True
        server.request_queue_size = 64
        self.port = server.server_address[1]
        self._server = server
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Break off all connections, and listen no more."""
        server, self._server = self._server, None
        if server is None:
            return
        server.shutdown()
        server.server_close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def connection(self, sock: socket.socket) -> Iterator[None]:
        """Know a connection while it lasts."""
        with self._lock:
            self._connections.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(sock)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_of: ApiServer

    def handle(self) -> None:
        with self.server_of.connection(self.connection), contextlib.suppress(OSError):
            super().handle()

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Print nothing."""

    def _answer(self) -> None:
        body = self._body()
        is_stream = "watch=" in self.path or "/log" in self.path
        fault = self.server_of.faults.next(self.command, self.path, stream=is_stream)
        if fault is Fault.REFUSED:
            return self._break_off()
        try:
            answer = self._handled(fault, body)
        except Refusal as refusal:
            answer = Answer(refusal.code, refusal.to_status())
            if refusal.retry_after_s is not None:
                answer.headers["Retry-After"] = str(refusal.retry_after_s)
        except Exception:  # noqa: BLE001 - a fault of this code, which the test shows at its end
            self.server_of.api.troubles.append(traceback.format_exc())
            answer = Answer(500, Refusal(500, "InternalError", "a fault of the test").to_status())
        if fault is Fault.LOST:
            return self._break_off()
        if fault is Fault.SILENT:
            return self._hold()
        if answer.stream is not None:
            return self._stream(answer, fault)
        if "/portforward" in self.path and answer.code == 200:
            return port_forward.serve(self)
        return self._whole(answer, fault)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815 - the names that http.server calls

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _handled(self, fault: Fault | None, body: bytes) -> Answer:
        if fault is Fault.BUSY:
            message = "Too many requests, please try again later."
            raise Refusal(429, "TooManyRequests", message, retry_after_s=1)
        if fault is Fault.BROKEN:
            raise Refusal(
                500, "InternalError", "Internal error occurred: etcdserver: leader changed"
            )
        if fault is Fault.CONFLICT:
            raise conflict(QUOTAS, "compute")
        if fault is Fault.FORBIDDEN:
            raise Refusal(403, "Forbidden", "admission webhook denied the request")
        if fault is Fault.FORGOTTEN:
            self.server_of.api.storage.forget()
        url = urlsplit(self.path)
        try:
            content = json.loads(body) if body else None
        except ValueError:
            raise bad_request("the body is not JSON") from None
        request = Request(
            method=self.command,
            path=unquote(url.path),
            query=dict(parse_qsl(url.query, keep_blank_values=True)),
            kind=self.headers.get("Content-Type", ""),
            authorization=self.headers.get("Authorization", ""),
            body=content,
        )
        return self.server_of.api.handle(request)

    def _whole(self, answer: Answer, fault: Fault | None) -> None:
        content = json.dumps(answer.body).encode()
        self.send_response(answer.code)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        for name, value in (headers | answer.headers).items():
            self.send_header(name, value)
        self.end_headers()
        if fault is Fault.HALF:
            self.wfile.write(content[: len(content) // 2])
            return self._hold()
        self.wfile.write(content)
        return None

    def _stream(self, answer: Answer, fault: Fault | None) -> None:
        assert answer.stream is not None
        cut = fault is Fault.CUT
        self.send_response(answer.code)
        headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        for name, value in (headers | answer.headers).items():
            self.send_header(name, value)
        self.end_headers()
        for number, part in enumerate(answer.stream):
            if fault is Fault.HALF and number >= CUT_AFTER:
                return self._hold()
            if cut and number >= CUT_AFTER:
                return self._break_off()
            if not self.server_of.is_up:
                return self._break_off()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        if cut or not self.server_of.is_up:
            return self._break_off()
        self.wfile.write(b"0\r\n\r\n")
        return None

    def _hold(self) -> None:
        """Send nothing more until the client goes or the server stops."""
        self.close_connection = True
        self.connection.recv(1)

    def _break_off(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
