"""What serving does for GPUs, as far as a CPU shows it: sizes, limits, models that XLA compiles."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.export import ExportArchive
from tensorflow_serving.apis import predict_pb2, prediction_log_pb2

from stoker.registry.exported_model import INLINE, LoadedModel, has_gpu, session_config
from stoker.registry.repository import WARM_UP_FILE
from stoker.serve.batching.config import BatchingConfig
from stoker.serve.batching.sizes import with_sizes
from stoker.serve.servables.servable import LoadOptions, Servable, State

Call = Callable[..., Any]


def write(path: Path, call: Call, spec: Sequence[tf.TensorSpec], *tracked: Any) -> Path:
    archive = ExportArchive()
    for each in tracked:
        archive.track(each)
    archive.add_endpoint("serving_default", call, input_signature=list(spec))
    archive.write_out(str(path), verbose=False)
    return path


@pytest.fixture(scope="module")
def by_xla(tmp_path_factory: pytest.TempPathFactory) -> tuple[keras.Model, Path]:
    """A Keras model whose exported call XLA must compile."""
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8, activation="relu")])
    call = tf.function(lambda x: {"y": model(x, training=False)}, jit_compile=True)
    spec = [tf.TensorSpec([None, 16], tf.float32, name="x")]
    return model, write(tmp_path_factory.mktemp("xla") / "1", call, spec, model)


def write_limited(path: Path, *, rows: int) -> Path:
    """A model in which no more than so many rows find room.

    TensorFlow refuses the others with the error that it has for memory, but at once: an allocator waits
    10 s for others to give some back.
    """
    area: Any = {"shared_name": str(path), "memory_limit": max(rows * 4, 1)}

    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.control_dependencies([tf.raw_ops.Stage(values=[x], **area)]):
            return {"y": tf.raw_ops.Unstage(dtypes=[tf.float32], **area)[0]}

    spec = [tf.TensorSpec([None], tf.float32, name="x")]
    return write(path / "1", tf.function(call), spec)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every run of a model that the test loads, in order."""
    rows: list[int] = []
    run = LoadedModel.run
    # A server of another test may still run its model.
    others = {id(each) for each in gc.get_objects() if isinstance(each, LoadedModel)}

    def noting(self: LoadedModel, signature: str, arrays: Sequence[np.ndarray]) -> Any:
        if id(self) not in others:
            rows.append(len(arrays[0]))
        return run(self, signature, arrays)

    monkeypatch.setattr(LoadedModel, "run", noting)
    return rows


def test_a_model_that_xla_must_compile_is_served_and_runs_only_sizes_that_were_compiled_at_load(
    by_xla: tuple[keras.Model, Path], shapes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model, path = by_xla
    servable = Servable(1, path, LoadOptions(batching=BatchingConfig(max_batch_size=6)))

    with caplog.at_level("INFO", "stoker.serve.servables.servable"):
        assert servable.load(), servable.reason
    at_load = list(shapes)
    rows = np.random.default_rng(1).normal(size=(6, 16)).astype(np.float32)
    with servable.use() as served:
        assert served is not None
        for count in (1, 3, 5, 6):
            found = served.call("serving_default", {"x": rows[:count]})["y"]
            np.testing.assert_allclose(found, model(rows[:count]), atol=1e-5)
    servable.unload()

    assert at_load == [1, 2, 4, 6]
    assert set(shapes) == set(at_load)
    assert "was warmed up with 4 runs of its batch sizes" in caplog.text


def test_a_compiled_model_that_looks_across_rows_is_found_out_without_another_size(
    tmp_path: Path, shapes: list[int]
) -> None:
    @tf.function(jit_compile=True)
    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"y": x - tf.reduce_mean(x)}

    path = write(tmp_path / "1", call, [tf.TensorSpec([None], tf.float32, name="x")])
    servable = Servable(1, path, LoadOptions(batching=BatchingConfig(max_batch_size=4)))
    assert servable.load(), servable.reason
    with servable.use() as served:
        assert served is not None
        served.call("serving_default", {"x": np.array([1, 2, 6], np.float32)})
        assert set(shapes) == {1, 2, 4}
        found = served.call("serving_default", {"x": np.array([1, 2, 6], np.float32)})["y"]
    servable.unload()

    np.testing.assert_allclose(found, [-2, -1, 3])


def test_sizes_are_given_on_a_gpu_and_if_configured_and_not_on_a_cpu() -> None:
    plain = BatchingConfig(max_batch_size=5)

    assert with_sizes(plain, "auto", compiled=False, gpu=False) == plain
    assert with_sizes(plain, "off", compiled=True, gpu=True) == plain
    assert with_sizes(plain, "on", compiled=False, gpu=False).allowed_batch_sizes == (1, 2, 4, 5)
    assert with_sizes(plain, "auto", compiled=False, gpu=True).allowed_batch_sizes == (1, 2, 4, 5)
    given = BatchingConfig(max_batch_size=8, allowed_batch_sizes=(3, 8))
    assert with_sizes(given, "auto", compiled=True, gpu=True).allowed_batch_sizes == (3, 8)


def test_what_refuses_zeros_is_warmed_by_the_first_of_its_own_requests(
    exported: dict[str, Path], tmp_path: Path, shapes: list[int]
) -> None:
    path = shutil.copytree(exported["image"], tmp_path / "1")
    request = predict_pb2.PredictRequest()
    png = tf.io.encode_png(np.zeros((2, 2, 3), np.uint8)).numpy()
    request.inputs["image_bytes"].CopyFrom(tf.make_tensor_proto([png]))
    log = prediction_log_pb2.PredictionLog()
    log.predict_log.request.CopyFrom(request)
    (path / WARM_UP_FILE).parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path / WARM_UP_FILE)) as writer:
        writer.write(log.SerializeToString())
    options = LoadOptions(warm_sizes="on", batching=BatchingConfig(max_batch_size=4))

    servable = Servable(1, path, options)
    assert servable.load(), servable.reason
    servable.unload()

    assert shapes == [1, 1, 2, 4]


def test_warming_ends_when_its_time_is_over(
    by_xla: tuple[keras.Model, Path], shapes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    servable = Servable(1, by_xla[1], LoadOptions(warm_s=0.0))

    assert servable.load(), servable.reason
    servable.unload()

    assert shapes == []
    assert "the time for warm-up ended before batches of 1 rows ran" in caplog.text


STAGED = LoadOptions(
    warm_sizes="on",
    batching=BatchingConfig(max_batch_size=16),
    allow_ops=frozenset(("Stage", "Unstage")),
)


def test_batches_that_do_not_fit_in_memory_are_found_at_load_and_never_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servable = Servable(1, write_limited(tmp_path, rows=3), STAGED)

    assert servable.load(), servable.reason
    with servable.use() as served:
        assert served is not None
        assert served.max_batch_size == 2
        found = served.call("serving_default", {"x": np.array([0, 1, 2], np.float32)})["y"]
        with pytest.raises(tf.errors.ResourceExhaustedError):
            served.call("serving_default", {"x": np.array([0, 1, 2, 3], np.float32)})
        after = served.call("serving_default", {"x": np.array([4], np.float32)})["y"]
    servable.unload()

    assert (found.tolist(), after.tolist()) == ([0, 1, 2], [4])
    assert (
        "batches are limited to 2 rows, because more do not fit in memory: Attempted" in caplog.text
    )


def test_a_model_that_does_not_fit_at_all_is_not_served_and_its_status_says_why(
    tmp_path: Path,
) -> None:
    servable = Servable(1, write_limited(tmp_path, rows=0), STAGED)

    assert not servable.load()
    assert servable.state is State.END
    assert "1 must fit in the memory of its device. Received: Attempted" in servable.reason
    assert "--per_process_gpu_memory_fraction" in servable.reason


def test_a_session_gets_the_limit_and_grows_up_to_it() -> None:
    """The order is TensorFlow's: the GPU settings of a process's first session apply to all."""
    config = session_config(gpu_memory_fraction=0.25)

    assert config.gpu_options.allow_growth
    assert config.gpu_options.per_process_gpu_memory_fraction == 0.25
    assert session_config().gpu_options.per_process_gpu_memory_fraction == 0.0
    given = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=3)
    assert session_config(given).intra_op_parallelism_threads == 3
    threads = session_config(given, intra_op_threads=1, inter_op_threads=2)
    assert (threads.intra_op_parallelism_threads, threads.inter_op_parallelism_threads) == (1, 2)
    assert has_gpu() == (config.inter_op_parallelism_threads != INLINE)
