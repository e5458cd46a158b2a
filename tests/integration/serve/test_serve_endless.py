"""A model that never ends, or wants all memory, is its clients' trouble alone: real processes, real loops."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc
from tests.integration.serve.conftest import ask_port, export

from stoker.core.errors import ConfigError
from stoker.registry.exported_model import load_model
from stoker.registry.repository import Repository
from stoker.serve.batching.batcher import Batcher
from stoker.serve.batching.config import BatchingConfig
from stoker.serve.config import ServeConfig
from stoker.serve.deadline import Deadline
from stoker.serve.errors import Code, ServeError
from stoker.serve.loading.endless_loops import may_not_end
from stoker.serve.loading.saved_model import read_saved_model
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.process.server import Server
from stoker.serve.process.workers import WorkerEndedError, run_workers
from stoker.serve.runtime.stuck_call_watchdog import StuckCallWatchdog

ROWS = [tf.TensorSpec([None], tf.int64, name="n")]


def counts(path: Path) -> Path:
    """Counts every row up from 0 to n; a row below 0 for ever."""

    def call(n: tf.Tensor) -> dict[str, tf.Tensor]:
        def goes_on(i: tf.Tensor) -> tf.Tensor:
            return tf.reduce_any((i < n) | (n < 0))

        zeros = tf.zeros_like(n)
        (last,) = tf.while_loop(goes_on, lambda i: [tf.where(i < n, i + 1, i)], [zeros])
        return {"counted": last}

    return export(path, call, ROWS)


def hungry(path: Path) -> Path:
    """Takes 4 bytes times the largest n."""

    def call(n: tf.Tensor) -> dict[str, tf.Tensor]:
        ones = tf.fill([tf.reduce_max(n)], 1.0)
        return {"sum": tf.cast(n, tf.float32) * 0.0 + tf.reduce_sum(ones)}

    return export(path, call, ROWS)


@pytest.fixture(scope="module")
def repository(exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Repository:
    folder = tmp_path_factory.mktemp("endless")
    found = Repository(folder / "models")
    found.push(counts(folder / "counts"), "counts")
    found.push(hungry(folder / "hungry"), "hungry")
    found.push(exported["half_plus_two"], "half")
    return found


def stub_of(port: int) -> tuple[grpc.Channel, Any]:
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])
    return channel, prediction_service_pb2_grpc.PredictionServiceStub(channel)


def counting(n: int) -> predict_pb2.PredictRequest:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "counts"
    request.inputs["n"].CopyFrom(tf.make_tensor_proto(np.array([n], np.int64)))
    return request


def wait_for(claim: Callable[[], bool], *, what: str) -> None:
    end_s = time.monotonic() + 90
    while not claim():
        assert time.monotonic() < end_s, what
        time.sleep(0.05)


def replaced(port: int) -> float:
    lines = ask_port(port, "/monitoring/prometheus/metrics").body.splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("stoker_workers_replaced{"))


def worker_of(port: int) -> str:
    lines = ask_port(port, "/monitoring/prometheus/metrics").body.splitlines()
    found = [x for x in lines if x.startswith("stoker_worker_pid{") and "parent" not in x]
    return " ".join(sorted(line.split()[-1] for line in found))


def test_an_endless_call_gets_504_and_its_worker_is_replaced_while_other_models_answer(
    repository: Repository,
) -> None:
    """One worker: it serves on with its loop until the next one is ready."""
    command = [sys.executable, "-m", "stoker", "serve", str(repository.root), "--json"]
    command += ["--port=0", "--rest_api_port=0", "--max-run-s=1.5"]
    command += ["--rest_api_timeout_in_ms=500"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stdout is not None
            assert running.stderr is not None
            said = json.loads(running.stdout.readline())
            port = said["rest_port"]
            assert ask_port(port, "/v1/models/counts:predict", {"inputs": [7]}).json() == {
                "outputs": [7]
            }
            first = worker_of(port)
            answers: list[tuple[int, str]] = []
            over = threading.Event()

            def load() -> None:
                while not over.is_set():
                    answer = ask_port(port, "/v1/models/half:predict", {"inputs": [[2.0]]})
                    answers.append((answer.status, answer.body))

            client = threading.Thread(target=load)
            client.start()
            endless = ask_port(port, "/v1/models/counts:predict", {"inputs": [-1]})
            assert endless.status == 504
            channel, stub = stub_of(said["grpc_port"])
            with pytest.raises(grpc.RpcError) as waits:  # no deadline of its own
                stub.Predict(counting(3))
            assert waits.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            channel.close()

            wait_for(lambda: replaced(port) == 1, what="it is not replaced")
            wait_for(lambda: worker_of(port) not in ("", first), what="none follows")
            wait_for(
                lambda: ask_port(port, "/v1/models/counts:predict", {"inputs": [5]}).status == 200,
                what="the model does not answer again",
            )
            before = len(answers)
            wait_for(lambda: len(answers) > before, what="the other model does not answer")
            over.set()
            client.join(60)
            assert set(answers) == {(200, '{"outputs": [[3.0]]}')}
            assert ask_port(port, "/v1/models/counts:predict", {"inputs": [-1]}).status == 504
            running.send_signal(signal.SIGTERM)  # with a loop under way
            assert running.wait(60) == 0
            assert "Traceback" not in running.stderr.read().replace("tf.errors", "")
        finally:
            if running.poll() is None:
                running.terminate()
                running.wait(60)


@pytest.mark.soak
def test_a_model_that_wants_too_much_memory_is_refused_it_and_the_others_answer(
    repository: Repository,
) -> None:
    command = [sys.executable, "-m", "stoker", "serve", str(repository.root), "--json"]
    command += ["--port=0", "--rest_api_port=0", "--max-run-s=0", "--max-memory-mb=6000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as running:
        try:
            assert running.stdout is not None
            said = json.loads(running.stdout.readline())
            port, refused = said["rest_port"], []

            def want() -> None:  # TensorFlow waits 10 s whether others give memory back
                too_much = {"inputs": [1 << 32]}  # 16 GiB
                refused.append(ask_port(port, "/v1/models/hungry:predict", too_much).status)

            client = threading.Thread(target=want)
            client.start()
            half = [
                ask_port(port, "/v1/models/half:predict", {"inputs": [[2.0]]}).status
                for _ in range(20)
            ]
            assert set(half) == {200}
            client.join(60)
            assert refused == [429]
            assert ask_port(port, "/v1/models/hungry:predict", {"inputs": [10]}).status == 200
            assert said["pid"] == running.pid
        finally:
            running.terminate()
            assert running.wait(60) == 0


@pytest.fixture
def batcher(repository: Repository) -> Iterator[Callable[..., tuple[Batcher, StuckCallWatchdog]]]:
    """A batcher over the model that counts."""
    made: list[StuckCallWatchdog] = []

    def make(**more: Any) -> tuple[Batcher, StuckCallWatchdog]:
        runs = StuckCallWatchdog(max_run_s=more.pop("max_run_s", 60.0))
        made.append(runs)
        model = load_model(repository.base("counts") / "1")
        return Batcher(model, BatchingConfig(**more), runs=runs, may_not_end=True), runs

    yield make
    for runs in made:
        runs.close()


def ask(batcher: Batcher, n: int, deadline: Deadline | None = None) -> list[int]:
    inputs = {"n": np.array([n], np.int64)}
    return batcher.call("serving_default", inputs, deadline=deadline or Deadline())[
        "counted"
    ].tolist()


@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_run_apart_is_answered_joined_and_refused_as_ever(
    batcher: Callable[..., tuple[Batcher, StuckCallWatchdog]], enabled: bool
) -> None:
    one, _ = batcher(enabled=enabled)
    answers: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda n=n: answers.update({n: ask(one, n)})) for n in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert answers == {n: [n] for n in range(40)}
    with pytest.raises(Exception, match="must be int64"):
        one.call("serving_default", {"n": np.array(["x"])}, deadline=Deadline())


@pytest.fixture(scope="module")
def turns_a_s(repository: Repository) -> float:
    """How often the loop turns in a second: a loop that burns a core must still end, and soon."""
    runs = StuckCallWatchdog(max_run_s=60.0)
    model = load_model(repository.base("counts") / "1")
    one = Batcher(model, BatchingConfig(), runs=runs, may_not_end=True)
    ask(one, 1)
    begun_s = time.monotonic()
    ask(one, 50_000)
    runs.close()
    return 50_000 / (time.monotonic() - begun_s)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_client_waits_as_long_as_he_will_whatever_the_model_does(
    batcher: Callable[..., tuple[Batcher, StuckCallWatchdog]], enabled: bool, turns_a_s: float
) -> None:
    one, runs = batcher(enabled=enabled)
    long = int(4 * turns_a_s)
    with pytest.raises(ServeError) as error:
        ask(one, long, Deadline(0.05))
    assert error.value.code is Code.DEADLINE_EXCEEDED
    leaving = Deadline()
    threading.Timer(0.1, leaving.cancel).start()
    with pytest.raises(ServeError) as error:
        ask(one, long + 1, leaving)
    assert error.value.code is Code.CANCELLED
    assert ask(one, 3) == [3]  # after the two that may end
    assert not runs.stuck


def test_all_requests_that_wait_for_a_stuck_run_get_an_error_and_new_ones_are_refused(
    batcher: Callable[..., tuple[Batcher, StuckCallWatchdog]], turns_a_s: float
) -> None:
    one, runs = batcher(max_run_s=0.3)
    codes: list[Code] = []

    def client(n: int) -> None:
        with pytest.raises(ServeError) as error:
            ask(one, n)
        codes.append(error.value.code)

    stuck = int(4 * turns_a_s)
    threads = [threading.Thread(target=client, args=(n,)) for n in (stuck, 1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert codes == [Code.DEADLINE_EXCEEDED] * 3
    assert runs.stuck
    with pytest.raises(ServeError, match="takes longer than the server allows"):
        ask(one, 1)


def test_only_what_loops_may_not_end(repository: Repository, exported: dict[str, Path]) -> None:
    assert may_not_end(read_saved_model(repository.base("counts") / "1"))
    assert may_not_end(read_saved_model(exported["image"]))  # map_fn
    assert not may_not_end(read_saved_model(exported["half_plus_two"]))
    assert not may_not_end(read_saved_model(exported["words"]))


def test_a_rest_client_that_hangs_up_leaves_the_queue(
    repository: Repository, turns_a_s: float
) -> None:
    config = ServeConfig(
        root=repository.root, rest_port=0, grpc_port=0, poll_s=0.1, lame_duck_s=0.0, drain_s=5
    )
    server = Server(config)
    server.start()
    try:
        assert server.wait_until_ready(60)
        metrics: ServeMetrics = server.plane.metrics

        def hang(n: int) -> socket.socket:
            client = socket.create_connection(("127.0.0.1", server.rest_port))
            body = json.dumps({"inputs": [n]})
            head = f"POST /v1/models/counts:predict HTTP/1.1\r\nContent-Length: {len(body)}"
            client.sendall(f"{head}\r\n\r\n{body}".encode())
            return client

        def waiting() -> float:
            return metrics.queued_requests.total()

        first = hang(int(8 * turns_a_s))
        wait_for(lambda: waiting() == 1, what="the first does not run")
        second = hang(2)
        wait_for(lambda: waiting() == 2, what="the second does not wait")
        second.close()
        wait_for(lambda: waiting() == 1, what="the second waits on")
        first.close()
        wait_for(lambda: waiting() == 0, what="the first waits on")
        lines = metrics.exposition()
        assert 'request_count{model_name="counts",status="CANCELLED"} 2' in lines
    finally:
        server.stop()


def test_a_unix_socket_is_of_one_worker_and_no_time_is_below_0(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="belongs to one worker"):
        ServeConfig(models={"m": tmp_path}, grpc_socket_path="/tmp/x", workers=2)
    with pytest.raises(ConfigError, match="max_run_s must not be below 0"):
        ServeConfig(models={"m": tmp_path}, max_run_s=-1)


def test_a_worker_that_cannot_start_ends_the_server_with_its_own_code(tmp_path: Path) -> None:
    config = ServeConfig(models={"m": tmp_path}, rest_port=0, grpc_port=0)
    with pytest.raises(WorkerEndedError) as error:
        run_workers(config, [sys.executable, "-c", "import sys; sys.exit(2)"])
    assert error.value.code == 2


def test_a_port_of_another_server_is_not_shared_with_it(tmp_path: Path) -> None:
    """Even if the other one shares the port: it may be an older server of the same user."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        config = ServeConfig(models={"m": tmp_path}, rest_port=holder.getsockname()[1], grpc_port=0)
        with pytest.raises(ConfigError, match="must be free"):
            run_workers(config, [sys.executable, "-c", ""])
