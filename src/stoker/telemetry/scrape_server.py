"""An HTTP server that answers scrapes of a process's metrics in threads of its own."""

from __future__ import annotations

import http.server
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

from stoker.core.errors import ConfigError, Plain
from stoker.telemetry.exposition import CONTENT_TYPE

_log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Time after which a client that sends or reads nothing is disconnected, seconds."""

MAX_CLIENTS = 64
"""Maximum number of connections at the same time, each with a thread; further connections are closed immediately."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """The answer to requests for one path of a server."""

    content: Callable[[], str]
    """Builds the body; if `reuse_s` is 0, several threads may call it at the same time."""

    content_type: str = CONTENT_TYPE

    reuse_s: float = 0.0
    """Time for which a body is cached and sent to all clients, seconds; 0: each request builds a new body."""


class _Body:
    """The cached body of a page; one thread at a time builds it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._making = threading.Lock()
        self._made = b""
        self._until_s = 0.0

    def content(self) -> bytes:
        """Return the body; an exception in the page's function is raised."""
        if not self.page.reuse_s:
            return self._make()
        with self._making:
            if time.monotonic() >= self._until_s:
                self._made = self._make()
                self._until_s = time.monotonic() + self.page.reuse_s
            return self._made

    def _make(self) -> bytes:
        # A name that is not valid Unicode must not prevent the page from being sent with the other metrics.
        return self.page.content().encode(errors="replace")


class ScrapeServer:
    """Serves a few pages; a context manager. If a page fails, the client gets error 500, and a warning is logged."""

    def __init__(self, pages: Mapping[str, Page], *, port: int, host: str = "127.0.0.1") -> None:
        """Start to listen and answer.

        Args:
            pages: Path -> page.
            port: Port to listen on; 0: any free port.
            host: IPv4 address to listen on.

        Raises:
            ConfigError: The port is in use, or the address does not belong to this machine.
        """

        class Handler(_Handler):
            of_server = {path: _Body(page) for path, page in pages.items()}  # noqa: RUF012 - its own class for each server

        try:
            self._server = _Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else "not a port"
            raise ConfigError(
                "the port of the metrics must be free",
                got=Plain(f"{host}:{port} ({why})"),
                fix="Set another port, or 0 for a free one.",
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="stoker-metrics", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """HOST:PORT on which the server listens."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def require_own_address(host: str, *, setting: str) -> None:
    """Raise ConfigError if a server on this machine cannot listen on an address.

    Args:
        host: The IPv4 address.
        setting: Name of the setting that has the address, for the error.
    """
    with socket.socket() as trial:
        try:
            trial.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"{setting} must be an address of this machine",
                got=Plain(f"{host} ({error.strerror})"),
                fix="`ip -4 addr` shows its addresses; at 127.0.0.1, only this machine can connect.",
            ) from None


class _Server(http.server.ThreadingHTTPServer):
    """Limits the number of its threads; does not log clients that disconnect or fail."""

    daemon_threads = True
    request_queue_size = MAX_CLIENTS

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self._free = threading.BoundedSemaphore(MAX_CLIENTS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - as socketserver calls it
        _log.debug("a scrape ended early: %s", client_address, exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    of_server: Mapping[str, _Body] = {}
    timeout = TIMEOUT_S

    def do_GET(self) -> None:
        found = self.of_server.get(self.path.partition("?")[0])
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            body = found.content()
        except Exception as error:  # noqa: BLE001 - whatever it is, training or serving continues
            _log.warning("%s cannot be answered: %s: %s", self.path, type(error).__name__, error)
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", found.page.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Do not log scrapes."""
