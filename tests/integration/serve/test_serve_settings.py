"""Settings and their effect on a server: a version's own batching, the metrics' place, gRPC's limits."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2, saved_model_pb2
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc
from tests.integration.serve.conftest import started

from stoker.core.errors import ConfigError
from stoker.serve.batching.config import PARAMETERS_FILE, BatchingConfig
from stoker.serve.config import ServeConfig, read_metrics_path
from stoker.serve.limits import METRICS_PATH
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.process.server import Server, _session_config
from stoker.serve.servables.servable import LoadOptions, Servable

OWN = (
    "max_batch_size { value: 8 } allowed_batch_sizes: 4 allowed_batch_sizes: 8 "
    "batch_timeout_micros { value: 0 } max_enqueued_batches { value: 5 } "
    "num_batch_threads { value: 2 }"
)


@pytest.fixture(scope="module")
def version(exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version with parameters of its own."""
    path = tmp_path_factory.mktemp("own") / "1"
    shutil.copytree(exported["half_plus_two"], path)
    (path / PARAMETERS_FILE).write_text(OWN)
    return path


def rows_run(metrics: ServeMetrics) -> tuple[float, float]:
    """Rows that the model was run with, and those of them that fill up."""
    return metrics.processed_batch_size.total(), metrics.padding_size.total()


@pytest.mark.parametrize(
    ("per_model", "most", "run"),
    [(True, 8, (4.0, 1.0)), (False, 128, (3.0, 0.0))],
)
def test_a_versions_own_parameters_are_used_if_configured(
    version: Path, per_model: bool, most: int, run: tuple[float, float]
) -> None:
    metrics = ServeMetrics()
    servable = Servable(1, version, LoadOptions(per_model_batching=per_model, metrics=metrics))
    assert servable.load()
    try:
        with servable.use() as model:
            assert model is not None
            assert model.max_batch_size == most
            answer = model.call("serving_default", {"x": np.array([[0.0], [2.0], [4.0]], "f")})
            assert answer["y"][:, 0].tolist() == [2.0, 3.0, 4.0]
            assert rows_run(metrics) == run
            assert (model._config == BatchingConfig()) is not per_model
            if per_model:
                assert model._config == BatchingConfig(
                    max_batch_size=8,
                    allowed_batch_sizes=(4, 8),
                    max_enqueued_batches=5,
                    num_batch_threads=2,
                    larger="refuse",
                )
    finally:
        servable.unload()


def test_wrong_parameters_of_a_version_end_it_only_where_they_are_read(
    version: Path, tmp_path: Path
) -> None:
    shutil.copytree(version, tmp_path / "1")
    (tmp_path / "1" / PARAMETERS_FILE).write_text("max_batch_size: 8")

    ended = Servable(1, tmp_path / "1", LoadOptions(per_model_batching=True))
    assert not ended.load()
    assert PARAMETERS_FILE in ended.reason
    passed_over = Servable(1, tmp_path / "1")
    assert passed_over.load()
    passed_over.unload()


def test_the_graph_of_a_saved_model_is_the_one_with_the_requested_tags(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(exported["half_plus_two"], tmp_path / "1")
    file = tmp_path / "1" / "saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    (other,) = (meta.meta_info_def.tags for meta in saved.meta_graphs)
    other[:] = ["serve", "gpu"]
    file.write_bytes(saved.SerializeToString())

    plain = Servable(1, tmp_path / "1")
    assert not plain.load()
    assert "the tag 'serve'. Received: graphs with the tags ['gpu', 'serve']" in plain.reason
    other_one = Servable(1, tmp_path / "1", LoadOptions(saved_model_tags=("serve", "tpu")))
    assert not other_one.load()
    assert "'serve,tpu'" in other_one.reason
    tagged = Servable(1, tmp_path / "1", LoadOptions(saved_model_tags=("gpu", "serve")))
    assert tagged.load(), tagged.reason
    tagged.unload()


def test_mixed_precision_is_requested_of_tensorflow_and_only_in_bfloat16(version: Path) -> None:
    config = ServeConfig(models={"half": version.parent})
    rewrites = {
        wanted: _session_config(
            dataclasses.replace(config, mixed_precision=wanted)
        ).graph_options.rewrite_options.auto_mixed_precision_onednn_bfloat16
        for wanted in ("", "bfloat16")
    }

    assert rewrites == {"": 0, "bfloat16": rewriter_config_pb2.RewriterConfig.ON}
    with pytest.raises(ConfigError, match="bfloat16"):
        dataclasses.replace(config, mixed_precision="float16")


@pytest.fixture(scope="module")
def served(version: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that reads versions' own parameters, and has no metrics."""
    file = tmp_path_factory.mktemp("monitoring") / "monitoring.config"
    file.write_text('prometheus_config { enable: false path: "/metrics" }')
    config = ServeConfig(
        models={"half": version.parent},
        metrics_path=read_metrics_path(file),
        per_model_batching=True,
        rest_port=0,
        grpc_port=0,
        poll_s=0.05,
        lame_duck_s=0.0,
        drain_s=5,
    )
    with started(config) as server:
        yield server


def test_a_server_uses_a_versions_own_parameters(
    served: Server, ask_at: Callable[..., Any]
) -> None:
    before = rows_run(served.plane.metrics)
    body = {"instances": [[0.0]]}

    assert ask_at(served.rest_port, "/v1/models/half:predict", body).status == 200
    refused = ask_at(served.rest_port, "/v1/models/half:predict", {"instances": [[0.0]] * 9})

    assert rows_run(served.plane.metrics) == (before[0] + 4, before[1] + 3)
    assert refused.status == 400
    assert "larger than maximum input batch size 8" in refused.json()["error"]


@pytest.mark.parametrize("path", [METRICS_PATH, "/metrics"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_metrics_that_are_not_enabled_are_an_unknown_path(
    served: Server, ask_at: Callable[..., Any], path: str, method: str
) -> None:
    answer = ask_at(served.rest_port, path, method=method)
    unknown = ask_at(served.rest_port, "/nothing", method=method)

    assert (answer.status, answer.body) == (unknown.status, unknown.body) == (404, "")


def test_a_message_of_grpc_may_be_as_large_as_protobuf_has_them(served: Server) -> None:
    """TensorFlow Serving's: gRPC in Python would stop at 4 MiB."""
    limits = served._grpc.limits

    assert (limits.receive_bytes, limits.send_bytes) == (2**31 - 1, 2**31 - 1)


@pytest.mark.parametrize(
    ("name", "sent", "field"),
    [
        ("grpc.max_receive_message_length", -1, "receive_bytes"),
        ("grpc.max_send_message_length", -1, "send_bytes"),
    ],
)
def test_no_limit_of_messages_is_protobufs_own(
    version: Path, name: str, sent: int, field: str
) -> None:
    config = ServeConfig(
        models={"half": version.parent},
        rest_port=0,
        grpc_port=0,
        lame_duck_s=0.0,
        grpc_channel_arguments={name: sent},
    )
    server = Server(config)
    try:
        assert getattr(server._grpc.limits, field) == 2**31 - 1
    finally:
        server.stop()


def test_an_answer_larger_than_the_limit_for_answers_is_refused(version: Path) -> None:
    config = ServeConfig(
        models={"half": version.parent},
        rest_port=0,
        grpc_port=0,
        poll_s=0.05,
        lame_duck_s=0.0,
        drain_s=5,
        grpc_channel_arguments={"grpc.max_send_message_length": 500},
    )
    server = Server(config)
    server.start()
    try:
        assert server.wait_until_ready(60)
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
            request = predict_pb2.PredictRequest()
            request.model_spec.name = "half"
            request.inputs["x"].CopyFrom(tf.make_tensor_proto(np.zeros((1, 1), np.float32)))
            assert list(stub.Predict(request, timeout=20).outputs["y"].float_val) == [2.0]
            request.inputs["x"].CopyFrom(tf.make_tensor_proto(np.zeros((200, 1), np.float32)))
            with pytest.raises(grpc.RpcError) as caught:
                stub.Predict(request, timeout=20)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        server.stop()
