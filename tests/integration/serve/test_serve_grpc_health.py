"""Health, reflection, deadlines and cancellation by gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

from stoker.registry.repository import Repository
from stoker.serve.config import ServeConfig
from stoker.serve.process.server import Server


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as opened:
        yield opened


def check(channel: grpc.Channel, service: str) -> str:
    request = health_pb2.HealthCheckRequest(service=service)
    answer = health_pb2_grpc.HealthStub(channel).Check(request)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def test_the_server_its_services_and_each_model_are_healthy(channel: grpc.Channel) -> None:
    names = ("", "tensorflow.serving.PredictionService", "half_plus_two")

    assert [check(channel, name) for name in names] == ["SERVING"] * 3
    with pytest.raises(grpc.RpcError) as caught:
        check(channel, "nope")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_the_health_of_all_is_listed(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)

    listed = stub.List(health_pb2.HealthListRequest()).statuses

    serving = health_pb2.HealthCheckResponse.SERVING
    names = {"", "tensorflow.serving.PredictionService", "half_plus_two"}
    assert names <= set(listed)
    assert {listed[name].status for name in names} == {serving}


def test_reflection_lists_the_services_and_cannot_take_all_threads(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    listing = reflection_pb2.ServerReflectionRequest(list_services="")

    (answer,) = stub.ServerReflectionInfo(iter([listing]))

    listed = {service.name for service in answer.list_services_response.service}
    assert "tensorflow.serving.PredictionService" in listed
    assert "grpc.health.v1.Health" in listed
    never = threading.Event()

    def hold() -> Iterator[Any]:
        yield listing
        never.wait(30)

    streams = [stub.ServerReflectionInfo(hold()) for _ in range(12)]
    codes = []
    for stream in streams:
        try:
            next(stream)
        except grpc.RpcError as error:
            codes.append(error.code())
    assert len(codes) >= 10
    assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert check(channel, "") == "SERVING"
    never.set()
    for stream in streams:
        stream.cancel()


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of one model that counts to its input: seconds of work on demand."""
    from tests.integration.serve.conftest import export

    def count(steps: tf.Tensor) -> dict[str, tf.Tensor]:
        def body(number: Any) -> Any:
            return tf.where(number < steps, number + 1, number)

        found = tf.while_loop(
            lambda n: tf.reduce_any(n < steps), body, [tf.zeros_like(steps)], parallel_iterations=1
        )
        return {"counted": found[0] if isinstance(found, list | tuple) else found}

    folder = tmp_path_factory.mktemp("slow")
    path = export(folder / "export", count, [tf.TensorSpec([None], tf.int64, name="steps")])
    repository = Repository(folder / "models")
    repository.push(path, "slow")
    running = Server(
        ServeConfig(
            root=repository.root,
            rest_port=0,
            grpc_port=0,
            poll_s=0.1,
            lame_duck_s=0.0,
            drain_s=5,
            rest_timeout_s=0.2,
        )
    )
    running.start()
    try:
        assert running.wait_until_ready(60)
        yield running
    finally:
        running.stop()


def steps(*numbers: int) -> predict_pb2.PredictRequest:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "slow"
    request.inputs["steps"].CopyFrom(tf.make_tensor_proto(np.array(numbers, np.int64)))
    return request


def runs(server: Server) -> float:
    return server.plane.metrics.wrapped_run_count.total()


def wait_for(claim: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not claim():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.005)


def test_a_rest_request_that_waits_too_long_gets_504_and_is_never_run(
    slow: Server, ask_at: Callable[..., Any]
) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{slow.grpc_port}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        before = runs(slow)
        work = 200_000
        late = None
        while late is None or late.status == 200:  # until the model runs longer than it may wait
            ahead = runs(slow)
            long = stub.Predict.future(steps(work))
            wait_for(lambda ahead=ahead: runs(slow) > ahead)  # type: ignore[misc] # bound now
            late = ask_at(slow.rest_port, "/v1/models/slow:predict", {"instances": [5]})
            assert list(long.result().outputs["counted"].int64_val) == [work]
            work *= 2

    assert late.status == 504
    assert "Deadline exceeded" in late.json()["error"]
    assert runs(slow) > before


def test_deadlines_and_cancellation_drop_what_waits_and_nothing_else(slow: Server) -> None:
    with (
        grpc.insecure_channel(f"127.0.0.1:{slow.grpc_port}") as channel,
        ThreadPoolExecutor(4) as pool,
    ):
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        rest_s, work = 0.0, 20_000
        while rest_s < 0.3:  # a model that runs long enough for others to wait behind it
            begun_s = time.monotonic()
            stub.Predict(steps(work))
            rest_s, work = time.monotonic() - begun_s, work * 3
        before = runs(slow)

        long = pool.submit(stub.Predict, steps(work))
        wait_for(lambda: runs(slow) == before + 1)
        with pytest.raises(grpc.RpcError) as late:
            stub.Predict(steps(5), timeout=0.05)
        cancelled = stub.Predict.future(steps(6))
        queue = next(iter(slow.models.get("slow")._available.values()))._model._queues  # type: ignore[union-attr] # loaded
        wait_for(lambda: len(queue["serving_default"]._waiting) == 1)
        cancelled.cancel()
        wait_for(lambda: len(queue["serving_default"]._waiting) == 0)
        mate = pool.submit(stub.Predict, steps(7))

        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert list(long.result(60).outputs["counted"].int64_val) == [work]
        assert list(mate.result(60).outputs["counted"].int64_val) == [7]
        assert runs(slow) == before + 2


def test_health_turns_when_the_server_ends(exported: dict[str, Path], tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.push(exported["half_plus_two"], "half")
    running = Server(
        ServeConfig(root=tmp_path, rest_port=0, grpc_port=0, poll_s=0.1, lame_duck_s=0.5)
    )
    running.start()
    stopped = False
    try:
        assert running.wait_until_ready(60)
        with grpc.insecure_channel(f"127.0.0.1:{running.grpc_port}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            ending = threading.Thread(target=running.stop)
            ending.start()
            stopped = True
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
            ending.join(30)
    finally:
        if not stopped:
            running.stop()
