"""A server on a port of 127.0.0.1 that answers `all` with a large answer and its end, and anything else with nothing."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

ANSWER = bytes(range(256)) * (1 << 14)
"""Larger than all buffers on the way."""


@contextlib.contextmanager
def port_server() -> Iterator[int]:
    """Listen inside the `with` block; yield the port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                if self.request.recv(16) == b"all":
                    self.request.sendall(ANSWER)
                else:
                    self.request.recv(16)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield int(server.server_address[1])
        server.shutdown()


def answer_of(port: int) -> bytes:
    """Return the answer that comes through a port, which is read late; what breaks off is cut."""
    blocks = []
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection(("127.0.0.1", port)) as connection,
    ):
        connection.sendall(b"all")
        time.sleep(0.2)  # all buffers on the way are full
        while block := connection.recv(1 << 16):
            blocks.append(block)
    return b"".join(blocks)
