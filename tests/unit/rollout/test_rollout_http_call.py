"""Calls of the user's services end in time, whatever the service does."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time
from typing import Any

import pytest
from tests.loopback import service

from stoker.core.errors import ConfigError
from stoker.rollout.http_call import MAX_BYTES, NoAnswerError, check_url, send


def test_a_request_without_a_body_is_a_get_and_one_with_a_body_a_post() -> None:
    with service(status=201, body=b"yes") as running:
        assert send(f"{running.url}/a?b=1", timeout_s=5.0).body == b"yes"
        answer = send(running.url, body=b"[1]", timeout_s=5.0)

    assert (answer.status, answer.is_success) == (201, True)
    assert running.got == [("/a?b=1", b""), ("/", b"[1]")]


def test_a_user_and_password_in_a_url_are_sent_as_basic_authentication() -> None:
    got: list[bytes] = []

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            got.append(connection.recv(1 << 16))
            connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer)
        answering.start()
        url = f"http://me:a%3Ab%40c@127.0.0.1:{listener.getsockname()[1]}/hook"
        assert send(url, timeout_s=5.0).is_success
        answering.join()

    head = got[0].decode()
    assert f"Authorization: Basic {base64.b64encode(b'me:a:b@c').decode()}\r\n" in head
    assert "a%3Ab" not in head


def test_a_silent_service_is_left_after_the_time() -> None:
    with service(is_silent=True) as running:
        began_s = time.monotonic()
        with pytest.raises(NoAnswerError, match=r"no answer within 0\.2 s"):
            send(running.url, timeout_s=0.2)

    assert time.monotonic() - began_s < 2.0


def test_a_service_that_answers_byte_by_byte_is_left_after_the_time() -> None:
    def drip(stream: Any) -> None:
        for _ in range(100):
            stream.write(b".")
            time.sleep(0.05)  # a byte comes before each read of the client times out

    with service(on_write=drip) as running:
        began_s = time.monotonic()
        with pytest.raises(NoAnswerError, match="no answer within"):
            send(running.url, timeout_s=0.3)

        assert time.monotonic() - began_s < 2.0
        running.on_write = None


def test_a_service_whose_headers_come_byte_by_byte_is_left_after_the_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
                for _ in range(100):
                    connection.sendall(b".")
                    time.sleep(0.05)  # a byte comes before each read of the client times out

        thread = threading.Thread(target=drip)
        thread.start()
        began_s = time.monotonic()
        with pytest.raises(NoAnswerError, match=r"no answer within 0\.3 s"):
            send(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.3)
        assert time.monotonic() - began_s < 2.0
        thread.join()


def test_an_answer_is_read_up_to_a_limit_and_a_redirect_is_not_followed() -> None:
    with service(body=b"x" * (MAX_BYTES + 10)) as running:
        assert len(send(running.url, timeout_s=5.0).body) == MAX_BYTES
    with service(status=302, headers={"Location": "http://127.0.0.1:9/"}) as running:
        assert send(running.url, timeout_s=5.0).status == 302


def test_a_missing_server_and_an_unset_variable_give_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with service() as gone:
        pass
    with pytest.raises(NoAnswerError, match="refused"):
        send(gone.url, timeout_s=5.0)
    with pytest.raises(NoAnswerError, match="HOOK is not set on the server"):
        send("env:HOOK", timeout_s=5.0)
    with service() as running:
        monkeypatch.setenv("HOOK", running.url)
        assert send("env:HOOK", timeout_s=5.0).is_success
    monkeypatch.setenv("HOOK", "secret")
    with pytest.raises(NoAnswerError, match="HOOK does not hold a URL"):
        send("env:HOOK", timeout_s=5.0)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "prometheus:9090",
        "ftp://a/",
        "http://",
        "http://a b/",
        "http://a:x/",
        "env:a-b",
        'http://a"b/',
        "http://a/é",
        'http://a/"b"',
        "http://a/?'b'",
        "http://a/b ",
        'http://"u"@a/',
        "http://a/\\",
        "http://a/<b>",
    ],
)
def test_a_text_that_is_not_a_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="The hook must be a URL"):
        check_url(url, where="The hook")


def test_a_url_with_a_user_a_query_and_escapes_is_accepted() -> None:
    check_url("https://u:p%22@[::1]:80/a;b/(c)?d=%20&e=1,2#f", where="The hook")
