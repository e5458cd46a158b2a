"""Under a rollout each answer names its version, in every protocol, in the event loop and in threads."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import tensorflow as tf
from keras.export import ExportArchive
from tensorflow_serving.apis import (
    classification_pb2,
    inference_pb2,
    predict_pb2,
    prediction_log_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

from stoker.core.errors import DataError
from stoker.registry.repository import Repository
from stoker.rollout.control.controller import Event, change
from stoker.rollout.counts.counts import read_counts
from stoker.rollout.routing.router import RolloutRouter
from stoker.rollout.state.changes import advance, start
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import FOLDER
from stoker.serve.batching.queue import QUICK_S
from stoker.serve.config import ServeConfig
from stoker.serve.dataplane.joined_runs import PROVEN_RUNS
from stoker.serve.grpc.descriptions import OPEN_INFERENCE
from stoker.serve.process.server import Server
from stoker.serve.request_record import VERSION_HEADER
from stoker.serve.servables.prediction_logs import read_records

CONFIG = """model_config_list {
  config { name: "m" base_path: "%s" }
  config { name: "logged" base_path: "%s" logging_config {
    log_collector_config { filename_prefix: "%s" } sampling_config { sampling_rate: 1 } } }
}"""


def exported(path: Path, *, version: int) -> Path:
    """Each signature answers with x + version, so that the answer itself says who gave it."""
    of_rows = [tf.TensorSpec([None, 1], tf.float32, name="x")]
    of_examples = [tf.TensorSpec([None], tf.string, name="inputs")]
    parsed: Any = {"x": tf.io.FixedLenFeature([], tf.float32)}

    def plus(rows: tf.Tensor) -> Any:
        x: Any = tf.io.parse_example(rows, parsed)["x"]
        return x[:, None] + version

    archive = ExportArchive()
    archive.add_endpoint(
        "serving_default", tf.function(lambda x: {"y": x + version}), input_signature=of_rows
    )
    for name, output in (("classify", "scores"), ("regress", "outputs")):
        call = tf.function(lambda inputs, name=output: {name: plus(inputs)})
        archive.add_endpoint(name, call, input_signature=of_examples)
    archive.write_out(str(path), verbose=False)
    return path


@dataclass
class Serving:
    server: Server
    router: RolloutRouter
    folder: Path
    channel: grpc.Channel

    @property
    def models(self) -> Path:
        return self.folder / "models"

    def ask(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.rest_port, timeout=30)
        try:
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return response.status, found, response.read()
        finally:
            connection.close()

    def call(self, method: str, request: Any, **metadata: str) -> tuple[bytes, dict[str, str]]:
        """The response and the trailing metadata."""
        ask = self.channel.unary_unary(method, lambda message: message.SerializeToString())
        answer, call = ask.with_call(request, metadata=tuple(metadata.items()), timeout=30)
        return answer, dict(call.trailing_metadata())

    def queue(self, version: int) -> Any:
        with self.server.models.get("m").use(version) as (_, batcher):
            return batcher._queues["serving_default"]


def begin(models: Path, name: str, stages: str) -> None:
    """Put a rollout of version 2 into its first stage."""
    files = StateFiles(models / name / FOLDER)
    begun = start(None, 2, serving=1, settings=RolloutSettings(stages=stages), now_s=0.0)
    change(
        files,
        files.latest(),
        advance(begun, now_s=0.0),
        Event(what="test", who="me", why="", at_s=0.0),
    )


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("versions")
    repository = Repository(folder / "models")
    for version in (1, 2):
        source = exported(folder / str(version), version=version)
        for name in ("m", "logged"):
            repository.push(source, name)
    begin(repository.root, "m", "header=x-canary,50,100")
    begin(repository.root, "logged", "50,100")
    bases = [repository.base(name) for name in ("m", "logged")]
    (folder / "models.config").write_text(CONFIG % (*bases, folder / "requests"))
    config = ServeConfig(
        model_config_file=folder / "models.config",
        access_log=str(folder / "access.log"),
        rest_port=0,
        grpc_port=0,
        poll_s=0.1,
        lame_duck_s=0.0,
        drain_s=5,
    )
    router = RolloutRouter(server="one")
    server = Server(config, router=router)
    server.start()
    try:
        assert server.wait_until_ready(60)
        # Else requests that a rollout sends to the version that is still loading would fail.
        loaded = [server.models.get(name).serves(v) for name in ("m", "logged") for v in (1, 2)]
        assert all(loaded)
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            yield Serving(server=server, router=router, folder=folder, channel=channel)
    finally:
        server.stop()


@pytest.fixture
def threaded(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that a thread answers, of models that are known to be quick on any machine."""
    received: list[Any] = []
    plain = serving.server.plane.predict

    def counted(request: Any) -> Any:
        received.append(request)
        return plain(request)

    monkeypatch.setattr(serving.server.plane, "predict", counted)
    for version in (1, 2):
        queue = serving.queue(version)
        monkeypatch.setattr(queue, "_usual_s", QUICK_S / 10)
        monkeypatch.setattr(queue, "_took", lambda _s: None)
        monkeypatch.setattr(queue, "quick_runs", PROVEN_RUNS)
    return received


def predict(model: str, x: float = 1.0) -> Any:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    request.inputs["x"].CopyFrom(tf.make_tensor_proto([[x]]))
    return request


def example() -> Any:
    found = tf.train.Example()
    found.features.feature["x"].float_list.value.append(1.0)
    return found


def by_rest(path: str, body: Any, value: Callable[[Any], float]) -> Callable[[Serving], Any]:
    def ask(serving: Serving) -> tuple[float, str]:
        status, headers, raw = serving.ask(path, body)
        assert status == 200, raw
        return value(json.loads(raw)), headers[VERSION_HEADER]

    return ask


def by_grpc(
    method: str, request: Any, answer: Any, value: Callable[[Any], float]
) -> Callable[[Serving], Any]:
    def ask(serving: Serving) -> tuple[float, str]:
        raw, trailing = serving.call(method, request)
        return value(answer.FromString(raw)), trailing[VERSION_HEADER]

    return ask


def every_api() -> Mapping[str, Callable[[Serving], Any]]:
    """Name -> a request; it returns the value x + version, and the version that the answer names."""
    service = "/tensorflow.serving.PredictionService"
    classify, regress = (
        classification_pb2.ClassificationRequest(),
        regression_pb2.RegressionRequest(),
    )
    several = inference_pb2.MultiInferenceRequest()
    for request, signature in ((classify, "classify"), (regress, "regress")):
        request.model_spec.name, request.model_spec.signature_name = "logged", signature
        request.input.example_list.examples.append(example())
        task = several.tasks.add(method_name=f"tensorflow/serving/{signature}")
        task.model_spec.CopyFrom(request.model_spec)
    several.input.example_list.examples.append(example())
    infer = OPEN_INFERENCE.messages["ModelInferRequest"](model_name="logged")
    infer.inputs.add(name="x", datatype="FP32", shape=[1, 1]).contents.fp32_contents.append(1.0)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}
    return {
        "REST predict": by_rest(
            "/v1/models/logged:predict",
            {"instances": [[1.0]]},
            lambda answer: answer["predictions"][0][0],
        ),
        "REST classify": by_rest(
            "/v1/models/logged:classify",
            {"signature_name": "classify", "examples": [{"x": 1.0}]},
            lambda answer: answer["results"][0][0][1],
        ),
        "REST regress": by_rest(
            "/v1/models/logged:regress",
            {"signature_name": "regress", "examples": [{"x": 1.0}]},
            lambda answer: answer["results"][0],
        ),
        "REST infer": by_rest(
            "/v2/models/logged/infer",
            {"inputs": [tensor]},
            lambda answer: answer["outputs"][0]["data"][0],
        ),
        "gRPC Predict": by_grpc(
            f"{service}/Predict",
            predict("logged"),
            predict_pb2.PredictResponse,
            lambda answer: answer.outputs["y"].float_val[0],
        ),
        "gRPC Classify": by_grpc(
            f"{service}/Classify",
            classify,
            classification_pb2.ClassificationResponse,
            lambda answer: answer.result.classifications[0].classes[0].score,
        ),
        "gRPC Regress": by_grpc(
            f"{service}/Regress",
            regress,
            regression_pb2.RegressionResponse,
            lambda answer: answer.result.regressions[0].value,
        ),
        "gRPC MultiInference": by_grpc(
            f"{service}/MultiInference",
            several,
            inference_pb2.MultiInferenceResponse,
            lambda answer: answer.results[1].regression_result.regressions[0].value,
        ),
        "gRPC ModelInfer": by_grpc(
            "/inference.GRPCInferenceService/ModelInfer",
            infer,
            OPEN_INFERENCE.messages["ModelInferResponse"],
            lambda answer: memoryview(answer.raw_output_contents[0]).cast("f")[0],
        ),
    }


def test_every_protocol_is_split_and_every_answer_names_its_version(serving: Serving) -> None:
    """The response, the access log, the request log, the metrics and the rollout's counts agree."""
    answered: Counter[str] = Counter()
    for name, ask in every_api().items():
        seen: Counter[str] = Counter()
        for _ in range(12):
            value, version = ask(serving)
            assert value == 1.0 + int(version), name
            seen[version] += 1
        assert sorted(seen) == ["1", "2"], name
        answered += seen
    stub = prediction_service_pb2_grpc.PredictionServiceStub(serving.channel)
    assert stub.Predict(predict("logged")).model_spec.version.value in (1, 2)  # an unchanged client
    _, labeled, _ = serving.ask("/v1/models/logged/versions/1:predict", {"instances": [[1.0]]})
    assert labeled[VERSION_HEADER] == "1"

    total = answered.total()
    lines = access_lines(serving, total + 2)
    assert Counter(str(line["version"]) for line in lines[:total]) == answered
    logs = logged_requests(serving, total)
    logged = Counter(str(log.log_metadata.model_spec.version.value) for log in logs[:total])
    assert logged == answered
    text = serving.server.plane.metrics.exposition()
    for version, count in answered.items():
        of_all = [
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith(f'stoker_request_count{{model_name="logged",version="{version}"')
        ]
        assert count <= sum(of_all) <= count + 2
    serving.router.refresh(serving.server.models.served())
    stage = read_counts(serving.models / "logged" / FOLDER, rollout=1)[0]
    assert sum(counts.requests for counts in stage.values()) == total + 1


def logged_requests(serving: Serving, count: int) -> list[Any]:
    """The records of the request log, once they are written."""
    end_s = time.monotonic() + 30
    records: list[bytes] = []
    while len(records) < count:
        assert time.monotonic() < end_s, "the request log lacks records"
        time.sleep(0.02)
        with contextlib.suppress(DataError):  # it is just being written
            files = sorted(serving.folder.glob("requests*"))
            records = [record for file in files for record in read_records(file)]
    return [prediction_log_pb2.PredictionLog.FromString(record) for record in records]


def access_lines(serving: Serving, count: int) -> list[dict[str, Any]]:
    path, end_s = serving.folder / "access.log", time.monotonic() + 30
    while not path.exists() or path.read_text().count("\n") < count:
        assert time.monotonic() < end_s, "the access log lacks lines"
        time.sleep(0.02)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_failed_answer_names_its_version_too(serving: Serving) -> None:
    status, headers, _ = serving.ask("/v1/models/logged:predict", {"instances": ["a"]})
    assert (status, headers[VERSION_HEADER] in "12") == (400, True)
    wrong = predict("logged")
    wrong.inputs["x"].CopyFrom(tf.make_tensor_proto([["a"]]))
    with pytest.raises(grpc.RpcError) as failed:
        serving.call("/tensorflow.serving.PredictionService/Predict", wrong)
    assert dict(failed.value.trailing_metadata())[VERSION_HEADER] in "12"
    # A request that reached no version names none.
    assert VERSION_HEADER not in serving.ask("/v1/models/no:predict", {"instances": [[1.0]]})[1]


METHOD = "/tensorflow.serving.PredictionService/Predict"


def test_a_candidate_runs_in_the_event_loop_after_1000_quick_runs_with_the_same_answers(
    serving: Serving, threaded: list[Any]
) -> None:
    body, canary = {"instances": [[1.5], [2.5]]}, {"x-canary": "1"}
    queue = serving.queue(2)

    def rest(**headers: str) -> tuple[int, dict[str, str], bytes]:
        status, found, raw = serving.ask("/v1/models/m:predict", body, **headers)
        found.pop("date", None)
        return status, found, raw

    queue.quick_runs = PROVEN_RUNS - 1
    by_thread = rest(**canary), serving.call(METHOD, predict("m"), **canary)
    assert len(threaded) == 2
    # So do those to the baseline: the latency of threads is not held against that of the event loop.
    baseline_by_thread = rest(), serving.call(METHOD, predict("m"))
    assert len(threaded) == 4
    assert by_thread[0][1][VERSION_HEADER] == by_thread[1][1][VERSION_HEADER] == "2"
    assert json.loads(by_thread[0][2]) == {"predictions": [[3.5], [4.5]]}

    queue.quick_runs = PROVEN_RUNS
    in_loop = rest(**canary), serving.call(METHOD, predict("m"), **canary)
    baseline = rest(), serving.call(METHOD, predict("m"))
    assert len(threaded) == 4
    assert in_loop == by_thread
    assert baseline == baseline_by_thread
    assert baseline[0][1][VERSION_HEADER] == baseline[1][1][VERSION_HEADER] == "1"


def test_a_slow_run_proves_nothing(serving: Serving) -> None:
    queue = serving.queue(1)
    before = queue.quick_runs
    queue._took(QUICK_S * 0.9)
    queue._took(QUICK_S * 1.1)
    assert queue.quick_runs == before + 1


def test_requests_of_one_turn_go_to_both_versions_and_each_gets_its_own_rows(
    serving: Serving, threaded: list[Any]
) -> None:
    serving.router.refresh(serving.server.models.served())
    before = requests_of_stage(serving)
    with ExitStack() as stack:
        port = serving.server.rest_port
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(30)
        ]
        for _ in range(3):  # the first joined runs of a version are held against single ones
            serving.server._rest.servers[0].get_loop().call_soon_threadsafe(time.sleep, 0.2)
            for number, client in enumerate(opened):
                canary = "X-Canary: 1\r\n" if number % 3 == 0 else ""
                body = json.dumps({"instances": [[float(number)]] * (1 + number % 2)})
                client.sendall(
                    f"POST /v1/models/m:predict HTTP/1.1\r\nHost: x\r\n{canary}"
                    f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
                )
            for number, client in enumerate(opened):
                version = 2 if number % 3 == 0 else 1
                answer = http.client.HTTPResponse(client)
                answer.begin()
                assert answer.headers[VERSION_HEADER] == str(version)
                rows = [[float(number + version)]] * (1 + number % 2)
                assert json.loads(answer.read()) == {"predictions": rows}
    assert threaded == []

    serving.router.refresh(serving.server.models.served())
    after = requests_of_stage(serving)
    assert {version: after[version] - before[version] for version in after} == {1: 60, 2: 30}
    predictions = read_counts(serving.models / "m" / FOLDER, rollout=1)[0][2].predictions
    assert sum(predictions.values()) >= 30


def requests_of_stage(serving: Serving) -> Counter[int]:
    stage = read_counts(serving.models / "m" / FOLDER, rollout=1).get(0, {})
    return Counter({version: counts.requests for version, counts in stage.items()})


def test_a_request_that_leaves_the_event_loop_is_routed_once(
    serving: Serving, threaded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a candidate that is not proven would lose most of its share: its requests would be drawn again."""
    routed: list[Any] = []
    plain = serving.server.plane.route

    def noted(spec: Any, headers: Any) -> Any:
        routed.append(plain(spec, headers))
        return routed[-1]

    monkeypatch.setattr(serving.server.plane, "route", noted)
    serving.queue(2).quick_runs = 0

    for _ in range(5):
        serving.ask("/v1/models/m:predict", {"instances": [[1.0]]}, **{"x-canary": "1"})
        serving.call(METHOD, predict("m"), **{"x-canary": "1"})

    assert len(threaded) == len(routed) == 10
    assert all(request.deadline.record.route in routed for request in threaded)
