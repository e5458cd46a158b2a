"""Small requests that are answered in the loop: as all others are, in order, each with its own rows."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.registry.repository import Repository
from stoker.serve.batching.config import BatchingConfig
from stoker.serve.batching.queue import COMPARED_WITH_SINGLE, QUICK_S, Queue, Request
from stoker.serve.config import ServeConfig
from stoker.serve.dataplane.requests import ModelSpec
from stoker.serve.deadline import Deadline
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.process.server import Server
from stoker.serve.rest.header_cache import MAX_BYTES, MAX_HEADS, Head, HeaderCache, is_small

PATH = "/v1/models/half_plus_two:predict"


@pytest.fixture
def off_lane(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that did not go through the lane, of a server whose models are known to be quick."""
    slow: list[Any] = []
    plain = server.plane.predict

    def counted(request: Any) -> Any:
        slow.append(request)
        return plain(request)

    monkeypatch.setattr(server.plane, "predict", counted)
    for name in ("half_plus_two", "picky", "sums"):
        with server.models.get(name).use(None, label=None) as (_, model):
            queue = model._queues["serving_default"]
            monkeypatch.setattr(queue, "_usual_s", QUICK_S / 10)
            monkeypatch.setattr(queue, "_took", lambda _s: None)  # whatever else this machine does
    return slow


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def answers(stream: Any, count: int) -> list[tuple[int, dict[str, str], bytes]]:
    """Status, headers and body of some answers, in the order in which they come."""
    found = []
    for _ in range(count):
        status = int(stream.readline().split()[1])
        headers = {}
        while line := stream.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        found.append((status, headers, stream.read(int(headers["content-length"]))))
    return found


def test_what_is_plain_is_answered_without_a_thread(
    server: Server, ask: Callable[..., Any], off_lane: list[Any]
) -> None:
    answer = ask(PATH, {"instances": [1.0, 2.0, 5.0]})
    assert (answer.status, answer.body) == (200, '{"predictions": [2.5, 3.0, 4.5]}')
    assert answer.headers["content-type"] == "application/json"
    assert ask(PATH, {"instances": [[1.0]], "signature_name": "serving_default"}).status == 200
    assert off_lane == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"inputs": [1.0]}, 200),
        ({"instances": ["a"]}, 400),
        ({"instances": []}, 400),
        ({"instances": [[1.0], [2.0, 3.0]]}, 400),
        ({"instances": [1.0], "signature_name": "none"}, 400),
        (b'{"instances": [1.0', 400),
        (b'{"instances": [1e999]}', 400),
        (b"\xff", 400),
        (b"", 400),
    ],
)
def test_what_is_not_goes_the_way_of_all_others(
    server: Server, ask: Callable[..., Any], off_lane: list[Any], body: Any, status: int
) -> None:
    """Word for word as without the inline path."""
    answer = ask(PATH, body)
    assert answer.status == status
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server._rest.config.http_protocol_class, "lane", None)
        assert ask(PATH, body).body == answer.body


def test_each_of_many_connections_gets_its_own_rows(server: Server, off_lane: list[Any]) -> None:
    """One of them is wrong: it fails alone, and the other answers are right."""
    counted = server.plane.metrics.request_count.total()
    with ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.rest_port)))
            for _ in range(40)
        ]
        for wrong in (7, 7, 7, None):
            went_off_lane = len(off_lane)
            for number, client in enumerate(opened):
                rows = [[float(number + k), 1.0] for k in range(1 + number % 3)]
                if number == wrong:
                    rows[0][1] = 0.0  # the model refuses it
                body = json.dumps({"instances": rows}).encode()
                client.sendall(post("/v1/models/picky:predict", body))
            for number, client in enumerate(opened):
                with client.makefile("rb") as stream:
                    ((status, _, body),) = answers(stream, 1)
                if number == wrong:
                    assert status == 400
                    continue
                assert status == 200, body
                wanted = [3.0 * (number + k) for k in range(1 + number % 3)]
                assert json.loads(body) == {"predictions": wanted}
    assert server.plane.metrics.request_count.total() == counted + 4 * 40
    # All may have come in the same turn of the loop as the wrong one, and so have left the inline path.
    assert len(off_lane) == went_off_lane, "the lane left some that are right to the threads"


def test_more_than_one_run_takes_is_several_runs_and_none_needs_a_thread(
    server: Server, off_lane: list[Any]
) -> None:
    most = server.plane.max_rows(ModelSpec(name="half_plus_two"))
    assert 0 < most < 150
    assert server.plane.max_rows(ModelSpec(name="no such model")) == 0
    with ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.rest_port)))
            for _ in range(most + 50)
        ]
        streams = [stack.enter_context(client.makefile("rb")) for client in opened]
        for hold in (False, True):
            if hold:  # what comes meanwhile is one turn of the loop
                server._rest.servers[0].get_loop().call_soon_threadsafe(time.sleep, 0.5)
            for number, client in enumerate(opened):
                client.sendall(post(PATH, b'{"instances": [[%d.0]]}' % number))
            for number, stream in enumerate(streams):
                ((status, _, body),) = answers(stream, 1)
                assert (status, json.loads(body)) == (200, {"predictions": [[number / 2 + 2]]})
    assert off_lane == []


def test_pipelined_requests_are_answered_in_their_order(
    server: Server, off_lane: list[Any]
) -> None:
    """Also where what came first is slower, and where one of them ends the connection."""
    some = [post(PATH, json.dumps({"instances": [float(n)]}).encode()) for n in range(4)]
    large = post(PATH, json.dumps({"instances": [1.0] * MAX_BYTES}).encode())
    status = b"GET /v1/models/half_plus_two HTTP/1.1\r\nHost: x\r\n\r\n"
    last = post(PATH, b'{"instances": [9.0]}', "Connection: close")
    with socket.create_connection(("127.0.0.1", server.rest_port), timeout=30) as client:
        client.sendall(some[0] + some[1] + status + some[2] + large + some[3] + last)
        with client.makefile("rb") as stream:
            found = answers(stream, 7)
            assert stream.read() == b""
    assert [status for status, _, _ in found] == [200] * 7
    numbers = [json.loads(body).get("predictions") for _, _, body in found]
    assert [n and n[0] for n in numbers] == [2.0, 2.5, None, 3.0, 2.5, 3.5, 6.5]
    assert len(numbers[4]) == MAX_BYTES
    assert found[-1][1]["connection"] == "close"


def test_a_body_in_parts_and_one_that_asks_before_it_comes_are_waited_for(
    server: Server, off_lane: list[Any]
) -> None:
    body = b'{"instances": [4.0]}'
    whole = post(PATH, body)
    head = whole[: -len(body)]
    for expect, pause_s in ((False, 0.0), (False, 0.05), (True, 0.0)):
        with socket.create_connection(("127.0.0.1", server.rest_port), timeout=30) as client:
            sent = head[:-2] + b"Expect: 100-continue\r\n\r\n" if expect else head + body[:5]
            client.sendall(sent)
            with client.makefile("rb") as stream:
                if expect:
                    assert stream.readline().startswith(b"HTTP/1.1 100")
                    stream.readline()
                else:
                    time.sleep(pause_s)  # so that the parts come one by one
                client.sendall(body if expect else body[5:])
                ((status, _, found),) = answers(stream, 1)
                assert (status, json.loads(found)) == (200, {"predictions": [4.0]})
                client.sendall(whole)
                assert answers(stream, 1)[0][0] == 200


def test_an_offer_of_another_protocol_is_passed_over(server: Server, off_lane: list[Any]) -> None:
    """Java's client makes it with its first request; known or not, the body is read."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAA")
    body = b'{"instances": [1.0]}'
    with (
        socket.create_connection(("127.0.0.1", server.rest_port), timeout=30) as client,
        client.makefile("rb") as stream,
    ):
        for sent in (
            post(PATH, body, *offer),
            post(PATH, body, "UPGRADE: websocket"),
            post(PATH, body),
        ):
            client.sendall(sent)
            ((status, _, found),) = answers(stream, 1)
            assert (status, json.loads(found)) == (200, {"predictions": [2.5]})


def test_a_long_answer_is_compressed_if_the_client_accepts_it(
    server: Server, off_lane: list[Any]
) -> None:
    rows = [n + 0.123 for n in range(128)]
    body = json.dumps({"instances": rows}).encode()
    with socket.create_connection(("127.0.0.1", server.rest_port), timeout=30) as client:
        client.sendall(post(PATH, body, "Accept-Encoding: deflate, gzip") + post(PATH, body))
        with client.makefile("rb") as stream:
            (_, packed_as, packed), (_, plain_as, plain) = answers(stream, 2)
    assert (packed_as["content-encoding"], packed_as["vary"]) == ("gzip", "accept-encoding")
    assert "content-encoding" not in plain_as
    assert gzip.decompress(packed) == plain
    assert len(json.loads(plain)["predictions"]) == 128


def test_clients_that_hang_up_delay_no_other(server: Server, off_lane: list[Any]) -> None:
    body = b'{"instances": [1.0]}'
    for _ in range(30):
        with socket.create_connection(("127.0.0.1", server.rest_port)) as client:
            client.sendall(post(PATH, body))
    with socket.create_connection(("127.0.0.1", server.rest_port), timeout=30) as client:
        client.sendall(post(PATH, body))
        with client.makefile("rb") as stream:
            assert answers(stream, 1)[0][0] == 200


def test_a_connection_is_closed_when_it_asks_nothing_and_not_before(
    server: Server, off_lane: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_s = 2.0
    assert server._rest.config.timeout_keep_alive > 60  # balancers close theirs after 60 s
    monkeypatch.setattr(server._rest.config, "timeout_keep_alive", idle_s)
    request = post(PATH, b'{"instances": [1.0]}')
    with socket.create_connection(("127.0.0.1", server.rest_port), timeout=10) as client:
        stream, began_s = client.makefile("rb"), time.monotonic()
        while time.monotonic() - began_s < 2 * idle_s:  # a clock from the first answer has run out
            client.sendall(request)
            assert answers(stream, 1)[0][0] == 200
            time.sleep(idle_s / 8)  # a client that thinks between its questions
        last_s = time.monotonic()
        assert stream.read(1) == b""
        assert time.monotonic() - last_s > idle_s / 2
    assert off_lane == []


def test_a_version_that_is_swapped_loses_and_mixes_nothing(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    """Answers are of one version or the other; from the new one on never of the old."""
    repository = Repository(tmp_path / "models")
    repository.push(exported["half_plus_two"], "half")
    config = ServeConfig(
        root=repository.root, rest_port=0, grpc_port=0, poll_s=0.05, lame_duck_s=0.0, drain_s=5
    )
    running = Server(config)
    running.start()
    try:
        assert running.wait_until_ready(60)
        seen: list[float] = []
        with socket.create_connection(("127.0.0.1", running.rest_port), timeout=30) as client:
            sent = post("/v1/models/half:predict", b'{"instances": [0.0]}')
            with client.makefile("rb") as stream:
                end_s = time.monotonic() + 60
                while 3.0 not in seen[:-50]:
                    client.sendall(sent)
                    ((status, _, body),) = answers(stream, 1)
                    assert status == 200, body
                    seen += json.loads(body)["predictions"]
                    if len(seen) == 50:
                        repository.push(exported["half_plus_three"], "half")
                    assert time.monotonic() < end_s, "the new version did not come"
        assert seen == sorted(seen)
        assert set(seen) == {2.0, 3.0}
    finally:
        running.stop()


@pytest.mark.parametrize(
    ("method", "target", "headers", "taken"),
    [
        (b"POST", b"/v1/models/m:predict", [(b"content-length", b"9")], True),
        (b"POST", b"/v1/models/m/versions/3:predict", [(b"content-length", b"9")], True),
        (b"GET", b"/v1/models/m:predict", [(b"content-length", b"9")], False),
        (b"POST", b"/v1/models/m:classify", [(b"content-length", b"9")], False),
        (b"POST", b"/v1/models/m%3apredict", [(b"content-length", b"9")], False),
        (b"POST", b"/v1/models/m?x=:predict", [(b"content-length", b"9")], False),
        (b"POST", b"/v1/models/m#x:predict", [(b"content-length", b"9")], False),
        (
            b"POST",
            b"/v1/models/m:predict",
            [(b"content-length", b"9"), (b"accept", b"application/Octet-Stream")],
            False,
        ),
        (b"POST", b"/v1/models/m:predict", [], False),
        (b"POST", b"/v1/models/m:predict", [(b"transfer-encoding", b"chunked")], False),
        (b"POST", b"/v1/models/m:predict", [(b"content-length", b"%d" % (MAX_BYTES + 1))], False),
        (
            b"POST",
            b"/v1/models/m:predict",
            [(b"content-length", b"9"), (b"content-encoding", b"gzip")],
            False,
        ),
        (
            b"POST",
            b"/v1/models/m:predict",
            [(b"content-length", b"9"), (b"content-type", b"application/octet-stream")],
            False,
        ),
    ],
)
def test_only_plain_small_predictions_are_taken(
    method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], taken: bool
) -> None:
    assert is_small(method, target, headers) is taken


def rows_of(*values: float) -> Request:
    array = np.array(values)
    return Request(inputs=[array], rows=len(array), key=(("float64", ()),), deadline=Deadline())


def test_a_model_that_is_slow_that_loops_or_that_waits_for_company_is_not_waited_for() -> None:
    def run(inputs: Any) -> Any:
        time.sleep(seconds)  # the model's time
        return {"y": inputs[0] * 2}

    def queue(*, may_not_end: bool = False, **limits: Any) -> Queue:
        config = BatchingConfig(**limits)
        return Queue(run, config, name="m", metrics=None, may_not_end=may_not_end)

    seconds = 20 * QUICK_S
    quick, looping, timed = queue(), queue(may_not_end=True), queue(batch_timeout_micros=10)
    assert not quick.is_quick, "nothing is known of it"
    for each in (quick, looping, timed):
        each._usual_s = QUICK_S / 10
    assert (quick.is_quick, looping.is_quick, timed.is_quick) == (True, False, False)
    quick.submit(rows_of(1.0))
    assert quick.is_quick, "one delayed run does not make a model slow"
    for _ in range(40):
        quick.submit(rows_of(1.0))
    assert not quick.is_quick


def test_what_may_not_be_joined_is_left_to_each() -> None:
    """Proved by the first joined run, before its answer is anybody's; what is not answered here is not
    counted here."""
    metrics = ServeMetrics()

    def run(inputs: Any) -> Any:
        return {"y": inputs[0] / inputs[0].sum()}

    queue = Queue(run, BatchingConfig(), name="m", metrics=metrics)
    two = [np.array([1.0, 3.0])]
    assert queue.run_now(two, [2]) is not None
    assert queue.run_now(two, [1, 1]) is None
    assert not queue.joins
    assert metrics.wrapped_run_count.total() == 1


def test_an_output_that_lost_its_rows_later_is_left_to_each_and_counted_there() -> None:
    """Trusted by its first joined runs; then one of them has no row for each row."""
    metrics, rows_lost = ServeMetrics(), False

    def run(inputs: Any) -> Any:
        return {"y": inputs[0][:1] if rows_lost else inputs[0] * 2}

    queue = Queue(run, BatchingConfig(), name="m", metrics=metrics)
    two = [np.array([1.0, 3.0])]
    for _ in range(COMPARED_WITH_SINGLE + 1):
        assert queue.run_now(two, [1, 1]) is not None
    assert metrics.wrapped_run_count.total() == COMPARED_WITH_SINGLE + 1

    rows_lost = True
    assert queue.run_now(two, [1, 1]) is None
    assert not queue.joins
    assert metrics.wrapped_run_count.total() == COMPARED_WITH_SINGLE + 1


def test_a_head_that_came_before_is_no_more_than_its_own_request(
    server: Server, off_lane: list[Any]
) -> None:
    """Byte for byte the same head: with another body, in parts, with more after it, without its end."""
    protocol: Any = server._rest.config.http_protocol_class
    heads = protocol.lane.heads
    one, two = post(PATH, b'{"instances": [1.0]}'), post(PATH, b'{"instances": [3.0]}')
    longer = one[: one.index(b"\r\n\r\n") + 4] + b'{"instances": [5.0]}X'
    with socket.create_connection(("127.0.0.1", server.rest_port), timeout=30) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with client.makefile("rb") as stream:

            def said(*parts: bytes, count: int = 1) -> list[float]:
                for part in parts:
                    client.sendall(part)
                    time.sleep(0.05 if len(parts) > 1 else 0.0)  # so that each is read by itself
                found = answers(stream, count)
                assert {status for status, _, _ in found} == {200}, found
                return [json.loads(body)["predictions"][0] for _, _, body in found]

            assert said(one) == [2.5]
            assert heads.find(one) is not None, "it is known"
            assert heads.find(one[:-1]) is None
            assert heads.find(one + one) is None
            assert heads.find(longer) is None
            assert said(two) == [3.5]
            assert said(one[:-3], one[-3:]) == [2.5]
            assert said(one + two, count=2) == [2.5, 3.5]
            assert said(two[:40], two[40:] + one, two, count=3) == [3.5, 2.5, 3.5]
            client.sendall(longer)
            assert answers(stream, 1)[0][0] == 200
            assert stream.read() == b"", "the bytes after it are not a request"


def test_heads_that_are_known_are_counted(server: Server, off_lane: list[Any]) -> None:
    def counted() -> dict[str, float]:
        lines = server.plane.metrics.exposition().splitlines()
        of_heads = [line for line in lines if line.startswith("stoker_head_cache{")]
        return {line.split('"')[1]: float(line.split()[-1]) for line in of_heads}

    before = counted()
    request = post(PATH, b'{"instances": [1.0]}').replace(
        b"\r\n", b"\r\nX-Never-Sent-Before: 1\r\n", 1
    )
    with (
        socket.create_connection(("127.0.0.1", server.rest_port), timeout=30) as client,
        client.makefile("rb") as stream,
    ):
        for _ in range(4):
            client.sendall(request)
            assert answers(stream, 1)[0][0] == 200

    after = counted()
    assert {name: after[name] - before[name] for name in after} == {"hit": 3.0, "miss": 1.0}


def test_only_so_many_heads_are_kept_and_no_long_one() -> None:
    head = Head(
        raw_path=b"/",
        path="/",
        http_version="1.1",
        headers=[],
        keep_alive=True,
        takes_gzip=False,
    )
    heads = HeaderCache()
    for number in range(3 * MAX_HEADS):
        heads.add(b"POST /%d\r\n\r\nab" % number, head, body_bytes=2)
        assert heads.find(b"POST /%d\r\n\r\nxy" % number) == (head, b"xy")
    assert len(heads._known) <= MAX_HEADS
    long = b"POST /%b\r\n\r\n" % (b"x" * 4096)
    heads.add(long, head, body_bytes=0)
    assert heads.find(long) is None
    heads.add(b"POST /more\r\n\r\nabcd", head, body_bytes=2)
    assert heads.find(b"POST /more\r\n\r\nab") is None, "there was more behind its body"


def test_a_key_is_checked_in_each_request_even_if_the_head_is_cached(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    repository = Repository(tmp_path / "models")
    repository.push(exported["half_plus_two"], "half")
    (tmp_path / "keys.yaml").write_text(
        "- {name: shop, role: predict, key: a-good-long-key-of-the-shop}"
    )
    running = Server(
        ServeConfig(
            root=repository.root,
            rest_port=0,
            grpc_port=0,
            lame_duck_s=0.0,
            drain_s=5,
            keys_file=tmp_path / "keys.yaml",
        )
    )
    running.start()
    try:
        assert running.wait_until_ready(60)
        path, body = "/v1/models/half:predict", b'{"instances": [0.0]}'
        good = post(path, body, "Authorization: Bearer a-good-long-key-of-the-shop")
        wrong = post(path, body, "Authorization: Bearer a-good-long-key-of-the-shoq")
        with (
            socket.create_connection(("127.0.0.1", running.rest_port), timeout=30) as client,
            client.makefile("rb") as stream,
        ):
            for _ in range(8):
                client.sendall(good)
                assert answers(stream, 1)[0][0] == 200
            with (
                socket.create_connection(("127.0.0.1", running.rest_port), timeout=30) as other,
                other.makefile("rb") as others,
            ):
                other.sendall(wrong)
                assert answers(others, 1)[0][0] == 401
            client.sendall(good)
            assert answers(stream, 1)[0][0] == 200
    finally:
        running.stop()
