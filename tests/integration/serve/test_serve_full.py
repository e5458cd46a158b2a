"""What a server says that has no room left, over both protocols; and whom it does not wait for."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tensorflow_serving.apis import (
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)
from tests.integration.serve.conftest import export

from stoker.registry.repository import Repository
from stoker.serve.batching.config import BatchingConfig
from stoker.serve.config import ServeConfig
from stoker.serve.limits import METRICS_PATH, HttpLimits
from stoker.serve.process.server import Server
from stoker.serve.servables.servable import State

AskAt = Callable[..., Any]
HALF = "/v1/models/half:predict"
FULL = "The batch scheduling queue to which this task was submitted is full"
SEND_S = 2.0
LARGE_BYTES = 24 << 20
"""Of an answer: far more than the kernel keeps of one that is not read."""

MAX = 1 << 59
"""Values that no memory holds: 2 EiB."""


def hungry(path: Path) -> Path:
    """Takes 4 bytes times the largest n."""

    def call(n: tf.Tensor) -> dict[str, tf.Tensor]:
        ones = tf.fill([tf.reduce_max(n)], 1.0)
        return {"sum": tf.cast(n, tf.float32) * 0.0 + tf.reduce_sum(ones)}

    return export(path, call, [tf.TensorSpec([None], tf.int64, name="n")])


@pytest.fixture(scope="module")
def small(exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose models' queues have room for two rows, and that has three requests at once.

    Requests wait for company for a microsecond, so that none is answered in the loop, which must not
    be held up.
    """
    folder = tmp_path_factory.mktemp("full")
    repository = Repository(folder / "models")
    repository.push(exported["half_plus_two"], "half")
    repository.push(exported["words"], "words")
    repository.push(hungry(folder / "hungry"), "hungry")
    server = Server(
        ServeConfig(
            root=repository.root,
            rest_port=0,
            grpc_port=0,
            poll_s=0.05,
            lame_duck_s=0.0,
            drain_s=5,
            max_in_flight=3,
            http=HttpLimits(send_s=SEND_S),
            batching=BatchingConfig(
                max_batch_size=2, max_enqueued_batches=1, batch_timeout_micros=1
            ),
        )
    )
    server.start()
    try:
        assert server.wait_until_ready(60)
        wait_for(lambda: set(server.models.available()) == {"half", "words", "hungry"})
        wait_for(lambda: all(server.models.available().values()))
        yield server
    finally:
        server.stop()


class Gate:
    """Stands before the runs of a real model."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self, name: str, arrays: Sequence[Any]) -> Any:
        self.entered.release()
        assert self.opened.wait(60)
        return self._run(name, arrays)


@pytest.fixture
def gate(small: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    with small.models.get("half").use() as (_, batcher):
        found = Gate(batcher._model.run)
        monkeypatch.setattr(batcher._model, "run", found)
    yield found
    found.opened.set()


@pytest.fixture
def stub(small: Server) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{small.grpc_port}") as channel:
        yield prediction_service_pb2_grpc.PredictionServiceStub(channel)


@pytest.fixture
def pool(gate: Gate) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as opened:
        yield opened
        gate.opened.set()


def wait_for(claim: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not claim():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.005)


def predicting(value: float) -> predict_pb2.PredictRequest:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "half"
    request.inputs["x"].CopyFrom(tf.make_tensor_proto([[value]]))
    return request


def by_grpc(stub: Any, value: float) -> float:
    return float(stub.Predict(predicting(value), timeout=60).outputs["y"].float_val[0])


def by_rest(server: Server, ask_at: AskAt, value: float) -> float:
    answer = ask_at(server.rest_port, HALF, {"instances": [[value]]})
    assert answer.status == 200, answer.body
    return float(answer.json()["predictions"][0][0])


def waiting(server: Server) -> int:
    """Requests in the queue of the model, after the one that runs."""
    with server.models.get("half").use() as (_, batcher):
        return len(batcher._queues["serving_default"]._waiting)


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, caught.value.details()


def test_a_full_queue_is_503_with_retry_after_and_unavailable(
    small: Server, gate: Gate, pool: ThreadPoolExecutor, stub: Any, ask_at: AskAt
) -> None:
    """One request runs, two fill the queue; the fourth is refused, and the three are answered."""
    first = pool.submit(by_rest, small, ask_at, 0.0)
    assert gate.entered.acquire(timeout=60)
    others: list[Future[float]] = []
    for value in (2.0, 4.0):
        others.append(pool.submit(by_grpc, stub, value))
        wait_for(lambda: waiting(small) == len(others))

    answer = ask_at(small.rest_port, HALF, {"instances": [[6.0]]})
    refused = refusal(lambda: by_grpc(stub, 6.0))
    gate.opened.set()

    assert (answer.status, answer.json()) == (503, {"error": FULL})
    assert answer.headers["retry-after"] == "1"
    assert refused == ("UNAVAILABLE", FULL)
    assert [one.result(60) for one in (first, *others)] == [2.0, 3.0, 4.0]
    assert by_rest(small, ask_at, 6.0) == by_grpc(stub, 6.0) == 5.0


def test_too_many_calls_under_way_are_resource_exhausted(
    small: Server, gate: Gate, pool: ThreadPoolExecutor, stub: Any, ask_at: AskAt
) -> None:
    """Each protocol has its own number: REST has room meanwhile."""
    calls: list[Future[float]] = [pool.submit(by_grpc, stub, 0.0)]
    assert gate.entered.acquire(timeout=60)
    for value in (2.0, 4.0):
        calls.append(pool.submit(by_grpc, stub, value))
        wait_for(lambda: waiting(small) == len(calls) - 1)

    refused = refusal(lambda: by_grpc(stub, 6.0))
    large = predict_pb2.PredictRequest()
    large.model_spec.name = "half"
    large.inputs["x"].CopyFrom(tf.make_tensor_proto(np.zeros([1 << 13, 1], np.float32)))
    assert refusal(lambda: stub.Predict(large, timeout=60)) == refused
    with grpc.insecure_channel(f"127.0.0.1:{small.grpc_port}") as channel:
        question = get_model_status_pb2.GetModelStatusRequest()
        question.model_spec.name = "half"
        models = model_service_pb2_grpc.ModelServiceStub(channel)
        states = models.GetModelStatus(question, timeout=60).model_version_status
        assert [each.state for each in states] == [State.AVAILABLE]
        question.model_spec.name = "none"
        assert refusal(lambda: models.GetModelStatus(question, timeout=60))[0] == "NOT_FOUND"
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=60).status == 1, "SERVING"
    answer = ask_at(small.rest_port, "/v1/models/words:predict", {"instances": ["cash"]})
    gate.opened.set()

    assert refused == ("RESOURCE_EXHAUSTED", "Concurrent RPC limit exceeded!")
    counted = 'stoker_request_count{model_name="half",version="",status="RESOURCE_EXHAUSTED"} 2'
    assert counted in ask_at(small.rest_port, METRICS_PATH).body, "alerts see it"
    assert answer.status == 200
    assert [call.result(60) for call in calls] == [2.0, 3.0, 4.0]
    assert by_grpc(stub, 6.0) == 5.0


def test_the_latency_of_an_objective_has_the_wait_for_a_thread(
    small: Server, gate: Gate, pool: ThreadPoolExecutor, ask_at: AskAt
) -> None:
    gate.opened.set()

    def seconds() -> float:
        text = ask_at(small.rest_port, METRICS_PATH).body
        name = 'stoker_request_latency_sum{model_name="half",version="1"} '
        return sum(float(x.removeprefix(name)) for x in text.splitlines() if name in x) / 1e6

    by_rest(small, ask_at, 0.0)
    before_s, free = seconds(), threading.Event()
    for _ in range(small._app.options.workers):
        small._app._threads.submit(free.wait, 60)
    waiting = pool.submit(by_rest, small, ask_at, 2.0)
    wait_for(lambda: small.plane.metrics.requests_without_thread.total() == 1)
    assert ask_at(small.rest_port, "/v1/models/half").status == 200, (
        "a health check needs no thread"
    )
    time.sleep(0.3)  # the wait that has to be counted
    free.set()

    assert waiting.result(60) == 3.0
    assert seconds() - before_s >= 0.3


@pytest.mark.parametrize("protocol", ["REST", pytest.param("gRPC", marks=pytest.mark.soak)])
def test_a_model_without_memory_is_429_with_retry_after_and_resource_exhausted(
    small: Server, stub: Any, ask_at: AskAt, protocol: str
) -> None:
    """TensorFlow waits 10 s for memory, one request after the other."""
    path = "/v1/models/hungry:predict"
    if protocol == "REST":
        answer = ask_at(small.rest_port, path, {"instances": [MAX]})
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    else:
        request = predict_pb2.PredictRequest()
        request.model_spec.name = "hungry"
        request.inputs["n"].CopyFrom(tf.make_tensor_proto(np.array([MAX], np.int64)))
        assert refusal(lambda: stub.Predict(request, timeout=60))[0] == "RESOURCE_EXHAUSTED"
    found = ask_at(small.rest_port, path, {"instances": [3]})
    assert found.json() == {"predictions": [3.0]}


def connections(server: Server) -> int:
    return len(server._rest.server_state.connections)


def test_a_client_that_asks_for_much_and_reads_nothing_is_cut_while_others_are_answered(
    small: Server, ask_at: AskAt
) -> None:
    text = b"x" * (LARGE_BYTES * 3 // 4)
    body = b'{"instances": ["' + text + b'"]}'
    head = b"POST /v1/models/words:predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    wait_for(lambda: connections(small) == 0)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", small.rest_port))
        began_s = time.monotonic()
        client.sendall(head % len(body) + body)
        first = client.recv(1, socket.MSG_PEEK)  # the answer has begun, and is left where it is
        assert by_rest(small, ask_at, 1.0) == 2.5
        while connections(small):
            assert time.monotonic() - began_s < 60, "it is not cut"
            assert by_rest(small, ask_at, 1.0) == 2.5
            wait_for(lambda: connections(small) <= 1)
        took_s = time.monotonic() - began_s
        found = b""
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(1 << 20):
                found += piece

    assert first == b"H"
    assert took_s >= SEND_S, "a client that is slow for a moment is not cut"
    announced = int(found.split(b"content-length: ")[1].split(b"\r\n")[0])
    assert announced > LARGE_BYTES
    assert len(found) < announced
    assert by_rest(small, ask_at, 1.0) == 2.5


def test_a_client_that_reads_slowly_but_steadily_gets_all_of_a_large_answer(small: Server) -> None:
    """In twice the time that a client may leave an answer unread: each part of it is read in time."""
    body = b'{"instances": ["' + b"x" * (LARGE_BYTES * 3 // 4) + b'"]}'
    head = b"POST /v1/models/words:predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    steps = 20
    with socket.create_connection(("127.0.0.1", small.rest_port), timeout=60) as client:
        client.sendall(head % len(body) + body)
        found = client.recv(1 << 16)
        announced = len(found.split(b"\r\n\r\n")[0]) + 4
        announced += int(found.split(b"content-length: ")[1].split(b"\r\n")[0])
        got = len(found)
        for step in range(1, steps + 1):
            while got < announced * step // steps:
                piece = client.recv(1 << 20)
                assert piece, f"it was cut in step {step}"
                got += len(piece)
            time.sleep(SEND_S / 10)  # a slow reader, faster than the server's limit
    assert got == announced


def test_a_client_that_reads_a_large_answer_gets_all_of_it(server: Server, ask_at: AskAt) -> None:
    text = "x" * (LARGE_BYTES * 3 // 4)

    answer = ask_at(server.rest_port, "/v1/models/words:predict", {"instances": [text]})

    assert len(json.loads(answer.body)["predictions"][0]["raw_bytes"]["b64"]) == LARGE_BYTES
