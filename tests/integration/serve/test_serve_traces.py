"""Traces: what a real OTLP receiver gets of the requests to `stoker serve`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc
from tests.integration.serve.otlp import Collector, Receiver, values

from stoker.core.errors import ConfigError
from stoker.registry.repository import Repository
from stoker.serve.config import ServeConfig
from stoker.serve.observability.access_log import Entry
from stoker.serve.observability.counters import Counter
from stoker.serve.process.server import Server
from stoker.serve.request_record import RequestRecord
from stoker.serve.tracing.traces import Traces
from stoker.telemetry.catalogue.serving import LOG_DROPPED

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, INTERNAL = 2, 1


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


def traceparent(*, sampled: bool, span: str = PARENT) -> str:
    return f"00-{TRACE}-{span}-{'01' if sampled else '00'}"


def predict_by_grpc(port: int, model: str, **metadata: str) -> Any:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    request.inputs["x"].CopyFrom(tf.make_tensor_proto([[4.0], [6.0]]))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        return stub.Predict(request, metadata=list(metadata.items()), timeout=60)


def serve(base: Path, *flags: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stoker", "serve", "--model_name", "half"]
    command += ["--model_base_path", str(base), "--port", "0", "--rest_api_port", "0", "--json"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.Popen(
        [*command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**kept, **env},
    )


@pytest.fixture(scope="module")
def base(exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = Repository(tmp_path_factory.mktemp("models"))
    repository.push(exported["half_plus_two"], "half")
    return repository.base("half")


@dataclass(frozen=True)
class Served:
    """What one process sent of its requests when it ended, and how that was."""

    spans: list[Any]
    resource: dict[str, Any]
    returncode: int
    stderr: str
    began_ns: int
    ended_ns: int


@pytest.fixture(scope="module")
def served(base: Path, receiver: Receiver, ask_at: Callable[..., Any]) -> Served:
    """All requests that the tests here look at; nothing is sent before the end, by its long delay."""
    began_ns = time.time_ns()
    process = serve(
        base,
        "--traces",
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
        OTEL_BSP_SCHEDULE_DELAY="600000",
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test",
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        port, path = ready["rest_port"], "/v1/models/half:predict"
        good: dict[str, Any] = {"instances": [[1.0], [2.0], [5.0]]}
        for probe in ("/livez", "/readyz", "/v2/health/live", "/monitoring/prometheus/metrics"):
            assert ask_at(port, probe).status == 200
        assert ask_at(port, path, good, traceparent=traceparent(sampled=True)).status == 200
        unseen = traceparent(sampled=False, span="1" * 16)
        assert ask_at(port, path, good, traceparent=unseen).status == 200
        broken = {"traceparent": "00-zz-1", "x-request-id": "broken"}
        assert ask_at(port, path, good, **broken).status == 200
        for number in range(5):  # of so few rows that they are answered in the loop
            assert ask_at(port, path, good, **{"x-request-id": f"small-{number}"}).status == 200
        no = {"x-request-id": "no"}
        assert ask_at(port, path, {"instances": [["x"]]}, **no).status == 400
        assert ask_at(port, "/v1/models/none:predict", good).status == 404
        assert predict_by_grpc(ready["grpc_port"], "half", **{"x-request-id": "call"})
        inside = {"traceparent": traceparent(sampled=True, span="2" * 16)}
        assert predict_by_grpc(ready["grpc_port"], "half", **inside)
        with pytest.raises(grpc.RpcError):
            predict_by_grpc(ready["grpc_port"], "nobody")
        assert receiver.spans() == []
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    (first, *_) = receiver.requests
    return Served(
        spans=receiver.spans(),
        resource=values(first.resource_spans[0].resource.attributes),
        returncode=process.returncode,
        stderr=stderr,
        began_ns=began_ns,
        ended_ns=time.time_ns(),
    )


def one(served: Served, **wanted: Any) -> Any:
    """The server's span with these attributes."""
    named = {name.replace("__", "."): value for name, value in wanted.items()}
    found = [
        s
        for s in served.spans
        if s.kind == SERVER and named.items() <= values(s.attributes).items()
    ]
    assert len(found) == 1, found
    return found[0]


def children(served: Served, span: Any) -> dict[str, Any]:
    return {other.name: other for other in served.spans if other.parent_span_id == span.span_id}


def test_what_waited_was_sent_at_the_end_and_the_process_ended_by_0(served: Served) -> None:
    assert served.returncode == 0, served.stderr
    assert served.spans != []
    assert "Traceback" not in served.stderr
    assert served.resource["service.name"] == "stoker"
    assert served.resource["deployment.environment.name"] == "test"
    assert served.resource["process.pid"] > 0


def test_a_request_goes_on_with_its_clients_trace(served: Served) -> None:
    span = next(span for span in served.spans if span.parent_span_id.hex() == PARENT)

    assert span.trace_id.hex() == TRACE
    assert (span.name, span.kind) == ("POST /v1/models/{model}:predict", SERVER)
    said = values(span.attributes)
    assert (
        said.items()
        >= {
            "http.request.method": "POST",
            "http.route": "/v1/models/{model}:predict",
            "http.response.status_code": 200,
            "url.path": "/v1/models/half:predict",
            "url.scheme": "http",
            "client.address": "127.0.0.1",
            "stoker.model.name": "half",
            "stoker.model.version": 1,
            "stoker.model.signature": "serving_default",
            "stoker.rows": 3,
            "stoker.code": "OK",
        }.items()
    )
    assert served.began_ns < span.start_time_unix_nano < span.end_time_unix_nano < served.ended_ns
    inside = children(served, span)
    assert set(inside) == {"queue", "model"}
    queue, model = inside["queue"], inside["model"]
    assert {queue.trace_id, model.trace_id} == {span.trace_id}
    assert {queue.kind, model.kind} == {INTERNAL}
    times = [span.start_time_unix_nano, queue.start_time_unix_nano, queue.end_time_unix_nano]
    times += [model.start_time_unix_nano, model.end_time_unix_nano, span.end_time_unix_nano]
    assert times == sorted(times)
    assert model.end_time_unix_nano > model.start_time_unix_nano


def test_a_request_of_an_unsampled_trace_has_no_span(served: Served) -> None:
    assert [s for s in served.spans if s.parent_span_id.hex() == "1" * 16] == []
    assert len([s for s in served.spans if s.trace_id.hex() == TRACE]) == 3 + 3


def test_a_request_without_a_trace_or_with_a_broken_one_begins_its_own(served: Served) -> None:
    spans = [one(served, stoker__request_id=f"small-{number}") for number in range(5)]
    spans.append(one(served, stoker__request_id="broken"))

    assert {span.parent_span_id for span in spans} == {b""}
    assert len({span.trace_id for span in spans}) == 6
    for span in spans:
        assert set(children(served, span)) == {"queue", "model"}
        assert values(span.attributes)["stoker.rows"] == 3


def test_a_refused_request_has_a_span_that_is_not_an_error_of_the_server(served: Served) -> None:
    refused = one(served, stoker__request_id="no")
    unknown = one(served, http__response__status_code=404)

    assert (refused.status.code, unknown.status.code) == (0, 0)
    assert values(refused.attributes)["stoker.code"] == "INVALID_ARGUMENT"
    assert values(unknown.attributes)["stoker.code"] == "NOT_FOUND"
    assert children(served, refused) == {}


def test_a_call_has_a_span_too(served: Served) -> None:
    call = one(served, stoker__request_id="call")
    refused = one(served, stoker__model__name="nobody")

    assert call.name == "tensorflow.serving.PredictionService/Predict"
    assert (
        values(call.attributes).items()
        >= {
            "rpc.system": "grpc",
            "rpc.service": "tensorflow.serving.PredictionService",
            "rpc.method": "Predict",
            "rpc.grpc.status_code": 0,
            "client.address": "127.0.0.1",
            "stoker.model.version": 1,
            "stoker.rows": 2,
        }.items()
    )
    assert set(children(served, call)) == {"queue", "model"}
    assert values(refused.attributes)["rpc.grpc.status_code"] == 5


def test_a_call_goes_on_with_its_clients_trace(served: Served) -> None:
    span = next(span for span in served.spans if span.parent_span_id.hex() == "2" * 16)

    assert span.trace_id.hex() == TRACE
    assert span.name == "tensorflow.serving.PredictionService/Predict"
    assert set(children(served, span)) == {"queue", "model"}


def test_probes_and_the_metrics_have_none(served: Served) -> None:
    paths = {values(span.attributes).get("url.path") for span in served.spans}
    assert paths - {None} == {"/v1/models/half:predict", "/v1/models/none:predict"}


def config(base: Path, **more: Any) -> ServeConfig:
    return ServeConfig(
        models={"half": base},
        traces=True,
        rest_port=0,
        grpc_port=0,
        poll_s=0.1,
        lame_duck_s=0.0,
        drain_s=5,
        **more,
    )


def test_no_request_waits_for_a_receiver_that_does_not_answer(
    base: Path, ask_at: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its connections are taken, and never answered; the access log is written meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        server = Server(config(base, access_log=str(tmp_path / "log")))
        server.start()
        try:
            assert server.wait_until_ready(60)
            for _ in range(20):
                body = {"instances": [[1.0]]}
                assert ask_at(server.rest_port, "/v1/models/half:predict", body).status == 200
        finally:
            began_s = time.monotonic()
            server.stop()
    assert (
        time.monotonic() - began_s < 15
    )  # its own 2 s; OpenTelemetry's shutdown alone waits for 30
    assert (tmp_path / "log").read_text().count("\n") == 20


def test_spans_go_by_grpc_if_configured_and_not_at_all_if_the_sampler_says_so(
    base: Path, ask_at: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    counts = []
    for sampler in ("always_on", "always_off"):
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
        server = Server(config(base))
        server.start()
        try:
            assert server.wait_until_ready(60)
            answer = ask_at(server.rest_port, "/v2/models/half")
            assert answer.status == 200
        finally:
            server.stop()
        counts.append(len(collector.requests))
    collector.close()

    assert counts == [1, 1]
    (span,) = collector.requests[0].resource_spans[0].scope_spans[0].spans
    assert span.name == "GET /v2/models/{model}"


def entry(number: int, *, parent: str = "") -> Entry:
    caller = {"traceparent": parent} if parent else {}
    method = "GET /v1/models/m"
    return Entry(
        protocol="REST", method=method, status=200, record=RequestRecord(rows=number), caller=caller
    )


def test_a_share_is_taken_of_what_begins_a_trace_and_all_that_a_client_has_taken(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    before = len(receiver.spans())
    traces = Traces(dropped=Counter(LOG_DROPPED))
    for number in range(1000):
        traces.add(entry(number))
    for number in range(1000, 1020):
        traces.add(entry(number, parent=f"00-{number:032x}-{PARENT}-01"))
        traces.add(entry(number, parent=f"00-{number:032x}-{PARENT}-00"))
    traces.close()

    spans = receiver.spans()[before:]
    theirs = [span for span in spans if span.parent_span_id]
    assert sorted(int(span.trace_id.hex(), 16) for span in theirs) == list(range(1000, 1020))
    own = [span for span in spans if not span.parent_span_id]
    assert 150 < len(own) < 350  # 250 and 7 standard deviations
    assert len({span.trace_id for span in own}) == len(own)


@pytest.mark.parametrize(("disabled", "count"), [("false", 3), ("true", 0)])
def test_opentelemetrys_own_switch_turns_it_off(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, disabled: str, count: int
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv("OTEL_SDK_DISABLED", disabled)
    record = RequestRecord(model="m")
    record.ran(record.began_s, record.began_s, came_s=record.began_s)
    before = len(receiver.spans())
    traces = Traces(dropped=Counter(LOG_DROPPED), silent=("/livez",))
    for path in ("/livez", "/v1/models/m:predict"):
        traces.add(Entry(protocol="REST", method=f"GET {path}", status=200, record=record))
    traces.close()

    assert len(receiver.spans()) - before == count


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "one of http/protobuf, grpc"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1000000", "OTEL_"),
    ],
)
def test_a_wrong_variable_is_reported_at_the_start(
    base: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        Server(config(base))


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )


def test_without_the_extra_traces_are_refused_in_one_line(base: Path) -> None:
    code = "import sys; sys.modules['opentelemetry'] = None; from stoker.cli.main import invoke; "
    code += "sys.exit(invoke(['serve', sys.argv[1], '--traces'], debug=False))"
    ended = python(code, str(base))

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1
    assert "stoker[otel]" in ended.stderr
