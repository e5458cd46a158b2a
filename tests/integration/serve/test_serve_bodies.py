"""Bodies with a length, however they are cut, and whatever follows them."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.integration.serve.conftest import started

from stoker.registry.repository import Repository
from stoker.serve.config import ServeConfig
from stoker.serve.limits import HttpLimits
from stoker.serve.process.server import Server

LARGE = 300_000
SMALL = 0


@pytest.fixture(scope="module")
def server(exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = Repository(tmp_path_factory.mktemp("models"))
    repository.push(exported["half_plus_two"], "half")
    config = ServeConfig(
        models={"half": repository.base("half")},
        rest_port=0,
        grpc_port=0,
        lame_duck_s=0.0,
        drain_s=2,
        http=HttpLimits(body_s=5.0, idle_s=3.0),
    )
    with started(config) as running:
        yield running


def request(value: float, *, size: int, head: bytes = b"", path: str = "half:predict") -> bytes:
    """One whose body is filled up to a size."""
    body = json.dumps({"instances": [[value]]}).encode().ljust(size)
    line = f"POST /v1/models/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    return line.encode() + head + b"\r\n" + body


class Client:
    """Sends bytes as they are, and reads answers."""

    def __init__(self, server: Server) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.rest_port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._got = b""

    def send(self, sent: bytes, pieces: Sequence[int] = ()) -> None:
        for size in pieces:
            piece, sent = sent[:size], sent[size:]
            self.socket.sendall(piece)
            time.sleep(0.001)  # else the kernel may hand on several as one
        self.socket.sendall(sent)

    def read(self) -> tuple[int, bytes]:
        """The next answer."""
        head = self._until(b"\r\n\r\n")
        status = int(head.split(b" ")[1])
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-len")]
        length = int(lengths[0].split(b":")[1]) if lengths else 0
        while len(self._got) < length:
            self._more()
        body, self._got = self._got[:length], self._got[length:]
        return status, body

    def _until(self, end: bytes) -> bytes:
        while end not in self._got:
            self._more()
        found, _, self._got = self._got.partition(end)
        return found

    def _more(self) -> None:
        piece = self.socket.recv(65536)
        assert piece, f"closed behind {self._got!r}"
        self._got += piece


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    made = Client(server)
    with made.socket:
        yield made


def answer(value: float) -> tuple[int, bytes]:
    return 200, json.dumps({"predictions": [[value / 2 + 2]]}).encode()


def held_soon(server: Server) -> int:
    """What is held for all requests, once the loop has seen what clients did."""
    end_s = time.monotonic() + 10
    while (now := server._app.held_bytes) and time.monotonic() < end_s:
        time.sleep(0.01)  # until it is so, or the time is over
    return now


@pytest.mark.parametrize("sizes", [(LARGE, LARGE, LARGE), (LARGE, SMALL, LARGE), (SMALL, LARGE)])
@pytest.mark.parametrize("seed", range(4))
def test_requests_sent_at_once_are_answered_in_order_wherever_they_are_cut(
    server: Server, client: Client, sizes: tuple[int, ...], seed: int
) -> None:
    rng = random.Random(seed)
    pieces = [rng.choice([1, 2, 70, 1000, 65536, 131072]) for _ in range(20)] if seed else []

    client.send(b"".join(request(n, size=size) for n, size in enumerate(sizes)), pieces)

    assert [client.read() for _ in sizes] == [answer(n) for n in range(len(sizes))]
    assert held_soon(server) == 0


def test_one_that_ends_with_a_piece_leaves_nothing_to_the_next_one(client: Client) -> None:
    for number in range(5):
        whole = request(number, size=LARGE)
        # The last piece holds the rest of a body and nothing else, or the complete next head.
        client.send(whole, [len(whole) - LARGE, LARGE - number])
        assert client.read() == answer(number)


def test_an_unread_body_is_skipped(server: Server, client: Client) -> None:
    unread = request(1.0, size=LARGE, path="half:nothing").replace(b"/v1/models", b"/nowhere", 1)
    client.send(unread[:-100_000])
    assert client.read() == (404, b"")
    assert held_soon(server) == 0
    client.send(unread[-100_000:] + request(7.0, size=LARGE))

    assert client.read() == answer(7.0)
    assert held_soon(server) == 0


def test_a_client_that_waits_for_the_word_to_go_on_gets_it(client: Client) -> None:
    whole = request(5.0, size=LARGE, head=b"Expect: 100-continue\r\n")
    client.send(whole[:-LARGE])
    assert client.read()[0] == 100
    client.send(whole[-LARGE:])

    assert client.read() == answer(5.0)


def test_what_a_client_that_left_has_sent_is_given_back(server: Server) -> None:
    gone = Client(server)
    gone.send(request(1.0, size=LARGE)[:-1000])
    end_s = time.monotonic() + 10
    while not server._app.held_bytes:
        assert time.monotonic() < end_s
        time.sleep(0.001)  # until the loop has read it
    gone.socket.close()

    assert held_soon(server) == 0


def test_an_offer_of_another_protocol_is_answered(server: Server, client: Client) -> None:
    """The parser passes over the body of such a request; its head arrives in parts."""
    whole = request(1.0, size=LARGE, head=b"Connection: Upgrade\r\nUpgrade: x\r\n")
    client.send(whole, [40])

    assert client.read()[0] == 400
    assert held_soon(server) == 0


def test_a_connection_that_was_answered_before_its_body_came_is_closed_in_time(
    server: Server, client: Client
) -> None:
    unread = request(1.0, size=LARGE, path="half:nothing").replace(b"/v1/models", b"/nowhere", 1)
    client.send(unread[:-1])
    assert client.read()[0] == 404
    client.send(unread[-1:])

    client.socket.settimeout(30)
    assert client.socket.recv(1) == b"", "as any connection that asks nothing more"
    assert not server._app.held_bytes


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (["0" * 5000 + "12"], 400),
        (["9" * 19], 413),
        (["1" + "0" * 30], 400),
        (["12", "13"], 400),
        (["+12"], 400),
        (["1_2"], 400),
        (["\u0661"], 400),
    ],
    ids=["zeros", "large", "beyond 64 bits", "two", "signed", "underscore", "arabic"],
)
def test_a_length_that_is_wrong_or_too_large_is_refused(
    client: Client, given: list[str], status: int
) -> None:
    lines = "".join(f"Content-Length: {length}\r\n" for length in given)
    client.send(f"POST /v1/models/half:predict HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
    client.send(b'{"bad": 1 }\n')

    assert client.read()[0] == status


def test_a_body_that_no_code_reads_stays_in_the_connection(server: Server) -> None:
    """The answer waits for a thread, and no thread is free, so the body is not read yet."""
    free, threads = threading.Event(), server._app._threads
    waiting = [threads.submit(free.wait, 60) for _ in range(server._app.options.workers)]
    client = Client(server)
    head = "POST /nowhere HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n"
    head += f"Content-Length: {1 << 40}\r\n\r\n"
    try:
        client.send(head.encode())
        client.socket.settimeout(1)
        with pytest.raises(TimeoutError):  # the kernel's buffers are full, no code empties them
            client.socket.sendall(bytes(64 << 20))
    finally:
        free.set()
    client.socket.settimeout(10)
    assert client.read()[0] == 404
    assert all(each.result(10) for each in waiting)
    client.socket.close()

    assert held_soon(server) == 0


def test_a_body_is_not_trusted_beyond_its_length(client: Client) -> None:
    """The bytes after it are a request, even if they look like input of the model."""
    short = request(3.0, size=LARGE)
    client.send(short + b'{"instances": [[9.0]]}\r\n\r\n')

    assert client.read() == answer(3.0)
    assert client.socket.recv(1000) == b"", "closed: the bytes after it are not a request"
