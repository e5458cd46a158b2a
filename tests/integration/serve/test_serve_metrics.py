"""What Prometheus reads of a server: every name and label, right numbers, and no end of series by names."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tensorflow as tf
from google.protobuf import text_format
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_status_pb2,
    inference_pb2,
    model_management_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)
from tests.integration.serve.conftest import started

from stoker.cluster.doctor.gpus import Gpus
from stoker.registry.repository import Repository
from stoker.serve.config import ServeConfig
from stoker.serve.grpc.descriptions import OPEN_INFERENCE
from stoker.serve.limits import METRICS_PATH
from stoker.serve.process.server import Server
from stoker.serve.runtime import machine

AskAt = Callable[..., Any]
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
SERVING, BATCHING = ":tensorflow:serving:", ":tensorflow:serving:batching_session:"
UNKNOWN = 50


def entry(base: Path, name: str) -> str:
    return f'config {{ name: "{name}" base_path: "{base}" }}'


def listed(*entries: str) -> str:
    return f"model_config_list {{ {' '.join(entries)} }}"


@pytest.fixture(scope="module")
def bases(exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    repository = Repository(tmp_path_factory.mktemp("models"))
    for name, source in (("half", "half_plus_two"), ("judge", "judge")):
        repository.push(exported[source], name)
    return {name: repository.base(name) for name in ("half", "judge")}


@pytest.fixture
def served(bases: dict[str, Path], tmp_path: Path) -> Iterator[Server]:
    """A server that has counted nothing yet."""
    (tmp_path / "models.config").write_text(listed(*(entry(b, n) for n, b in bases.items())))
    config = ServeConfig(
        model_config_file=tmp_path / "models.config",
        rest_port=0,
        grpc_port=0,
        poll_s=0.05,
        lame_duck_s=0.0,
        drain_s=5,
    )
    with started(config) as server:
        yield server


@pytest.fixture
def channel(served: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as opened:
        yield opened


def exposition(server: Server, ask_at: AskAt) -> str:
    answer = ask_at(server.rest_port, METRICS_PATH)
    assert (answer.status, answer.headers["content-type"].split(";")[0]) == (200, "text/plain")
    return str(answer.body)


def series(text: str) -> Series:
    """Name and labels of each sample, without those of buckets -> its number."""
    found: Series = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        sample = re.fullmatch(r"([a-z_:]+)\{(.*)\} (\S+)", line)
        assert sample is not None, line
        labels = frozenset(re.findall(r'([A-Za-z_]+)="([^"]*)"', sample[2]))
        assert (sample[1], labels) not in found, line
        found[sample[1], labels] = float(sample[3])
    return {key: value for key, value in found.items() if not key[0].endswith("_bucket")}


def of(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


def ask_all(server: Server, channel: grpc.Channel, ask_at: AskAt) -> None:
    """One request of each kind."""
    port = server.rest_port
    requests = [
        ("half:predict", {"instances": [[1.0], [2.0]]}, 200),
        ("judge:classify", {"examples": [{"x": 1.0}, {"x": 2.0}]}, 200),
        ("judge:regress", {"signature_name": "regress", "examples": [{"x": 1.0}]}, 200),
        ("half:predict", {"instances": [["no number"]]}, 400),
        ("none:predict", {"instances": [1.0]}, 404),
        ("half:predict", b"", 400),
        ("half", None, 200),
        ("", None, 400),
    ]
    for path, body, status in requests:
        method = "GET" if body is None else "POST"
        assert ask_at(port, f"/v1/models/{path}", body, method=method).status == status
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}
    assert ask_at(port, "/v2/models/half/infer", {"inputs": [tensor]}).status == 200

    stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
    predict = predict_pb2.PredictRequest()
    predict.model_spec.name = "half"
    predict.inputs["x"].CopyFrom(tf.make_tensor_proto([[1.0], [2.0], [3.0]]))
    stub.Predict(predict)
    example = tf.train.Example()
    example.features.feature["x"].float_list.value.append(1.0)
    classify = classification_pb2.ClassificationRequest()
    regress = regression_pb2.RegressionRequest()
    regress.model_spec.signature_name = "regress"
    for request, call in ((classify, stub.Classify), (regress, stub.Regress)):
        request.model_spec.name = "judge"
        request.input.example_list.examples.extend([example] * 3)
        call(request)
    several = inference_pb2.MultiInferenceRequest()
    for signature, method in (("serving_default", "classify"), ("regress", "regress")):
        task = several.tasks.add(method_name=f"tensorflow/serving/{method}")
        task.model_spec.name, task.model_spec.signature_name = "judge", signature
    several.input.example_list.examples.append(example)
    stub.MultiInference(several)
    infer = OPEN_INFERENCE.messages["ModelInferRequest"](model_name="half")
    infer.inputs.add(name="x", datatype="FP32", shape=[1, 1]).contents.fp32_contents.append(1.0)
    channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=OPEN_INFERENCE.messages["ModelInferResponse"].FromString,
    )(infer)


LATENCIES = [
    ("half", "predict", "REST", 1),
    ("half", "Predict", "REST", 1),  # by the Open Inference Protocol
    ("half", "Predict", "GRPC", 2),
    ("half", "", "REST", 1),
    ("judge", "classify", "REST", 1),
    ("judge", "Classify", "GRPC", 1),
    ("judge", "regress", "REST", 1),
    ("judge", "Regress", "GRPC", 1),
]
"""Model, API, entrypoint and how many requests."""

RUNS = [("half", "Predict", 4), ("judge", "Classify", 2), ("judge", "Regress", 2)]
"""Model, API and number of runs, without those of MultiInference, which are one a task."""


def test_one_request_of_each_kind_has_every_name_and_label(
    served: Server, channel: grpc.Channel, ask_at: AskAt
) -> None:
    ask_all(served, channel, ask_at)

    text = exposition(served, ask_at)
    found = series(text)

    assert {line.split(" ", 2)[2] for line in text.splitlines() if line.startswith("# TYPE")} == {
        f"{SERVING}request_count counter",
        f"{SERVING}request_latency histogram",
        f"{SERVING}runtime_latency histogram",
        f"{SERVING}request_example_counts histogram",
        f"{SERVING}request_example_count_total counter",
        f"{BATCHING}queuing_latency histogram",
        f"{BATCHING}wrapped_run_count counter",
        f"{BATCHING}input_batch_size histogram",
        f"{BATCHING}processed_batch_size histogram",
        f"{BATCHING}padding_size histogram",
        "stoker_rollout_state_age_seconds gauge",
        "stoker_request_count counter",
        "stoker_request_latency histogram",
        "stoker_queued_requests gauge",
        "stoker_requests_without_thread gauge",
        "stoker_requests_under_way gauge",
        "stoker_head_cache counter",
        "stoker_workers_replaced counter",
        "stoker_log_dropped counter",
        "stoker_rollout_copies counter",
        "stoker_rollout_copy_latency histogram",
        "stoker_prediction_skew_ratio gauge",
        "stoker_prediction_drift_ratio gauge",
        "stoker_model_loaded gauge",
        "stoker_worker_pid gauge",
        "process_resident_memory_bytes gauge",
        *(lines[1].removeprefix("# TYPE ") for lines in machine.gpu_families()),
    }
    assert {key: value for key, value in found.items() if key[0] == f"{SERVING}request_count"} == {
        (f"{SERVING}request_count", of(model_name="half", status="OK")): 5,
        (f"{SERVING}request_count", of(model_name="half", status="INVALID_ARGUMENT")): 2,
        (f"{SERVING}request_count", of(model_name="", status="INVALID_ARGUMENT")): 1,
        (f"{SERVING}request_count", of(model_name="judge", status="OK")): 4,
        (f"{SERVING}request_count", of(model_name="other", status="NOT_FOUND")): 1,
    }
    latency = f"{SERVING}request_latency"
    assert {key: value for key, value in found.items() if key[0] == f"{latency}_count"} == {
        (f"{latency}_count", of(model_name=model, API=api, entrypoint=entrypoint)): count
        for model, api, entrypoint, count in LATENCIES
    }
    by_version = "stoker_request_count"
    assert {key: value for key, value in found.items() if key[0] == by_version} == {
        (by_version, of(model_name="half", version="1", status="OK")): 4,
        (by_version, of(model_name="half", version="1", status="INVALID_ARGUMENT")): 1,
        (by_version, of(model_name="judge", version="1", status="OK")): 5,
    }
    by_version = "stoker_request_latency_count"
    assert {key: value for key, value in found.items() if key[0] == by_version} == {
        (by_version, of(model_name="half", version="1")): 4,
        (by_version, of(model_name="judge", version="1")): 5,
    }
    runtime = f"{SERVING}runtime_latency"
    runs = {(model, api): count for model, api, count in RUNS} | {("judge", "MultiInference"): 2}
    assert {key: value for key, value in found.items() if key[0] == f"{runtime}_count"} == {
        (f"{runtime}_count", of(model_name=model, API=api, runtime="TF1")): count
        for (model, api), count in runs.items()
    }
    counts, judge = f"{SERVING}request_example_counts", of(model="judge")
    assert found[f"{counts}_count", judge] == 6, "one a task"
    assert found[f"{counts}_sum", judge] == 2 + 1 + 3 + 3 + 1 + 1
    assert found[f"{SERVING}request_example_count_total", judge] == 11


def test_batches_are_counted_by_rows_that_came_ran_and_filled_up(
    served: Server, channel: grpc.Channel, ask_at: AskAt
) -> None:
    ask_all(served, channel, ask_at)

    found = series(exposition(served, ask_at))

    runs, rows = 4 + 2 + 2 + 2, (2 + 1 + 3 + 1) + (2 + 1 + 3 + 3 + 1 + 1)
    none = of()
    assert found[f"{BATCHING}wrapped_run_count", none] == runs
    for name in ("queuing_latency", "input_batch_size", "processed_batch_size", "padding_size"):
        assert found[f"{BATCHING}{name}_count", none] == runs, name
    assert found[f"{BATCHING}input_batch_size_sum", none] == rows
    assert found[f"{BATCHING}processed_batch_size_sum", none] == rows
    assert found[f"{BATCHING}padding_size_sum", none] == 0


def test_latencies_lie_in_tensorflow_servings_buckets(
    served: Server, channel: grpc.Channel, ask_at: AskAt
) -> None:
    ask_all(served, channel, ask_at)
    text = exposition(served, ask_at)

    bounds = [f"{10 * 1.8**power:g}" for power in range(33)] + ["+Inf"]
    for name, labels in (
        ("request_latency", 'model_name="judge",API="Classify",entrypoint="GRPC"'),
        ("runtime_latency", 'model_name="judge",API="MultiInference",runtime="TF1"'),
    ):
        start = f"{SERVING}{name}_bucket{{{labels},le="
        lines = [line for line in text.splitlines() if line.startswith(start)]
        assert [re.sub(r'.*le="(.*)"} .*', r"\1", line) for line in lines] == bounds
        cumulated = [float(line.split()[-1]) for line in lines]
        assert cumulated == sorted(cumulated)
        assert (
            cumulated[-1]
            == series(text)[
                f"{SERVING}{name}_count", frozenset(re.findall(r'(\w+)="(\w+)"', labels))
            ]
        )


def test_our_own_metrics_are_true_of_this_process(
    served: Server, channel: grpc.Channel, ask_at: AskAt
) -> None:
    names = {
        line.split("{")[0] for line in exposition(served, ask_at).splitlines() if "half" in line
    }
    assert names == {"stoker_model_loaded"}, "a model without requests has no other series"

    ask_all(served, channel, ask_at)

    found = series(exposition(served, ask_at))

    assert found["stoker_worker_pid", of(worker="0")] == os.getpid()
    loaded = {key[1]: value for key, value in found.items() if key[0] == "stoker_model_loaded"}
    assert loaded == {of(model_name=name, version="1"): 1 for name in ("half", "judge")}
    assert found["process_resident_memory_bytes", of(worker="0")] > 10 << 20
    under_way = {key: value for key, value in found.items() if key[0].endswith("_under_way")}
    assert under_way == {
        ("stoker_requests_under_way", of(entrypoint="REST")): 0,
        ("stoker_requests_under_way", of(entrypoint="GRPC")): 0,
    }
    served.plane.metrics.log_dropped.add(3, log="request")
    served.plane.metrics.workers_replaced.add(reason="stuck")
    found = series(exposition(served, ask_at))
    assert found["stoker_log_dropped", of(log="request")] == 3
    assert found["stoker_workers_replaced", of(reason="stuck")] == 1


def test_a_machine_without_a_gpu_is_queried_once_and_has_no_such_metric(
    served: Server, ask_at: AskAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Gpus] = []

    def none() -> Gpus:
        looks.append(Gpus(unread="no driver"))
        return looks[-1]

    monkeypatch.setattr(machine, "_no_gpu", threading.Event())
    monkeypatch.setattr(machine, "read_gpus", none)

    assert "stoker_gpu" not in exposition(served, ask_at) + exposition(served, ask_at)
    assert len(looks) == 1


def keys(server: Server, ask_at: AskAt) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    return set(series(exposition(server, ask_at)))


def test_models_that_clients_invent_make_no_series(
    served: Server, channel: grpc.Channel, ask_at: AskAt
) -> None:
    """By every kind of request, over both protocols, a name of its own each time."""
    predict = prediction_service_pb2_grpc.PredictionServiceStub(channel).Predict
    status = model_service_pb2_grpc.ModelServiceStub(channel).GetModelStatus

    def ask(number: int) -> None:
        path = f"/v1/models/invented{number}"
        found = [
            ask_at(served.rest_port, path),
            ask_at(served.rest_port, f"{path}/versions/{number}"),
            ask_at(served.rest_port, f"{path}/metadata"),
            ask_at(served.rest_port, f"{path}:predict", {"instances": [1.0]}),
            ask_at(served.rest_port, f"{path}:classify", {"examples": [{"x": 1.0}]}),
            ask_at(served.rest_port, f"{path}:regress", {"examples": [{"x": 1.0}]}),
            ask_at(served.rest_port, f"/v2/models/invented{number}"),
            ask_at(served.rest_port, f"/v2/models/invented{number}/ready"),
        ]
        assert {answer.status for answer in found} <= {400, 404, 503}
        requests = (
            (predict, predict_pb2.PredictRequest()),
            (status, get_model_status_pb2.GetModelStatusRequest()),
        )
        for call, request in requests:
            request.model_spec.name = f"invented{number}"
            with pytest.raises(grpc.RpcError):
                call(request, timeout=20)

    ask(0)
    before = keys(served, ask_at)
    for number in range(1, UNKNOWN):
        ask(number)

    assert keys(served, ask_at) == before
    assert "invented" not in exposition(served, ask_at)


def test_names_that_are_configured_and_removed_again_make_only_so_many_series(
    served: Server,
    channel: grpc.Channel,
    ask_at: AskAt,
    bases: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A counter's series cannot be taken back: beyond a number of them a new name is as an unknown one."""
    ask_all(served, channel, ask_at)
    limit = served.plane.metrics.limit
    monkeypatch.setattr(limit, "_max_series", limit.used + 4)
    reload = model_service_pb2_grpc.ModelServiceStub(channel).HandleReloadConfigRequest
    sizes = []
    for number in range(8):
        request = model_management_pb2.ReloadConfigRequest()
        text = listed(entry(bases["half"], "half"), entry(bases["half"], f"passing{number}"))
        text_format.Parse(text, request.config)
        reload(request, timeout=60)
        for name in (f"passing{number}", "half"):
            path = f"/v1/models/{name}:predict"
            assert ask_at(served.rest_port, path, {"instances": [[1.0]]}).status == 200
        sizes.append(len(exposition(served, ask_at).splitlines()))

    text = exposition(served, ask_at)
    found = series(text)
    assert sizes[3:] == sizes[3:4] * 5
    assert "passing0" in text
    last = {line.split("{")[0] for line in text.splitlines() if "passing7" in line}
    assert last == {"stoker_model_loaded"}, "which does not stay"
    name = f"{SERVING}request_count"
    counted = sum(
        value
        for (metric, labels), value in found.items()
        if metric == name and ("status", "OK") in labels
    )
    assert counted == 5 + 4 + 2 * 8, "none is lost"
    assert found[name, of(model_name="half", status="OK")] == 5 + 8
    assert found[name, of(model_name="other", status="OK")] >= 4
