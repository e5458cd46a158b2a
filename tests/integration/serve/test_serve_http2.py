"""gRPC by the frame: what every client may do, what none may, and that others notice nothing."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from hpack import Encoder
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc
from tests.integration.serve.frames import CALL, GREETING, data, head, message, talk, values

from stoker.core.errors import ConfigError
from stoker.registry.repository import Repository
from stoker.serve.batching.queue import QUICK_S
from stoker.serve.config import ServeConfig
from stoker.serve.grpc_server import connection, frames
from stoker.serve.grpc_server.call import ServerCall
from stoker.serve.grpc_server.frames import Error
from stoker.serve.limits import HttpLimits
from stoker.serve.process.server import Server

LIMITS = HttpLimits(connections=30, head_bytes=4096, head_s=0.5, body_s=0.7, send_s=0.5)

DONE = {"grpc-status": "0", "stoker-model-version": "1"}
"""Trailers of a call that a model answered."""


@pytest.fixture(scope="module")
def base(exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = Repository(tmp_path_factory.mktemp("models"))
    repository.push(exported["half_plus_two"], "half")
    return repository.base("half")


def serving(base: Path, **more: Any) -> Server:
    config = ServeConfig(
        models={"half": base}, rest_port=0, grpc_port=0, lame_duck_s=0.0, drain_s=5, poll_s=0.1
    )
    server = Server(dataclasses.replace(config, **more))
    server.start()
    assert server.wait_until_ready(60)
    return server


@pytest.fixture(scope="module")
def patient(base: Path) -> Iterator[Server]:
    """A server as it is by default."""
    server = serving(base)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def strict(base: Path) -> Iterator[Server]:
    """One with a short deadline, and a limit to messages."""
    server = serving(
        base,
        http=LIMITS,
        max_held_bytes=1 << 20,
        max_body_bytes=1 << 20,
        grpc_channel_arguments={"grpc.max_receive_message_length": 1 << 22},
    )
    yield server
    server.stop()


def test_a_call_is_answered_however_its_bytes_are_cut(patient: Server) -> None:
    wire = GREETING + head(1) + data(1, message([[1.0], [4.0]]))
    with talk(patient.grpc_port, greeted=False) as client:
        for byte in wire:
            client.say(bytes((byte,)))

        (trailers, raw) = client.answers()[1]

    assert trailers == DONE
    assert values(raw) == [2.5, 4.0]


def test_padding_priority_and_headers_in_parts_change_nothing(patient: Server) -> None:
    block = Encoder().encode(CALL)
    padded = b"\x03" + b"\x00" * 5 + block[:7] + b"\x00" * 3
    flags = frames.PADDED | frames.HAS_PRIORITY
    whole = message([[2.0]])
    with talk(patient.grpc_port) as client:
        client.say(
            frames.frame(frames.HEADERS, flags, 1, padded),
            frames.frame(frames.CONTINUATION, 0, 1, block[7:9]),
            frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[9:]),
            frames.frame(frames.PRIORITY, 0, 1, b"\x00" * 5),
            frames.frame(frames.DATA, frames.PADDED, 1, b"\x02" + whole[:9] + b"\x00" * 2),
            frames.frame(0x55, 0, 1, b"of no known kind"),
            data(1, whole[9:], ended=False),
            head(1, ended=True, fields=[("x-trailer", "1")]),
        )

        (trailers, raw) = client.answers()[1]

    assert (trailers, values(raw)) == (DONE, [3.0])


def test_an_answer_waits_for_the_clients_windows(patient: Server) -> None:
    rows = np.arange(100.0, dtype=np.float32)[:, None]
    with talk(patient.grpc_port, greeted=False) as client:
        client.say(
            frames.PREFACE,
            frames.settings({frames.INITIAL_WINDOW: 10}),
            head(1),
            data(1, message(rows)),
        )
        first = client.until(frames.DATA)
        assert first is not None
        assert len(first.payload) == 10
        assert client.next(0.2) is None  # not one byte more
        client.say(frames.window_update(1, 7))
        second = client.until(frames.DATA)
        assert second is not None
        assert len(second.payload) == 7
        client.say(frames.settings({frames.INITIAL_WINDOW: 100_000}))

        (trailers, rest) = client.answers()[1]

    assert trailers == DONE
    assert values(first.payload + second.payload + rest) == (rows[:, 0] * 0.5 + 2).tolist()


def test_many_calls_of_one_connection_get_each_its_own_answer(patient: Server) -> None:
    numbers = range(1, 601, 2)
    with talk(patient.grpc_port) as client:
        client.say(*(head(n) + data(n, message([[float(n)]])) for n in numbers))

        answers = client.answers(len(numbers))

    assert {n: values(raw) for n, (_, raw) in answers.items()} == {
        n: [n * 0.5 + 2] for n in numbers
    }


def test_calls_that_come_together_are_one_run_in_the_loop(
    patient: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with patient.models.get("half").use(None, label=None) as (_, model):
        queue = model._queues["serving_default"]
        monkeypatch.setattr(queue, "_usual_s", QUICK_S / 10)
        monkeypatch.setattr(queue, "_took", lambda _s: None)  # whatever else this machine does
    monkeypatch.setattr(patient.plane, "predict", None)  # what a thread would ask
    before = patient.plane.metrics.wrapped_run_count.total()
    numbers = range(1, 401, 2)
    with talk(patient.grpc_port) as client:
        client.say(*(head(n) + data(n, message([[float(n)]])) for n in numbers))
        answers = client.answers(len(numbers))

    assert {n: values(raw) for n, (_, raw) in answers.items()} == {
        n: [n * 0.5 + 2] for n in numbers
    }
    runs = patient.plane.metrics.wrapped_run_count.total() - before
    assert 1 <= runs < len(numbers) / 2
    counted = patient.plane.metrics.request_count.lines()
    assert sum(float(line.split()[-1]) for line in counted) >= len(numbers)


def test_calls_of_other_shapes_in_one_turn_are_not_mixed(patient: Server) -> None:
    rows = {1: [[1.0]], 3: [[2.0], [3.0]], 5: [["text"]], 7: [1.0, 2.0], 9: [[5.0]]}
    with talk(patient.grpc_port) as client:
        client.say(*(head(n) + data(n, message(given)) for n, given in rows.items()))

        answers = client.answers(len(rows))

    right = {n: values(raw) for n, (fields, raw) in answers.items() if fields["grpc-status"] == "0"}
    assert right == {1: [2.5], 3: [3.0, 3.5], 7: [2.5, 3.0], 9: [4.5]}
    assert answers[5][0]["grpc-status"] == "3"


BOMB = [("x-bomb", "z" * 3900)]


def bomb() -> bytes:
    """A header that is remembered, and then named a thousand times."""
    encoder = Encoder()
    first = encoder.encode([*CALL, *BOMB])
    again = encoder.encode([*CALL, *BOMB * 1000])
    return frames.frame(frames.HEADERS, 5, 1, first) + frames.frame(frames.HEADERS, 5, 3, again)


ABUSES: dict[str, tuple[bytes, Error]] = {
    "a frame that is too large": (
        frames.HEADER.pack(0x3000, 0, frames.DATA, 0, 1),
        Error.FRAME_SIZE_ERROR,
    ),
    "data of no stream": (data(0, b"x"), Error.PROTOCOL_ERROR),
    "data of a stream that was never opened": (data(7, b"x"), Error.PROTOCOL_ERROR),
    "a stream of the server's": (head(2), Error.PROTOCOL_ERROR),
    "headers that are none": (
        frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff\xff"),
        Error.COMPRESSION_ERROR,
    ),
    "headers with more padding than frame": (
        frames.frame(frames.HEADERS, frames.END_HEADERS | frames.PADDED, 1, b"\x09abc"),
        Error.PROTOCOL_ERROR,
    ),
    "headers that are interrupted": (
        frames.frame(frames.HEADERS, 0, 1, b"\x82") + frames.frame(frames.PING, 0, 0, b"p" * 8),
        Error.PROTOCOL_ERROR,
    ),
    "headers that never end": (
        frames.frame(frames.HEADERS, 0, 1, b"\x82")
        + frames.frame(frames.CONTINUATION, 0, 1, b"\x00" * 8000) * 3,
        Error.ENHANCE_YOUR_CALM,
    ),
    "headers that go on in nothing": (
        frames.frame(frames.HEADERS, 0, 1, b"\x82") + frames.frame(frames.CONTINUATION, 0, 1),
        Error.ENHANCE_YOUR_CALM,
    ),
    "a header that is a bomb": (bomb(), Error.ENHANCE_YOUR_CALM),
    "headers amid messages": (head(1) + head(1), Error.PROTOCOL_ERROR),
    "going on with no headers": (
        frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, b"\x82"),
        Error.PROTOCOL_ERROR,
    ),
    "a flood of pings": (frames.frame(frames.PING, 0, 0, b"p" * 8) * 200, Error.ENHANCE_YOUR_CALM),
    "a flood of settings": (frames.settings({}) * 200, Error.ENHANCE_YOUR_CALM),
    "a flood of calls that are given up": (
        b"".join(head(n) + frames.reset(n, Error.CANCEL) for n in range(1, 4001, 2)),
        Error.ENHANCE_YOUR_CALM,
    ),
    "a ping of seven bytes": (
        frames.frame(frames.PING, 0, 0, b"p" * 7),
        Error.FRAME_SIZE_ERROR,
    ),
    "a setting of five bytes": (
        frames.frame(frames.SETTINGS, 0, 0, b"s" * 5),
        Error.FRAME_SIZE_ERROR,
    ),
    "many settings in a frame": (
        frames.frame(frames.SETTINGS, 0, 0, b"\x00\x04\x00\x00\xff\xff" * 33),
        Error.ENHANCE_YOUR_CALM,
    ),
    "headers that are far too large": (
        frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x20" * 9000),
        Error.ENHANCE_YOUR_CALM,
    ),
    "a flood of calls that the server has to reset": (
        b"".join(head(n) + frames.window_update(n, 0) for n in range(1, 4001, 2)),
        Error.ENHANCE_YOUR_CALM,
    ),
    "settings of a stream": (frames.frame(frames.SETTINGS, 0, 1), Error.PROTOCOL_ERROR),
    "a window that is too large": (
        frames.window_update(0, 2**31 - 1),
        Error.FLOW_CONTROL_ERROR,
    ),
    "a window of nothing": (frames.window_update(0, 0), Error.FLOW_CONTROL_ERROR),
    "a first window that is too large": (
        frames.settings({frames.INITIAL_WINDOW: 2**31}),
        Error.FLOW_CONTROL_ERROR,
    ),
    "frames of no size": (frames.settings({frames.MAX_FRAME: 1}), Error.PROTOCOL_ERROR),
    "a window of a stream never opened": (frames.window_update(9, 1), Error.PROTOCOL_ERROR),
    "a reset of a stream never opened": (frames.reset(9, Error.CANCEL), Error.PROTOCOL_ERROR),
    "a reset of three bytes": (
        frames.frame(frames.RST_STREAM, 0, 1, b"abc"),
        Error.FRAME_SIZE_ERROR,
    ),
    "a promise": (frames.frame(frames.PUSH_PROMISE, 4, 1, b"\x00" * 4), Error.PROTOCOL_ERROR),
}


@pytest.mark.parametrize("abuse", ABUSES)
def test_a_client_that_breaks_the_protocol_gets_an_error_and_is_cut_off_and_others_notice_nothing(
    strict: Server, abuse: str
) -> None:
    wire, error = ABUSES[abuse]
    with talk(strict.grpc_port) as other, talk(strict.grpc_port) as client:
        client.say(wire)
        farewell = client.until(frames.GOAWAY)
        assert farewell is not None
        assert int.from_bytes(farewell.payload[4:8], "big") == error
        while client.next(2) is not None:
            pass
        assert client.closed

        other.say(head(1), data(1, message([[1.0]])))
        assert values(other.answers()[1][1]) == [2.5]


def test_a_connection_that_is_not_http2_is_cut(strict: Server) -> None:
    with talk(strict.grpc_port, greeted=False) as client:
        client.say(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while client.next(2) is not None:
            pass
        assert client.closed


def test_a_client_that_says_nothing_or_half_a_frame_is_cut(strict: Server) -> None:
    with (
        talk(strict.grpc_port, greeted=False) as silent,
        talk(strict.grpc_port) as half,
        talk(strict.grpc_port) as endless,
    ):
        half.say(head(1)[:-3])
        endless.say(frames.frame(frames.HEADERS, 0, 1, b"\x82"))
        for client in (silent, half, endless):
            assert client.until(frames.GOAWAY, 10) is not None
            assert client.next(5) is None
            assert client.closed


def test_a_message_that_never_ends_ends_its_call_alone(strict: Server) -> None:
    with talk(strict.grpc_port) as client:
        client.say(head(1), data(1, message([[1.0]])[:20], ended=False))
        (trailers, _) = client.answers(wait_s=10)[1]
        assert trailers["grpc-status"] == "4"
        client.say(head(3), data(3, message([[1.0]])))
        assert client.answers()[3][0] == DONE


def test_messages_that_never_end_take_no_more_than_they_may_and_small_calls_go_on(
    strict: Server,
) -> None:
    part = b"\x00\x00\x40\x00\x00" + b"x" * 400_000  # of 4 MiB
    pieces = [part[at : at + 16_000] for at in range(0, len(part), 16_000)]
    with talk(strict.grpc_port) as client, talk(strict.grpc_port) as other:
        for number in (1, 3, 5):  # together more than is held at once
            client.say(head(number), *(data(number, piece, ended=False) for piece in pieces))
        refused = client.answers()
        assert [fields["grpc-status"] for fields, _ in refused.values()] == ["8"]
        other.say(head(1), data(1, message([[1.0]])))
        assert values(other.answers()[1][1]) == [2.5]
        # What was held is given back, and one alone may be larger.
        (number,) = refused
        left = [stream for stream in (1, 3, 5) if stream != number]
        client.say(*(frames.reset(stream, Error.CANCEL) for stream in left), head(7, ended=True))
        assert client.answers()[7][0]["grpc-status"] == "3"
        assert strict._grpc.held_bytes == 0
        rows = np.ones((300_000, 1), np.float32)
        whole = message(rows)
        client.say(
            head(9),
            *(data(9, whole[at : at + 16_000], ended=False) for at in range(0, len(whole), 16_000)),
            data(9, b""),
        )
        client.say(frames.window_update(0, 1 << 24), frames.window_update(9, 1 << 24))
        assert values(client.answers()[9][1]) == [2.5] * len(rows)


def test_an_answer_that_is_not_read_is_cut(strict: Server) -> None:
    with talk(strict.grpc_port, greeted=False) as client:
        client.say(
            frames.PREFACE,
            frames.settings({frames.INITIAL_WINDOW: 1}),
            head(1),
            data(1, message([[1.0]])),
        )
        farewell = client.until(frames.GOAWAY, 10)
        assert farewell is not None
        assert b"not read" in farewell.payload


def test_no_more_answers_are_made_than_are_read(
    patient: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question of 40 bytes has an answer of thousands: what is not read must not pile up."""
    made: list[int] = []
    write = ServerCall._serialized

    def counted(call: ServerCall, found: Any) -> bytes:
        raw = write(call, found)
        made.append(len(raw))
        return raw

    monkeypatch.setattr(ServerCall, "_serialized", counted)
    listing = reflection_pb2.ServerReflectionRequest(
        file_containing_symbol="tensorflow.serving.PredictionService"
    ).SerializeToString()
    question = b"\x00" + len(listing).to_bytes(4, "big") + listing
    path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    fields = [(":path", path) if name == ":path" else (name, value) for name, value in CALL]
    questions = 300
    with talk(patient.grpc_port, greeted=False) as client:
        client.say(frames.PREFACE, frames.settings({frames.INITIAL_WINDOW: 0}))
        client.say(head(1, fields=fields), *[data(1, question, ended=False)] * questions)
        client.say(frames.frame(frames.PING, 0, 0, b"the last"))
        assert client.until(frames.PING) is not None  # it has heard all of them
        give_up_s = time.monotonic() + 60
        while not made:
            assert time.monotonic() < give_up_s, "the first question is not answered"
            time.sleep(0.01)  # its thread begins when it may
        time.sleep(0.5)  # in which the thread would answer them all
        assert len(made) == 1
        client.say(frames.window_update(1, 1 << 30), frames.window_update(0, 1 << 30))
        client.say(data(1, b""))
        trailers, answers = client.answers()[1]
        assert trailers["grpc-status"] == "0"
        assert len(made) == questions
        assert len(answers) == sum(made) + 5 * questions


def test_nor_is_one_that_is_read_by_the_byte(strict: Server) -> None:
    with talk(strict.grpc_port, greeted=False) as client:
        client.say(
            frames.PREFACE,
            frames.settings({frames.INITIAL_WINDOW: 0}),
            head(1),
            data(1, message([[1.0]])),
        )
        farewell, end_s = None, time.monotonic() + 10
        while farewell is None and time.monotonic() < end_s:
            client.say(frames.window_update(1, 1), frames.window_update(0, 1))
            farewell = client.until(frames.GOAWAY, 0.1)
        assert farewell is not None
        assert b"not read" in farewell.payload


def test_calls_that_run_out_of_time_together_do_not_cost_the_connection(patient: Server) -> None:
    numbers = range(1, 3001, 2)
    with talk(patient.grpc_port) as client:
        client.say(*(head(n) for n in numbers), frames.frame(frames.PING, 0, 0, b"are here"))
        assert client.until(frames.PING) is not None
        time.sleep(0.2)  # their time
        client.say(*(frames.reset(n, Error.CANCEL) for n in numbers))
        client.say(head(3001), data(3001, message([[1.0]])))
        assert values(client.answers()[3001][1]) == [2.5]


def test_a_client_that_pings_now_and_then_is_not_cut(
    patient: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PING_REFILL_S", 1e-6)  # hours pass between two
    with talk(patient.grpc_port) as client:
        for _ in range(300):
            client.say(frames.frame(frames.PING, 0, 0, b"keep me!"))
            answer = client.until(frames.PING)
            assert answer is not None


def test_what_a_few_bytes_stand_for_is_not_made_in_the_loop(
    patient: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    at_once = patient.plane.predict_joined

    def noted(*args: Any, **more: Any) -> Any:
        seen.append(args)
        return at_once(*args, **more)

    monkeypatch.setattr(patient.plane, "predict_joined", noted)
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "half"
    tensor = request.inputs["x"]
    tensor.dtype = 1
    for size in (1 << 20, 1):
        tensor.tensor_shape.dim.add(size=size)
    tensor.float_val.append(3.0)
    raw = request.SerializeToString()
    with grpc.insecure_channel(
        f"127.0.0.1:{patient.grpc_port}", options=[("grpc.max_receive_message_length", -1)]
    ) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        answer = stub.Predict(request, timeout=60)

    assert len(raw) < 100
    assert len(answer.outputs["y"].float_val) == 1 << 20
    assert seen == []


def test_a_stream_that_is_reset_leaves_nothing(patient: Server) -> None:
    watch = [*CALL[:2], (":path", "/grpc.health.v1.Health/Watch"), *CALL[3:]]
    empty = b"\x00\x00\x00\x00\x00"
    with talk(patient.grpc_port) as client:
        for number in range(1, 301, 2):
            client.say(head(number, fields=watch), data(number, empty))
            assert client.until(frames.DATA) is not None
            client.say(data(number, b"after its end"))
        client.say(head(301), data(301, message([[1.0]])))
        answered: dict[int, Any] = {}
        while 301 not in answered:
            answered |= client.answers()
        assert values(answered[301][1]) == [2.5]
        assert patient._health.watchers() == 0


def test_watching_what_is_not_there_keeps_no_name(patient: Server) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{patient.grpc_port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="no such service"))
        assert next(unknown).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert patient._health.watchers() == 1
        unknown.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Watch(health_pb2.HealthCheckRequest(service="x" * 100_000)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        end_s = time.monotonic() + 10
        while patient._health.watchers():
            assert time.monotonic() < end_s
            time.sleep(0.01)  # the end of a stream goes its way through another thread


def test_a_call_that_has_ended_keeps_nothing(patient: Server) -> None:
    rows = np.zeros((100_000, 1), np.float32)
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "half"
    request.inputs["x"].CopyFrom(tf.make_tensor_proto(rows))
    gc.collect()
    gc.disable()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{patient.grpc_port}") as channel:
            stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
            for _ in range(5):
                stub.Predict(request, timeout=60)
                # Whether its answer is there already is a race, and no matter here.
                stub.Predict.future(request, timeout=60).cancel()
        end_s = time.monotonic() + 10
        while any(isinstance(found, ServerCall) for found in gc.get_objects()):
            assert time.monotonic() < end_s, "a call is kept until the next collection"
            time.sleep(0.05)  # a thread may be at work for one that was given up
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "given",
    [
        {"grpc.max_concurrent_streams": "abc"},
        {"grpc.max_concurrent_streams": 5_000_000_000},
        {"grpc.max_concurrent_streams": 0},
        {"grpc.max_metadata_size": 0},
        {"grpc.max_receive_message_length": -2},
    ],
)
def test_a_wrong_setting_of_grpc_is_an_error_at_the_start(
    base: Path, given: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        Server(
            ServeConfig(
                models={"half": base}, rest_port=0, grpc_port=0, grpc_channel_arguments=given
            )
        )


def test_a_unix_socket_takes_no_files_place_and_is_its_servers_alone(
    base: Path, tmp_path: Path
) -> None:
    file, path = tmp_path / "file", tmp_path / "socket"
    file.write_text("kept")
    with pytest.raises(ConfigError, match="grpc_socket_path"):
        serving(base, grpc_socket_path=str(file))
    assert file.read_text() == "kept"

    first = serving(base, grpc_socket_path=str(path))
    second = serving(base, grpc_socket_path=str(path))  # follows it
    try:
        first.stop()
        with grpc.insecure_channel(f"unix:{path}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        second.stop()
    assert not path.exists()


@pytest.mark.parametrize(
    ("change", "wire", "wanted"),
    [
        ({":method": "GET"}, b"", {":status": "405"}),
        ({"content-type": "application/json"}, b"", {":status": "415"}),
        ({":path": "/no.such/Call"}, b"", {"grpc-status": "12"}),
        ({"grpc-timeout": "x"}, b"", {"grpc-status": "3"}),
        ({"connection": "close"}, b"", {"reset": "PROTOCOL_ERROR"}),
        ({"x-long": "y" * 5000}, b"", {"grpc-status": "8"}),
        ({}, b"", {"grpc-status": "3"}),
        ({}, message([[1.0]])[:9], {"grpc-status": "3"}),
        ({}, b"\x00\x00\x00\x00\x03abc", {"grpc-status": "3"}),
        ({}, message([[1.0]]) * 2, {"grpc-status": "12"}),
        ({}, b"\x00\x7f\xff\xff\xff", {"grpc-status": "8"}),
        ({}, b"\x01\x00\x00\x00\x03abc", {"grpc-status": "12"}),
        ({"grpc-encoding": "gzip"}, b"\x01\x00\x00\x00\x03abc", {"grpc-status": "3"}),
    ],
)
def test_a_wrong_call_is_refused_and_the_next_is_answered(
    strict: Server, change: dict[str, str], wire: bytes, wanted: dict[str, str]
) -> None:
    fields = sorted({**dict(CALL), **change}.items(), key=lambda field: field[0][0] != ":")
    with talk(strict.grpc_port) as client:
        client.say(head(1, fields=fields), data(1, wire))
        (trailers, _) = client.answers()[1]
        assert wanted.items() <= trailers.items()
        client.say(head(3), data(3, message([[1.0]])))
        found = client.answers()

    assert values(found[3][1]) == [2.5]


def test_connections_beyond_the_limit_are_closed_at_once(strict: Server) -> None:
    kept = []
    try:
        for _ in range(LIMITS.connections + 5):
            opened = talk(strict.grpc_port)
            kept.append((opened, opened.__enter__()))
        last = kept[-1][1]
        while last.next(2) is not None:
            pass
        assert last.closed
    finally:
        for opened, _ in kept:
            opened.__exit__(None, None, None)
    deadline_s = time.monotonic() + 10
    while True:  # until the server has seen that they are gone
        with talk(strict.grpc_port) as client:
            client.say(head(1), data(1, message([[1.0]])))
            if client.answers():
                break
        assert time.monotonic() < deadline_s


def test_a_compressed_channel_with_metadata_is_understood(patient: Server) -> None:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "half"
    request.inputs["x"].CopyFrom(tf.make_tensor_proto(np.zeros((1000, 1), np.float32)))
    metadata = (("x-note", "a note"), ("x-raw-bin", b"\x00\xff"))
    with grpc.insecure_channel(
        f"127.0.0.1:{patient.grpc_port}", compression=grpc.Compression.Gzip
    ) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        answer = stub.Predict(request, timeout=20, metadata=metadata)

    assert list(answer.outputs["y"].float_val) == [2.0] * 1000


def test_an_image_of_megabytes_goes_both_ways(patient: Server) -> None:
    rows = np.random.default_rng(0).normal(size=(3_000_000, 1)).astype(np.float32)
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "half"
    request.inputs["x"].CopyFrom(tf.make_tensor_proto(rows))
    unlimited = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{patient.grpc_port}", options=unlimited) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        answer = stub.Predict(request, timeout=60)

    np.testing.assert_allclose(answer.outputs["y"].float_val, rows[:, 0] * 0.5 + 2, rtol=1e-6)


def test_at_the_end_calls_are_answered_and_watchers_are_let_go(base: Path) -> None:
    server = serving(base)
    stopping = threading.Thread(target=server.stop)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        with talk(server.grpc_port) as client:
            client.say(head(1), data(1, message([[1.0]]), ended=False), head(3))
            began_s = time.monotonic()
            stopping.start()
            farewell = client.until(frames.GOAWAY)
            assert farewell is not None
            assert int.from_bytes(farewell.payload[:4], "big") == frames.MAX_31_BITS
            client.say(data(1, b""), data(3, message([[3.0]])))
            answers = client.answers(2)
        assert {n: values(raw) for n, (_, raw) in answers.items()} == {1: [2.5], 3: [3.5]}
        statuses: list[int] = []
        with pytest.raises(grpc.RpcError) as caught:
            statuses.extend(answer.status for answer in watch)
    stopping.join()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert set(statuses) == {health_pb2.HealthCheckResponse.NOT_SERVING}
    assert time.monotonic() - began_s < server.config.drain_s


def test_a_connection_that_is_old_or_idle_is_renewed_without_a_loss(base: Path) -> None:
    given = {"grpc.max_connection_age_ms": 1500, "grpc.max_connection_idle_ms": 500}
    server = serving(base, grpc_channel_arguments=given)
    try:
        with talk(server.grpc_port) as idle, talk(server.grpc_port) as old:
            assert idle.until(frames.GOAWAY, 10) is not None
            number, farewell = 1, None
            while farewell is None:  # a call is always under way, so that only its age can end it
                old.say(head(number), data(number, message([[1.0]])[:9], ended=False))
                farewell = old.until(frames.GOAWAY, 0.2)
                old.say(data(number, message([[1.0]])[9:]))
                last, number = number, number + 2
            assert values(old.answers()[last][1]) == [2.5]
            for client in (idle, old):
                while client.next(10) is not None:
                    pass
                assert client.closed
    finally:
        server.stop()
