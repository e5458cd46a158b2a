"""A flood of scrapes, 100 in a second, next to a client that takes none of its answer."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

PER_S = 100
CLIENTS = 20
"""Each sends its share: an answer may take a fifth of a second before one of them is late."""


@contextmanager
def flood(address: str, path: str) -> Iterator[list[int]]:
    """Scrape inside the block.

    Args:
        address: HOST:PORT.
        path: of the metrics.

    Yields:
        The status of each answer so far; scrapes that get none are 0.
    """
    host, _, port = address.rpartition(":")
    answers: list[int] = []
    over = threading.Event()

    def scrape() -> None:
        next_s = time.monotonic()
        while not over.wait(max(0.0, next_s - time.monotonic())):
            next_s += CLIENTS / PER_S
            with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
                try:
                    connection.request("GET", path)
                    answer = connection.getresponse()
                    answer.read()
                    answers.append(answer.status)
                except (OSError, http.client.HTTPException):
                    answers.append(0)

    threads = [threading.Thread(target=scrape) for _ in range(CLIENTS)]
    with socket.create_connection((host, int(port)), timeout=60) as slow:
        slow.sendall(f"GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
        for thread in threads:
            thread.start()
        try:
            yield answers
        finally:
            over.set()
            for thread in threads:
                thread.join()
