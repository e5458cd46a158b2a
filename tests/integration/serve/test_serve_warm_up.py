"""Requests that warm up a version, added to its folder after the push."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_log_pb2

from stoker.core.errors import DataError
from stoker.registry.repository import WARM_UP_FILE, Repository, verify
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.servables.servable import LoadOptions, Servable


def write_requests(version: Path, *xs: float) -> Path:
    """As TensorFlow Serving's documentation has it written: by TFRecordWriter, into the version's folder."""
    path = version / WARM_UP_FILE
    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for x in xs:
            request = predict_pb2.PredictRequest()
            request.model_spec.name = "half"
            request.inputs["x"].CopyFrom(tf.make_tensor_proto([[x]], tf.float32))
            log = prediction_log_pb2.PredictionLog(
                predict_log=prediction_log_pb2.PredictLog(request=request)
            )
            writer.write(log.SerializeToString())
    return path


def test_a_pushed_version_takes_requests_that_were_added_next_to_it_later(
    exported: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repository = Repository(tmp_path)
    version = repository.push(exported["half_plus_two"], "half").path
    write_requests(version, 1.0, 2.0)
    assert repository.push(exported["half_plus_two"], "half").already
    servable = Servable(1, version)

    with caplog.at_level("INFO", "stoker.serve.servables.servable"):
        assert servable.load(), servable.reason
    servable.unload()

    assert "was warmed up with 2 requests of its own" in caplog.text


def test_each_request_is_run_as_often_as_the_flag_says(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    """TensorFlow Serving's `--num_request_iterations_for_warmup`."""
    metrics = ServeMetrics()
    version = Repository(tmp_path).push(exported["half_plus_two"], "half").path
    write_requests(version, 1.0, 2.0)
    servable = Servable(1, version, LoadOptions(metrics=metrics, warm_up_times=3))

    assert servable.load(), servable.reason
    servable.unload()

    assert metrics.processed_batch_size.total() == 6.0


def test_any_other_file_is_refused_and_so_are_requests_that_were_pushed_and_changed(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    repository = Repository(tmp_path / "models")
    version = repository.push(exported["half_plus_two"], "half").path
    path = write_requests(version, 1.0)
    with_requests = repository.push(version, "warmed").path
    assert verify(with_requests)

    path.with_name("other").write_bytes(b"x")
    write_requests(with_requests, 2.0)

    with pytest.raises(DataError, match="not in its manifest"):
        verify(version)
    with pytest.raises(DataError, match="bytes that differ from the pushed ones"):
        verify(with_requests)
