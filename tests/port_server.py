"""A server on a port of 127.0.0.1 that answers `all` with everything at once and its end, and `hold` with nothing."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def port_server(answer: bytes) -> Iterator[int]:
    """Listen inside the `with` block; yield the port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                if self.request.recv(16) == b"all":
                    self.request.sendall(answer)
                else:
                    self.request.recv(16)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield int(server.server_address[1])
        server.shutdown()
