"""Requests in turns: all connections send one, and all answers are read before the next turn.

So a turn of the server's loop holds as many requests as there are connections, and a few turns are a window so short
that the one before and the one after it meet the same machine.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import grpc

METHOD = "/tensorflow.serving.PredictionService/Predict"
_MAX_BYTES = 1 << 16


def cpu_s(process: int) -> float:
    """CPU time of another process, all its threads, seconds."""
    return time.clock_gettime((~process << 3) | 2)  # Linux's number of that clock


def drawn(requests: Sequence[bytes], share: float) -> bytes:
    """The last request with a probability, else the first."""
    return requests[-1] if random.random() < share else requests[0]  # noqa: S311 - a load


class Rest:
    """Connections over which each turn sends one POST."""

    def __init__(
        self, port: int, paths: Sequence[str], body: bytes, *, share: float, connections: int
    ) -> None:
        """Connect.

        Args:
            port: of the server.
            paths: one or two.
            body: of each request.
            share: of the requests to the last path.
            connections: how many.
        """
        self._share, self._requests = (
            share,
            [
                f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
                for path in paths
            ],
        )
        self.connections = [
            socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(connections)
        ]
        for each in self.connections:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def turn(self) -> None:
        """Send one request on each, and read all answers.

        Raises:
            RuntimeError: one is not 200.
        """
        for each in self.connections:
            each.sendall(drawn(self._requests, self._share))
        for each in self.connections:
            answer = each.recv(_MAX_BYTES)
            while not _is_whole(answer):
                answer += each.recv(_MAX_BYTES)
            if not answer.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"not an answer: {answer[:200]!r}")

    def close(self) -> None:
        """Close all."""
        for each in self.connections:
            each.close()


class Grpc:
    """Channels over which each turn makes one call."""

    def __init__(
        self, port: int, messages: Sequence[bytes], *, share: float, connections: int
    ) -> None:
        """Make the channels; each has a connection of its own.

        Args:
            port: of the server.
            messages: one or two.
            share: of the calls with the last message.
            connections: how many.
        """
        self._messages, self._share, self._stack = messages, share, ExitStack()
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.connections = [
            self._stack.enter_context(
                grpc.insecure_channel(f"127.0.0.1:{port}", options=options)
            ).unary_unary(METHOD, None, None)
            for _ in range(connections)
        ]

    def turn(self) -> None:
        """Make one call on each, and wait for all."""
        messages = [drawn(self._messages, self._share) for _ in self.connections]
        calls = [
            each.future(message, timeout=60)
            for each, message in zip(self.connections, messages, strict=True)
        ]
        for call in calls:
            call.result()

    def close(self) -> None:
        """Close all."""
        self._stack.close()


@contextlib.contextmanager
def closing(load: Rest | Grpc) -> Iterator[Rest | Grpc]:
    """Close it at the end."""
    try:
        yield load
    finally:
        load.close()


def window_us(load: Rest | Grpc, process: int, *, turns: int) -> float:
    """CPU time of a server per request, microseconds, over some turns."""
    began_s = cpu_s(process)
    for _ in range(turns):
        load.turn()
    return (cpu_s(process) - began_s) / (turns * len(load.connections)) * 1e6


def _is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return not answer  # the server closed the connection: the caller raises an error
    length = next(
        int(line.partition(b":")[2])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length:")
    )
    return len(body) >= length
