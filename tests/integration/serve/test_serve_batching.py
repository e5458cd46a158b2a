"""Requests that are joined: right answers, no mixing, and each one's fault his own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from stoker.core.errors import ConfigError, UserError
from stoker.registry.exported_model import load_model
from stoker.serve.batching.batcher import Batcher
from stoker.serve.batching.config import BatchingConfig, read_batching_parameters
from stoker.serve.batching.joined import Array, Outputs, TooLongError, join
from stoker.serve.batching.queue import COMPARED_WITH_SINGLE, Queue, Request
from stoker.serve.deadline import Deadline
from stoker.serve.errors import Code, ServeError
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.process.server import Server


class Gate:
    """A model whose runs the test starts one by one; it doubles, and refuses 13."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.entered = threading.Semaphore(0)
        self.through = threading.Semaphore(0)
        self.closed = True

    def __call__(self, inputs: Sequence[Array]) -> Outputs:
        self.sizes.append(len(inputs[0]))
        if self.closed:
            self.entered.release()
            assert self.through.acquire(timeout=30)
        if 13 in inputs[0]:
            raise UserError("no 13")
        return {"y": inputs[0] * 2}


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as opened:
        yield opened


def queue_of(gate: Gate, **limits: Any) -> Queue:
    return Queue(gate, BatchingConfig(**limits), name="m", metrics=ServeMetrics())


def request(*values: float, deadline: Deadline | None = None) -> Request:
    array = np.array(values)
    return Request(
        inputs=[array], rows=len(array), key=(("float64", ()),), deadline=deadline or Deadline()
    )


def wait_for(claim: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not claim():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.001)


def held_up(
    gate: Gate, queue: Queue, pool: ThreadPoolExecutor, *requests: Request
) -> tuple[Any, list[Any]]:
    """One request inside the model, and the others waiting behind it, in their order."""
    first = pool.submit(queue.submit, request(1.0))
    assert gate.entered.acquire(timeout=30)
    others = []
    for number, waiting in enumerate(requests, start=1):
        others.append(pool.submit(queue.submit, waiting))
        wait_for(lambda number=number: len(queue._waiting) == number)  # type: ignore[misc] # bound now
    return first, others


def let_all_through(gate: Gate) -> None:
    gate.closed = False
    gate.through.release(100)


def test_a_request_that_finds_the_model_idle_runs_at_once_and_alone(gate: Gate) -> None:
    gate.closed = False
    queue = queue_of(gate)

    assert queue.submit(request(3.0))["y"].tolist() == [6.0]
    assert gate.sizes == [1]


def test_what_came_while_the_model_ran_is_run_as_one(gate: Gate, pool: ThreadPoolExecutor) -> None:
    queue = queue_of(gate)
    first, others = held_up(gate, queue, pool, request(2.0), request(3.0, 4.0), request(5.0))
    let_all_through(gate)

    assert first.result(30)["y"].tolist() == [2.0]
    assert [o.result(30)["y"].tolist() for o in others] == [[4.0], [6.0, 8.0], [10.0]]
    assert gate.sizes == [1, 4, 1, 2, 1]  # the first joined one is held against single runs
    assert (queue._running, len(queue._waiting)) == (0, 0)


def test_only_the_first_joined_batches_are_run_singly_too(
    gate: Gate, pool: ThreadPoolExecutor
) -> None:
    queue = queue_of(gate)
    for _ in range(COMPARED_WITH_SINGLE + 1):
        gate.closed = True
        _, others = held_up(gate, queue, pool, request(2.0), request(3.0))
        let_all_through(gate)
        assert [o.result(30)["y"].tolist() for o in others] == [[4.0], [6.0]]
        wait_for(lambda: queue._running == 0)
        gate.through = threading.Semaphore(0)

    assert gate.sizes == [1, 2, 1, 1] * COMPARED_WITH_SINGLE + [1, 2]


def test_one_bad_row_fails_its_owner_alone(gate: Gate, pool: ThreadPoolExecutor) -> None:
    queue = queue_of(gate)
    _, others = held_up(gate, queue, pool, request(2.0), request(13.0), request(5.0))
    let_all_through(gate)

    assert others[0].result(30)["y"].tolist() == [4.0]
    assert others[2].result(30)["y"].tolist() == [10.0]
    with pytest.raises(UserError, match="no 13"):
        others[1].result(30)


def test_a_batch_has_no_more_rows_than_it_may(gate: Gate, pool: ThreadPoolExecutor) -> None:
    queue = queue_of(gate, max_batch_size=3)
    _, others = held_up(gate, queue, pool, *[request(float(n), float(n)) for n in range(3)])
    let_all_through(gate)

    assert [o.result(30)["y"].tolist() for o in others] == [[0, 0], [2, 2], [4, 4]]
    assert gate.sizes == [1, 2, 2, 2]


def test_a_full_queue_refuses_in_tensorflow_servings_words(
    gate: Gate, pool: ThreadPoolExecutor
) -> None:
    queue = queue_of(gate, max_batch_size=2, max_enqueued_batches=1)
    first, others = held_up(gate, queue, pool, request(2.0), request(3.0))

    with pytest.raises(ServeError, match=r"batch scheduling queue .* is full") as caught:
        queue.submit(request(4.0))
    let_all_through(gate)

    assert caught.value.code is Code.UNAVAILABLE
    assert [o.result(30)["y"].tolist() for o in (first, *others)] == [[2.0], [4.0], [6.0]]


def test_a_request_whose_time_is_over_is_dropped_and_never_run(
    gate: Gate, pool: ThreadPoolExecutor
) -> None:
    queue = queue_of(gate)
    impatient = request(7.0, 7.0, 7.0, deadline=Deadline(0.05))
    first = pool.submit(queue.submit, request(1.0))
    assert gate.entered.acquire(timeout=30)
    late = pool.submit(queue.submit, impatient)
    with pytest.raises(ServeError) as caught:
        late.result(30)
    let_all_through(gate)

    assert caught.value.code is Code.DEADLINE_EXCEEDED
    assert first.result(30)["y"].tolist() == [2.0]
    assert gate.sizes == [1]


def test_a_request_that_is_cancelled_leaves_the_queue_and_its_mates_stay(
    gate: Gate, pool: ThreadPoolExecutor
) -> None:
    queue = queue_of(gate)
    leaver = Deadline()
    _, others = held_up(gate, queue, pool, request(2.0, deadline=leaver), request(3.0))
    leaver.cancel()
    with pytest.raises(ServeError) as caught:
        others[0].result(30)
    let_all_through(gate)

    assert caught.value.code is Code.CANCELLED
    assert others[1].result(30)["y"].tolist() == [6.0]
    assert gate.sizes == [1, 1]


def test_a_configured_timeout_waits_for_requests_until_the_batch_is_full(
    gate: Gate, pool: ThreadPoolExecutor
) -> None:
    gate.closed = False
    queue = queue_of(gate, max_batch_size=2, batch_timeout_micros=20_000_000)

    answers = list(pool.map(queue.submit, [request(1.0), request(2.0)]))

    assert [a["y"].tolist() for a in answers] == [[2.0], [4.0]]
    assert gate.sizes[0] == 2


def test_a_batch_is_padded_to_an_allowed_size_and_answers_have_no_padding(gate: Gate) -> None:
    gate.closed = False
    queue = queue_of(gate, max_batch_size=8, allowed_batch_sizes=(4, 8))

    assert queue.submit(request(1.0, 2.0, 3.0))["y"].tolist() == [2.0, 4.0, 6.0]
    assert gate.sizes[0] == 4


def test_joined_answers_that_differ_switch_joining_off_with_a_warning(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()

    def shares(inputs: Sequence[Array]) -> Outputs:
        gate(inputs)
        return {"y": inputs[0] / inputs[0].sum()}

    queue = Queue(shares, BatchingConfig(), name="m", metrics=None)
    with caplog.at_level(logging.WARNING):
        _, others = held_up(gate, queue, pool, request(2.0), request(3.0))
        let_all_through(gate)
        answers = [o.result(30)["y"].tolist() for o in others]

    assert answers == [[1.0], [1.0]]
    assert not queue.joins
    assert "no longer joined" in caplog.text


def test_many_threads_get_each_his_own(pool: ThreadPoolExecutor) -> None:
    gate = Gate()
    gate.closed = False
    queue = queue_of(gate, max_batch_size=16, num_batch_threads=2)

    def ask(number: int) -> bool:
        return queue.submit(request(float(number), -number))["y"].tolist() == [
            2.0 * number,
            -2.0 * number,
        ]

    assert all(pool.map(ask, range(100, 3100)))
    assert (queue._running, len(queue._waiting)) == (0, 0)


def test_a_model_pads_variable_lengths_only_if_configured(
    exported: dict[str, Path], pool: ThreadPoolExecutor
) -> None:
    """The sums of rows of other lengths, each padded by its first value where the flag is set."""
    model = Batcher(
        load_model(exported["sums"]),
        BatchingConfig(
            pad_variable_length_inputs=True, max_batch_size=2, batch_timeout_micros=20_000_000
        ),
    )
    try:
        rows = [np.array([[1.0, 1.0]], np.float32), np.array([[2.0, 2.0, 2.0]], np.float32)]
        answers = list(pool.map(lambda x: model.call("serving_default", {"x": x}), rows))
    finally:
        model.close()

    assert [a["sum"].tolist() for a in answers] == [[3.0], [6.0]]


def test_one_long_request_does_not_make_all_others_as_long() -> None:
    short, long = np.zeros((100, 1), np.float32), np.zeros((1, 1 << 20), np.float32)

    with pytest.raises(TooLongError):
        join([[short], [long]], size=101)


def test_a_larger_request_runs_alone_in_pieces_or_not_at_all(exported: dict[str, Path]) -> None:
    loaded = load_model(exported["half_plus_two"])
    x = np.arange(5, dtype=np.float32)[:, None]
    try:
        alone = BatchingConfig(max_batch_size=2, larger="alone")
        split = BatchingConfig(max_batch_size=2, larger="split")
        for config, runs in ((alone, 1), (split, 3)):
            metrics = ServeMetrics()
            model = Batcher(loaded, config, metrics=metrics)
            answer = model.call("serving_default", {"x": x})
            assert answer["y"][:, 0].tolist() == [2.0, 2.5, 3.0, 3.5, 4.0]
            assert metrics.wrapped_run_count.total() == runs
            assert metrics.processed_batch_size.total() == len(x), "every row is counted"
        refusing = Batcher(loaded, BatchingConfig(max_batch_size=2, larger="refuse"))
        with pytest.raises(ServeError, match="Task size 5 is larger than maximum input batch"):
            refusing.call("serving_default", {"x": x})
    finally:
        loaded.close()


def test_every_allowed_size_is_run_before_the_first_request(
    exported: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(exported["half_plus_two"])
    seen: list[int] = []
    call = loaded.call

    def watched(name: str, inputs: Any) -> Any:
        seen.append(len(inputs["x"]))
        return call(name, inputs)

    monkeypatch.setattr(loaded, "call", watched)  # watched, not replaced: it runs the model
    try:
        Batcher(loaded, BatchingConfig(max_batch_size=8, allowed_batch_sizes=(2, 8))).warm_up()
    finally:
        loaded.close()

    assert seen == [2, 8]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"max_batch_size": 1000, "larger": "refuse", "batch_timeout_micros": 0}),
        ("max_batch_size { value: 32 }", {"max_batch_size": 32}),
        ("batch_timeout_micros { value: 100 }", {"batch_timeout_micros": 100}),
        (
            "num_batch_threads { value: 4 } thread_pool_name { value: 'p' }",
            {"num_batch_threads": 4},
        ),
        ("max_enqueued_batches { value: 7 }", {"max_enqueued_batches": 7}),
        (
            "max_batch_size { value: 4 } allowed_batch_sizes: 2 allowed_batch_sizes: 4",
            {"allowed_batch_sizes": (2, 4)},
        ),
        ("pad_variable_length_inputs: true", {"pad_variable_length_inputs": True}),
        ("enable_large_batch_splitting { value: true }", {"larger": "split"}),
    ],
)
def test_a_parameters_file_is_read(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    (tmp_path / "b.txt").write_text(text)

    config = read_batching_parameters(tmp_path / "b.txt")

    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    "text",
    [
        "max_batch_size: 32",
        "max_batch_sice { value: 32 }",
        "max_batch_size { value: 0 }",
        "max_batch_size { value: -1 }",
        "num_batch_threads { value: 0 }",
        "batch_timeout_micros { value: -1 }",
        "allowed_batch_sizes: 2",
        "max_batch_size { value: 4 } allowed_batch_sizes: 4 allowed_batch_sizes: 4",
        "max_batch_size { value: 4 } allowed_batch_sizes: 0 allowed_batch_sizes: 4",
        "max_batch_size {",
        "\xff",
    ],
)
def test_a_wrong_parameters_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "b.txt").write_bytes(text.encode("latin-1"))

    with pytest.raises(ConfigError):
        read_batching_parameters(tmp_path / "b.txt")
    with pytest.raises(ConfigError):
        read_batching_parameters(tmp_path / "none.txt")


def test_concurrent_clients_get_their_own_rows_and_only_the_bad_one_fails(
    server: Server, ask_at: Callable[..., Any], pool: ThreadPoolExecutor
) -> None:
    """Rows that the model itself refuses, among rows of others, over real sockets."""

    def one(number: int) -> tuple[int, Any]:
        row = [float(number), 0.0 if number % 10 == 0 else 1.0]
        answer = ask_at(server.rest_port, "/v1/models/picky:predict", {"instances": [row, row]})
        return answer.status, answer.json().get("predictions")

    answers = list(pool.map(one, range(400)))

    for number, (status, found) in enumerate(answers):
        assert (status, found) == (
            (400, None) if number % 10 == 0 else (200, [number * 3.0] * 2)
        ), number


def test_requests_of_undeclared_shapes_run_alone_while_others_are_joined(
    exported: dict[str, Path], monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    """The model declares [-1, 1]; a softmax over [3] and [1] joined would give other numbers."""
    model = load_model(exported["half_plus_two"])
    shapes, held, run = [], threading.Event(), model.run

    def slow(signature: str, arrays: Sequence[Array]) -> Outputs:
        shapes.append(arrays[0].shape)
        assert held.wait(30)
        return run(signature, arrays)

    monkeypatch.setattr(model, "run", slow)
    batcher = Batcher(model, BatchingConfig(), name="half", metrics=ServeMetrics())
    odd_inputs = [np.full(shape, 2.0, np.float32) for shape in ((1, 1), (3,), (1,), (3,), (2, 2))]

    found = [pool.submit(batcher.call, "serving_default", {"x": array}) for array in odd_inputs]
    wait_for(lambda: len(shapes) == len(odd_inputs))
    held.set()
    answers = [future.result(30)["y"] for future in found]
    both = np.full(3, 2.0, np.float32)
    assert batcher.call_at_once("serving_default", {"x": both}, (1, 2)) is None
    batcher.close()

    assert sorted(shapes) == sorted(array.shape for array in odd_inputs)
    for array, answer in zip(odd_inputs, answers, strict=True):
        assert answer.tolist() == (array / 2 + 2).tolist()


def test_an_image_with_too_few_axes_is_refused_and_aborts_no_process(tmp_path: Path) -> None:
    """oneDNN's convolution ends the process, and with it the requests of all clients."""
    module: Any = tf.Module()
    spec = [tf.TensorSpec([None, 4, 4, 1], tf.float32, name="x")]
    kernel = tf.ones([3, 3, 1, 2])
    module.call = tf.function(lambda x: {"y": tf.nn.conv2d(x, kernel, 1, "SAME")}, spec)
    tf.saved_model.save(module, str(tmp_path), signatures={"serving_default": module.call})
    batcher = Batcher(load_model(tmp_path), BatchingConfig(), name="c", metrics=ServeMetrics())
    image = np.ones((1, 4, 4, 1), np.float32)

    for few in (image[..., 0], image[0], image[0, 0], image[0, 0, 0, 0]):
        with pytest.raises(UserError, match=r"must be float32 of shape \[-1,4,4,1\]\. Received"):
            batcher.call("serving_default", {"x": few})
        with pytest.raises(UserError, match="must be float32"):
            batcher.call_at_once("serving_default", {"x": few}, ())
    answer = batcher.call("serving_default", {"x": image})
    batcher.close()

    assert answer["y"].shape == (1, 4, 4, 2)


def test_grpc_and_rest_meet_in_one_queue_without_mixing(
    server: Server, ask_at: Callable[..., Any], pool: ThreadPoolExecutor
) -> None:
    import grpc
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)

        def one(number: int) -> list[float]:
            if number % 2:
                body = {"inputs": [[float(number)]]}
                answer = ask_at(server.rest_port, "/v1/models/half_plus_two:predict", body)
                return list(answer.json()["outputs"][0])
            request = predict_pb2.PredictRequest()
            request.model_spec.name = "half_plus_two"
            request.inputs["x"].CopyFrom(tf.make_tensor_proto([[float(number)]]))
            return list(stub.Predict(request, timeout=30).outputs["y"].float_val)

        answers = list(pool.map(one, range(400)))

    assert answers == [[number / 2 + 2.0] for number in range(400)]
    metrics = ask_at(server.rest_port, "/monitoring/prometheus/metrics").body
    assert ":tensorflow:serving:batching_session:wrapped_run_count" in metrics
