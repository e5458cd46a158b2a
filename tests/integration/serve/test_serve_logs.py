"""The access log, and the log of sampled requests that warms up the next version."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tensorflow as tf
from tensorflow_serving.apis import (
    classification_pb2,
    inference_pb2,
    model_management_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_log_pb2,
    prediction_service_pb2_grpc,
)

from stoker.core.errors import ConfigError
from stoker.registry.repository import Repository
from stoker.serve.config import ServeConfig
from stoker.serve.dataplane.requests import Answered, ModelSpec, PredictResponse
from stoker.serve.observability.counters import Counter
from stoker.serve.process.server import Server
from stoker.serve.request_log.writer import RequestLog
from stoker.serve.runtime.background import MAX_BYTES, Background
from stoker.serve.servables.model_config import RequestLogConfig, read_model_config
from stoker.serve.servables.prediction_logs import read_records
from stoker.serve.servables.servable import Servable
from stoker.telemetry.catalogue.serving import LOG_DROPPED

KEY = "a-key-that-nobody-guesses"
CONFIG = """model_config_list {
  config { name: "half" base_path: "%s" logging_config {
    log_collector_config { type: "file" filename_prefix: "%s" } sampling_config { sampling_rate: %g } } }
  config { name: "judge" base_path: "%s" logging_config {
    log_collector_config { filename_prefix: "%s" } sampling_config { sampling_rate: 1 } } }
  config { name: "words" base_path: "%s" }
}"""


def wait_for(claim: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not claim():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def logging(
    exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("logging")
    repository = Repository(folder / "models")
    for name, source in (("half", "half_plus_two"), ("judge", "judge"), ("words", "words")):
        repository.push(exported[source], name)
    file, logs = folder / "models.config", folder / "logs"
    of = {name: repository.base(name) for name in ("half", "judge", "words")}
    file.write_text(
        CONFIG % (of["half"], logs / "half", 1.0, of["judge"], logs / "judge", of["words"])
    )
    (folder / "keys.yaml").write_text(f"- {{name: shop, role: admin, key: {KEY}}}\n")
    config = ServeConfig(
        model_config_file=file,
        keys_file=folder / "keys.yaml",
        access_log=str(folder / "access.log"),
        rest_port=0,
        grpc_port=0,
        poll_s=0.1,
        lame_duck_s=0.0,
        drain_s=5,
    )
    server = Server(config)
    server.start()
    try:
        assert server.wait_until_ready(60)
        yield server, folder
    finally:
        if server._rest_thread.is_alive():
            server.stop()


def lines_of(folder: Path, count: int) -> list[dict[str, Any]]:
    """The first lines of the log, once they are there."""
    path = folder / "access.log"
    wait_for(lambda: path.exists() and path.read_text().count("\n") >= count)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_names_caller_request_and_result_but_no_body_and_no_key(
    logging: tuple[Server, Path], ask_at: Callable[..., Any]
) -> None:
    server, folder = logging
    own = {"authorization": f"Bearer {KEY}", "x-request-id": "mine-1"}
    good = b'{"instances": [[1.5], [77.25]]}'
    port = server.rest_port
    assert ask_at(port, "/v1/models/half:predict", good, **own).status == 200
    own["x-request-id"] = "a\tb"
    assert ask_at(port, "/v1/models/half:predict", b'{"instances": [["x"]]}', **own).status == 400
    assert ask_at(port, "/v1/models/half:predict", good).status == 401
    channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}")
    stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "half"
    request.inputs["x"].CopyFrom(tf.make_tensor_proto([[4.0]]))
    answer = stub.Predict(request, metadata=[("x-api-key", KEY), ("x-request-id", "mine-2")])
    request.model_spec.name = "none\n"
    with pytest.raises(grpc.RpcError):
        stub.Predict(request, metadata=[("x-api-key", KEY)])
    with pytest.raises(grpc.RpcError):
        stub.Predict(request)
    channel.close()

    lines = lines_of(folder, 6)

    first = lines[0]
    assert first["ms_total"] >= first["ms_run"] > 0
    assert first["ms_queue"] >= 0
    known = {"protocol", "method", "model", "version", "signature", "rows", "status", "request_id"}
    assert {name: first[name] for name in known} == {
        "protocol": "REST",
        "method": "POST /v1/models/half:predict",
        "model": "half",
        "version": 1,
        "signature": "serving_default",
        "rows": 2,
        "status": 200,
        "request_id": "mine-1",
    }
    assert (first["key"], first["bytes_in"], first["bytes_out"]) == ("shop", len(good), 35)
    assert first["peer"].startswith("127.0.0.1:")
    assert first["time"].endswith("Z")
    assert [(one["protocol"], one["status"], one["rows"], one["key"]) for one in lines[1:6]] == [
        ("REST", 400, 0, "shop"),
        ("REST", 401, 0, ""),
        ("GRPC", "OK", 1, "shop"),
        ("GRPC", "NOT_FOUND", 0, "shop"),
        ("GRPC", "UNAUTHENTICATED", 0, ""),
    ]
    assert len(lines[1]["request_id"]) == 16
    assert (lines[3]["request_id"], lines[3]["bytes_out"]) == ("mine-2", answer.ByteSize())
    assert lines[4]["model"] == "none\n"
    text = (folder / "access.log").read_text()
    assert KEY not in text
    assert "77.25" not in text


def test_a_log_that_was_moved_away_is_created_again(
    logging: tuple[Server, Path], ask_at: Callable[..., Any]
) -> None:
    server, folder = logging
    (folder / "access.log").rename(folder / "access.log.1")
    ask_at(server.rest_port, "/readyz")
    assert lines_of(folder, 1)[0]["method"] == "GET /readyz"


def test_a_client_that_left_before_its_body_was_whole_has_a_line_too(
    logging: tuple[Server, Path],
) -> None:
    server, folder = logging
    with socket.create_connection(("127.0.0.1", server.rest_port)) as client:
        head = f"POST /v1/models/half:predict HTTP/1.1\r\nX-Api-Key: {KEY}\r\nContent-Length: 99"
        client.sendall(f"{head}\r\n\r\n{{".encode())
        time.sleep(0.2)  # the server is to have read the head before the end comes
    wait_for(lambda: any(line["status"] == 499 for line in lines_of(folder, 1)))


def example(x: float) -> tf.train.Example:
    value = tf.train.Feature(float_list=tf.train.FloatList(value=[x]))
    return tf.train.Example(features=tf.train.Features(feature={"x": value}))


def test_what_was_logged_warms_the_next_version_unchanged(
    logging: tuple[Server, Path],
    exported: dict[str, Path],
    ask_at: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every kind of request; the last of the module, as it ends the server."""
    server, folder = logging
    own = {"authorization": f"Bearer {KEY}"}
    port = server.rest_port
    for n in range(3):
        ask_at(port, "/v1/models/half:predict", {"inputs": [[float(n)]]}, **own)
    ask_at(port, "/v1/models/words:predict", {"instances": ["cash"]}, **own)
    body = {"examples": [{"x": 3.0}], "context": {"x": 1.0}}
    ask_at(port, "/v1/models/judge:classify", body, **own)
    channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}")
    stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
    several = inference_pb2.MultiInferenceRequest()
    for signature, method in (("serving_default", "classify"), ("regress", "regress")):
        task = several.tasks.add(method_name=f"tensorflow/serving/{method}")
        task.model_spec.name, task.model_spec.signature_name = "judge", signature
    several.input.example_list.examples.append(example(2.0))
    stub.MultiInference(several, metadata=[("x-api-key", KEY)])
    classify = classification_pb2.ClassificationRequest()
    classify.model_spec.name = "judge"
    classify.input.example_list.examples.extend([example(1.0), example(2.0)])
    answer = stub.Classify(classify, metadata=[("x-api-key", KEY)])

    reload = model_management_pb2.ReloadConfigRequest()
    added = reload.config.model_config_list.config.add(name="half", base_path=str(tmp_path))
    added.logging_config.log_collector_config.filename_prefix = str(tmp_path / "elsewhere")
    models = model_service_pb2_grpc.ModelServiceStub(channel)
    with pytest.raises(grpc.RpcError, match="model_config_file only"):
        models.HandleReloadConfigRequest(reload, metadata=[("x-api-key", KEY)])
    channel.close()
    assert not [path for path in (folder / "logs").iterdir() if path.suffix == ".tfrecord"]
    server.stop()

    files = {path.name.split("-")[0]: path for path in (folder / "logs").iterdir()}
    assert {path.suffix for path in files.values()} == {".tfrecord"}
    assert set(files) == {"half", "judge"}
    log = prediction_log_pb2.PredictionLog
    half = [
        log.FromString(raw)
        for raw in tf.data.TFRecordDataset(str(files["half"])).as_numpy_iterator()
    ]
    last = half[-1]
    assert last.log_metadata.model_spec.version.value == 1
    assert last.log_metadata.sampling_config.sampling_rate == 1.0
    assert list(last.predict_log.request.inputs["x"].float_val) == [2.0]
    assert list(last.predict_log.response.outputs["y"].float_val) == [3.0]
    judged = [log.FromString(raw) for raw in read_records(files["judge"])]
    kinds = [one.WhichOneof("log_type") for one in judged]
    assert kinds == ["classify_log", "multi_inference_log", "classify_log"]
    assert judged[2].classify_log.request.input == classify.input
    assert judged[2].classify_log.response.result == answer.result
    assert judged[0].classify_log.request.input.example_list_with_context.context == example(1.0)

    for name, source, count in (("half", "half_plus_two", len(half)), ("judge", "judge", 3)):
        version = tmp_path / name / "1"
        shutil.copytree(exported[source], version)
        (version / "assets.extra").mkdir()
        shutil.copy(files[name], version / "assets.extra" / "tf_serving_warmup_requests")
        servable = Servable(1, version)
        with caplog.at_level("INFO", "stoker.serve.servables.servable"):
            assert servable.load(), servable.reason
        servable.unload()
        assert f"was warmed up with {count} requests of its own" in caplog.text


def answered(prefix: Path, array: Any, *, rate: float = 1.0) -> Answered:
    spec = ModelSpec(name="m", version=3)
    response = PredictResponse(model=spec, signature="serving_default", outputs={"y": array})
    return Answered(
        log=RequestLogConfig(prefix=str(prefix), rate=rate), response=response, inputs={"x": array}
    )


@pytest.mark.parametrize(
    ("rate", "least", "most"), [(0.0, 0, 0), (0.25, 150, 350), (0.75, 650, 850), (1.0, 1000, 1000)]
)
def test_the_configured_share_of_the_requests_is_logged(
    tmp_path: Path, rate: float, least: int, most: int
) -> None:
    """Of 1,000 requests; the bounds are seven standard deviations away."""
    import numpy as np

    dropped = Counter(LOG_DROPPED)
    log = RequestLog(dropped=dropped)
    for number in range(1000):
        log.add(answered(tmp_path / "m", np.full(1, number, np.float32), rate=rate))
    log.close()

    records = [raw for path in sorted(tmp_path.iterdir()) for raw in read_records(path)]
    assert least <= len(records) <= most
    assert dropped.total() == 0
    found = [prediction_log_pb2.PredictionLog.FromString(raw) for raw in records]
    numbers = [int(one.predict_log.request.inputs["x"].float_val[0]) for one in found]
    assert numbers == sorted(set(numbers)), "each once, in their order"
    assert {one.log_metadata.sampling_config.sampling_rate for one in found} <= {rate}
    if not rate:
        assert list(tmp_path.iterdir()) == []


def test_files_are_bounded_in_size_and_what_cannot_be_written_is_counted(tmp_path: Path) -> None:
    import numpy as np

    dropped = Counter(LOG_DROPPED)
    log = RequestLog(dropped=dropped, max_file_bytes=4096)
    for number in range(20):
        log.add(answered(tmp_path / "deep" / "m", np.full(100, number, np.float32)))
    (tmp_path / "file").write_text("")
    log.add(answered(tmp_path / "file" / "m", np.zeros(1)))
    log.close()

    files = sorted((tmp_path / "deep").iterdir())
    assert len(files) > 3
    assert all(path.stat().st_size <= 4096 for path in files)
    records = [raw for path in files for raw in read_records(path)]
    found = [prediction_log_pb2.PredictionLog.FromString(raw) for raw in records]
    assert [one.predict_log.request.inputs["x"].float_val[0] for one in found] == list(range(20))
    assert dropped.total() == 1


def test_a_log_keeps_its_limit_and_its_newest_records(tmp_path: Path) -> None:
    import numpy as np

    limit, prefix = 64 << 10, tmp_path / "m"
    dropped = Counter(LOG_DROPPED)
    (tmp_path / "other").write_bytes(b"x" * limit)
    log = RequestLog(dropped=dropped, max_bytes=limit)
    for number in range(400):
        log.add(answered(prefix, np.full(100, number, np.float32)))
    log.add(answered(prefix, np.zeros(limit, np.float32)))
    log.close()

    files = sorted(tmp_path.glob("m-*"))
    assert limit // 2 < sum(path.stat().st_size for path in files) <= limit
    assert all(path.suffix == ".tfrecord" for path in files)
    records = [raw for path in files for raw in read_records(path)]
    found = [prediction_log_pb2.PredictionLog.FromString(raw) for raw in records]
    numbers = [int(one.predict_log.request.inputs["x"].float_val[0]) for one in found]
    assert numbers == list(range(400 - len(numbers), 400))
    assert 0 < len(numbers) < 400
    assert dropped.total() == 1
    assert (tmp_path / "other").stat().st_size == limit


def test_a_server_keeps_the_limit_of_a_log_that_is_written_past_it(
    exported: dict[str, Path], tmp_path: Path, ask_at: Callable[..., Any]
) -> None:
    """3.2 MB of requests go through it; the limit is 1 MiB."""
    base = Repository(tmp_path / "models").push(exported["sums"], "sums").path.parent
    logs = tmp_path / "logs"
    (tmp_path / "config").write_text(
        f"""model_config_list {{ config {{ name: "sums" base_path: "{base}" logging_config {{
        log_collector_config {{ filename_prefix: "{logs}/sums" }}
        sampling_config {{ sampling_rate: 1 }} }} }} }}"""
    )
    config = ServeConfig(
        model_config_file=tmp_path / "config",
        request_log_bytes=1 << 20,
        rest_port=0,
        grpc_port=0,
        poll_s=0.1,
        lame_duck_s=0.0,
        drain_s=5,
    )
    server = Server(config)
    server.start()
    try:
        assert server.wait_until_ready(60)
        for number in range(80):
            body = {"instances": [[number] * 10_000]}
            assert ask_at(server.rest_port, "/v1/models/sums:predict", body).status == 200
    finally:
        server.stop()

    assert sum(path.stat().st_size for path in logs.iterdir()) <= 1 << 20
    records = [raw for path in sorted(logs.iterdir()) for raw in read_records(path)]
    last = prediction_log_pb2.PredictionLog.FromString(records[-1])
    assert last.predict_log.request.inputs["x"].float_val[0] == 79
    assert 10 < len(records) < 80


def test_nothing_waits_for_a_disk_that_does_not_answer() -> None:
    from threading import Event

    going_on, dropped = Event(), Counter(LOG_DROPPED)

    def write(_items: Any) -> None:
        going_on.wait(60)

    queue: Background[bytes] = Background(
        write, name="slow", on_drop=lambda count: dropped.add(count, log="slow")
    )
    for _ in range(40):
        queue.offer(b"", size=MAX_BYTES // 4)
    assert dropped.total() >= 40 - 4 - 4  # four under way, four that wait
    going_on.set()
    queue.close()


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        ('log_collector_config { type: "kafka" filename_prefix: "/x" }', "of the type 'file'"),
        ('log_collector_config { filename_prefix: "x" }', "an absolute path"),
        (
            'log_collector_config { filename_prefix: "/x" } sampling_config { sampling_rate: 2 }',
            "must lie in 0..1",
        ),
    ],
)
def test_a_wrong_logging_config_is_refused(tmp_path: Path, inside: str, said: str) -> None:
    text = f'config {{ name: "m" base_path: "/m" logging_config {{ {inside} }} }}'
    (tmp_path / "models").write_text(f"model_config_list {{ {text} }}")
    with pytest.raises(ConfigError, match=said):
        read_model_config(tmp_path / "models")


def test_an_access_log_that_cannot_be_written_is_reported_at_the_start(tmp_path: Path) -> None:
    config = ServeConfig(
        models={"m": tmp_path}, access_log=str(tmp_path / "no" / "x"), rest_port=0, grpc_port=0
    )
    with pytest.raises(ConfigError, match="a writable file"):
        Server(config)


def test_a_record_is_framed_as_tensorflow_frames_it(tmp_path: Path) -> None:
    from stoker.serve.servables.prediction_logs import framed

    with tf.io.TFRecordWriter(str(tmp_path / "theirs")) as writer:
        writer.write(b"hello")
    assert framed(b"hello") == (tmp_path / "theirs").read_bytes()
    assert struct.unpack("<Q", framed(b"hello")[:8]) == (5,)
