"""A process answers scrapes whatever its clients and its own pages do."""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from tests.scrape_flood import flood

from stoker.core.errors import ConfigError
from stoker.telemetry import scrape_server
from stoker.telemetry.exposition import CONTENT_TYPE
from stoker.telemetry.scrape_server import Page, ScrapeServer, require_own_address


def _raise() -> str:
    raise RuntimeError("the disk is gone")


PAGES = {
    "/metrics": Page(content=lambda: "up 1\n"),
    "/surrogate": Page(content=lambda: 'run{name="\udcff"} 1\n'),
    "/large": Page(content=lambda: "x" * (32 << 20)),
    "/fails": Page(content=_raise),
    "/sd": Page(content=lambda: "[]", content_type="application/json"),
}


@pytest.fixture
def server() -> Iterator[ScrapeServer]:
    with ScrapeServer(PAGES, port=0) as running:
        yield running


def get(server: ScrapeServer, path: str = "/metrics") -> tuple[int, str, str]:
    with contextlib.closing(http.client.HTTPConnection(server.address, timeout=20)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type") or "", answer.read().decode()


def connected(server: ScrapeServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_pages_have_their_type_and_a_query_changes_nothing(server: ScrapeServer) -> None:
    assert get(server) == (200, CONTENT_TYPE, "up 1\n")
    assert get(server, "/metrics?name[]=up") == (200, CONTENT_TYPE, "up 1\n")
    assert get(server, "/sd") == (200, "application/json", "[]")
    assert get(server, "/metrics/../etc/passwd")[0] == 404


def test_a_page_that_fails_is_an_error_and_a_warning_and_the_others_go_on(
    server: ScrapeServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert get(server, "/fails")[0] == 500
    assert get(server)[0] == 200
    assert "/fails cannot be answered: RuntimeError: the disk is gone" in caplog.text


def test_a_name_that_is_not_unicode_does_not_take_the_page(server: ScrapeServer) -> None:
    assert get(server, "/surrogate") == (200, CONTENT_TYPE, 'run{name="?"} 1\n')


def test_a_port_that_is_taken_or_is_none_is_one_line(server: ScrapeServer) -> None:
    taken = int(server.address.rpartition(":")[2])

    with pytest.raises(ConfigError, match=r"must be free.*in use.*0 for a free one"):
        ScrapeServer(PAGES, port=taken)
    with pytest.raises(ConfigError, match=r"127.0.0.1:70000 \(not a port\)"):
        ScrapeServer(PAGES, port=70_000)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        ScrapeServer(PAGES, port=0, host="192.0.2.1")
    with pytest.raises(
        ConfigError, match=r"^at must be an address of this .*192\.0\.2\.1 \(Cannot"
    ):
        require_own_address("192.0.2.1", setting="at")
    for own in ("127.0.0.1", "127.0.0.9", "0.0.0.0"):
        require_own_address(own, setting="at")
    assert get(server)[0] == 200


def test_a_port_is_free_again_after_the_end() -> None:
    with ScrapeServer(PAGES, port=0) as first:
        get(first)
        port = int(first.address.rpartition(":")[2])
    with ScrapeServer(PAGES, port=port) as second:
        assert get(second)[0] == 200


def test_a_flood_of_scrapes_shares_what_is_made() -> None:
    made: list[float] = []

    def content() -> str:
        made.append(time.monotonic())
        return f"made {len(made)}\n"

    with (
        ScrapeServer({"/metrics": Page(content=content, reuse_s=0.2)}, port=0) as server,
        flood(server.address, "/metrics") as answers,
    ):
        while len(made) < 4:
            time.sleep(0.01)
        assert get(server)[2] >= "made 4\n"

    assert set(answers) == {200}
    assert len(answers) > 2 * len(made)
    assert all(later - earlier >= 0.2 for earlier, later in pairwise(made))


def test_silent_and_slow_clients_delay_no_other(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert scrape_server._Handler.timeout == scrape_server.TIMEOUT_S
    monkeypatch.setattr(scrape_server._Handler, "timeout", 0.3)
    with ScrapeServer(PAGES, port=0) as server, contextlib.ExitStack() as clients:
        silent = [clients.enter_context(connected(server)) for _ in range(8)]
        half = clients.enter_context(connected(server))
        half.sendall(b"GET /metrics HT")
        takes_nothing = clients.enter_context(connected(server))
        takes_nothing.sendall(b"GET /large HTTP/1.0\r\n\r\n")

        assert get(server)[0] == 200
        # Each of them is left after the timeout.
        assert [client.recv(1) for client in [*silent, half]] == [b""] * 9
        _until_threads(2)  # the server's, and this one
    assert capfd.readouterr().err == ""


def test_a_client_that_leaves_in_the_middle_is_not_worth_a_line(
    server: ScrapeServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with connected(server) as client:
        client.sendall(b"GET /large HTTP/1.0\r\n\r\n")
        client.recv(1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # resets

    _until_threads(2)
    assert get(server)[0] == 200
    assert capfd.readouterr().err == ""


def test_connections_are_bounded_and_later_ones_are_answered(
    server: ScrapeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as clients:
        held = [clients.enter_context(connected(server)) for _ in range(scrape_server.MAX_CLIENTS)]
        _until_threads(2 + len(held))
        with connected(server) as beyond:
            beyond.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert beyond.recv(1) == b""
    _until_threads(2)
    assert get(server)[0] == 200


def test_bytes_that_are_not_a_request_are_answered_or_dropped(server: ScrapeServer) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET\r\n\r\n", b"PUT /metrics HTTP/1.1\r\n\r\n"):
        with connected(server) as client:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            assert b"up 1" not in client.recv(1 << 16)
    assert get(server)[0] == 200


def test_scrapes_during_the_end_are_answered_or_refused_and_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    server = ScrapeServer(PAGES, port=0)
    over = threading.Event()

    def scrape() -> set[int]:
        found = set()
        while not over.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException):
                found.add(get(server)[0])
        return found

    with ThreadPoolExecutor(4) as pool:
        scrapers = [pool.submit(scrape) for _ in range(4)]
        time.sleep(0.2)  # scrapes are under way
        server.close()
        time.sleep(0.1)  # and go on after the end
        over.set()
        assert [each.result() for each in scrapers] == [{200}] * 4
    with pytest.raises(OSError, match="refused"):
        get(server)
    assert not [each for each in caplog.records if each.name.startswith("stoker")]


def _until_threads(most: int) -> None:
    """Wait until this many threads of a server are left, the main one included."""
    end_s = time.monotonic() + 20
    while _server_threads() != most - 1:
        assert time.monotonic() < end_s, [thread.name for thread in threading.enumerate()]
        time.sleep(0.01)


def _server_threads() -> int:
    names = [thread.name for thread in threading.enumerate()]
    return sum("process_request_thread" in name or name == "stoker-metrics" for name in names)
