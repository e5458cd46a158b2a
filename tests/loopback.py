"""A real web service on this machine, which notes what it gets and answers as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Service:
    """What it got, and how it answers."""

    url: str = ""
    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    is_silent: bool = False
    got: list[tuple[str, bytes]] = field(default_factory=list)
    """Path and body of each request."""
    released: threading.Event = field(default_factory=threading.Event)
    on_write: Callable[[Any], None] | None = None

    def contents(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.got]


@contextmanager
def service(**answers: Any) -> Iterator[Service]:
    """Run one until the end of the context."""
    running = Service(**answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            running.got.append((self.path, body))
            if running.is_silent:
                running.released.wait()
                return
            self.send_response(running.status)
            for name, value in running.headers.items():
                self.send_header(name, value)
            self.end_headers()
            if running.on_write is not None:
                running.on_write(self.wfile)
            else:
                self.wfile.write(running.body)

        do_GET = do_POST  # noqa: N815 - the name that http.server calls

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield running
    finally:
        running.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
