"""What TensorBoard is shown of a model, read back by TensorBoard's own reader."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from keras import layers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from stoker.core.errors import ConfigError
from stoker.core.incarnation import VARIABLE, take_next
from stoker.telemetry.writers.tensorboard import TensorBoard
from stoker.train.config import TensorBoardConfig
from stoker.train.watch import model_watch
from stoker.train.watch.model_watch import ModelWatch, WatchSchedule
from stoker.train.watch.profile import REQUEST, StepProfiler
from stoker.train.watch.summaries import (
    BUCKETS,
    embeddings_of,
    global_norm,
    gradient_histograms,
    gradients_of,
    graph_bytes,
    histogram,
    weight_histograms,
)

X, Y = np.random.default_rng(0).normal(size=(2, 16, 4)).astype(np.float32)


@contextmanager
def policy(name: str) -> Iterator[None]:
    keras.mixed_precision.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.mixed_precision.set_dtype_policy("float32")


def make_model(precision: str = "float32") -> keras.Model:
    keras.utils.set_random_seed(0)
    ids = keras.Input((), dtype="int64", name="ids")
    numbers = keras.Input((4,), name="numbers", dtype="float32")
    with policy(precision):
        inner = keras.Sequential(
            [layers.Embedding(5, 3, name="city"), layers.Flatten()], name="words"
        )
        x = layers.Concatenate()([inner(keras.ops.expand_dims(ids, -1)), numbers])
        x = layers.Dropout(0.5)(layers.BatchNormalization()(x))
        x = layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.1), name="dense")(x)
        model = keras.Model({"ids": ids, "numbers": numbers}, x)
        model.compile(optimizer=keras.optimizers.Adam(), loss="mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def loss_of(model: keras.Model) -> Callable[[], tf.Tensor]:
    inputs = {"ids": tf.constant([1, 2] * 8, tf.int64), "numbers": tf.constant(X)}

    def loss() -> tf.Tensor:
        outputs = model(inputs, training=True)
        return model.compute_loss(x=inputs, y=tf.constant(Y), y_pred=outputs, training=True)

    return loss


def state_of(model: keras.Model) -> list[bytes]:
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.asarray(v.numpy()).tobytes() for v in variables]


def read(folder: Path) -> EventAccumulator:
    guidance = {"tensors": 0, "scalars": 0}
    return EventAccumulator(str(folder), size_guidance=guidance).Reload()


@given(arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)))
def test_a_histogram_counts_every_finite_value_between_the_least_and_the_greatest(
    values: Any,
) -> None:
    found = histogram(tf.constant(values))
    finite = values[np.isfinite(values)]

    assert found[:, 2].sum() == len(finite)
    if len(finite):
        clipped = np.clip(finite, -1e38, 1e38)
        assert found[0, 0] <= clipped.min() + 1e-30
        assert found[-1, 1] >= clipped.max() - 1e-30
        assert (found[1:, 0] == found[:-1, 1]).all()


def test_a_histogram_has_numpys_counts() -> None:
    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32)

    counts, edges = np.histogram(values, BUCKETS)
    found = histogram(tf.constant(values))

    np.testing.assert_allclose(found[:, 0], edges[:-1], atol=1e-6)
    # A value on the edge of two buckets may fall into either.
    assert np.abs(found[:, 2] - counts).sum() <= 4


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_gradients_are_those_of_a_training_step_and_looking_changes_nothing(precision: str) -> None:
    model = make_model(precision)
    if precision == "mixed_float16":
        # As after some steps: the scale that training begins with overflows.
        model.optimizer.dynamic_scale.assign(128.0)
    before = state_of(model)
    found = gradient_histograms(gradients_of(model, loss_of(model)))
    again = gradient_histograms(gradients_of(model, loss_of(model)))
    norm = global_norm(gradients_of(model, loss_of(model)))

    assert state_of(model) == before
    with tf.GradientTape() as tape:
        loss = loss_of(model)()
    assert state_of(model) != before
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    assert list(found) == [f"gradients/{v.path}" for v in model.trainable_variables]
    squares = [
        float(tf.reduce_sum(tf.cast(getattr(g, "values", g), tf.float64) ** 2)) for g in gradients
    ]
    assert norm == pytest.approx(np.sqrt(sum(squares)), rel=1e-2)
    assert global_norm({}) == 0.0
    for expected, tag in zip(gradients, found, strict=True):
        dense = expected.values if isinstance(expected, tf.IndexedSlices) else expected
        values = dense.numpy().astype(np.float64)
        tolerance = 1e-6 if precision == "float32" else 2e-3
        assert found[tag][0, 0] == pytest.approx(values.min(), rel=tolerance, abs=tolerance)
        assert found[tag][-1, 1] == pytest.approx(values.max(), rel=tolerance, abs=tolerance)
        assert found[tag][:, 2].sum() == values.size
        np.testing.assert_array_equal(found[tag], again[tag])


def compare_mirrored_with_plain() -> None:
    """Run by the test below, in a process that has two CPU devices."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = make_model()
    keras.backend.clear_session()
    plain = make_model()
    before = state_of(model)

    assert type(model.weights[0].value).__name__ == "MirroredVariable"
    assert set(weight_histograms(model)) == {f"weights/{v.path}" for v in model.weights}
    found = gradient_histograms(gradients_of(model, loss_of(model)))
    expected = gradient_histograms(gradients_of(plain, loss_of(plain)))
    assert list(found) == list(expected)
    for tag, theirs in expected.items():
        np.testing.assert_allclose(found[tag], theirs, rtol=1e-5, atol=1e-6)
    assert state_of(model) == before


def test_mirrored_weights_have_the_histograms_of_one_device() -> None:
    code = f"import runpy; runpy.run_path({__file__!r})['compare_mirrored_with_plain']()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_run_is_read_by_tensorboards_own_reader(tmp_path: Path) -> None:
    model = make_model()
    writer = TensorBoard(tmp_path)
    config = TensorBoardConfig(histograms_every_steps=2)
    terms = {"words/city": ["Rome", "Os\tlo", ""]}
    schedule = WatchSchedule(config=config, steps_per_epoch=4)
    watch = ModelWatch(model, writer, schedule=schedule, loss_of=loss_of(model), terms=terms)
    graph = tf.function(loss_of(model)).get_concrete_function().graph
    writer.settings({"train": {"epochs": 2}}, run="one")
    watch.begin(0)
    watch.graph(graph)
    for step in range(1, 9):
        writer.write(step, {"loss": 1 / step, "step_time_s": 0.1})
        watch.after(step, steps=1)
        if step % 4 == 0:
            metrics = {"loss": 2 / step, "val_loss": 3 / step, "epoch": step / 4}
            writer.write(step, metrics)
    writer.results(8, {"val_loss": 0.375}, succeeded=True)
    writer.close()

    train, validation = read(tmp_path / "train"), read(tmp_path / "validation")
    assert [event.step for event in train.Scalars("loss")] == list(range(1, 9))
    assert [event.value for event in train.Scalars("epoch_loss")] == [0.5, 0.25]
    assert [event.value for event in validation.Scalars("epoch_loss")] == [0.75, 0.375]
    assert [event.step for event in validation.Scalars("epoch_loss")] == [4, 8]
    for kind in ("weights", "gradients"):
        events = train.Tensors(f"{kind}/dense/kernel")
        assert [event.step for event in events] == [0, 2, 4, 6, 8]
        assert make_ndarray(events[0].tensor_proto)[:, 2].sum() == 7 * 4
    assert {node.op for node in train.Graph().node} >= {"MatMul", "Placeholder"}
    run = read(tmp_path)
    assert run.Scalars("best/val_loss")[0].value == 0.375
    assert {"_hparams_/session_start_info", "_hparams_/session_end_info"} <= set(
        run.Tags()["tensors"]
    )
    assert (tmp_path / "embeddings" / "words%2Fcity.labels.tsv").read_text().splitlines() == [
        *("Rome", "Os lo", '""', "[outside 0]", "[outside 1]")
    ]


@pytest.mark.parametrize(
    ("every", "steps", "shown"), [(None, 1400, [0, 4, 1192]), (4, 200, [*range(0, 201, 4)])]
)
def test_histograms_that_cost_more_than_a_hundredth_are_thinned_out_unless_their_rate_is_set(
    tmp_path: Path,
    every: int | None,
    steps: int,
    shown: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A step takes a second, a look at the weights four seconds."""
    model, clock = make_model(), [0.0]

    class Slow(TensorBoard):
        def histograms(self, step: int, histograms: Mapping[str, Any]) -> None:
            clock[0] += 4.0
            super().histograms(step, histograms)

    writer = Slow(tmp_path)
    config = TensorBoardConfig(histograms_every_steps=every, gradients=False)
    watch = ModelWatch(
        model,
        writer,
        schedule=WatchSchedule(config=config, steps_per_epoch=4),
        loss_of=loss_of(model),
        terms={},
        now_s=lambda: clock[0],
    )
    watch.begin(0)
    for step in range(1, steps + 1):
        clock[0] += 1.0
        watch.after(step, steps=1)
    writer.close()

    events = read(tmp_path / "train").Tensors("weights/dense/kernel")
    assert [event.step for event in events] == shown
    warnings = [
        r.getMessage() for r in caplog.records if "histograms take 4.00 s" in r.getMessage()
    ]
    assert len(warnings) == (1 if every is None else 0)


def test_gradients_of_a_large_model_wait_until_their_pass_is_a_hundredth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ResNet-50 on an H200: TensorBoard took 4 of 82 s."""
    monkeypatch.setattr(model_watch, "SMALL_WEIGHTS", 0)
    model, clock, writer = make_model(), [0.0], TensorBoard(tmp_path)
    watch = ModelWatch(
        model,
        writer,
        schedule=WatchSchedule(config=TensorBoardConfig(), steps_per_epoch=4),
        loss_of=loss_of(model),
        terms={},
        now_s=lambda: clock[0],
    )
    watch.begin(0)
    for step in range(1, 13):
        clock[0] += 35.0
        watch.after(step, steps=1)
    writer.close()

    shown = {
        kind: read(tmp_path / "train").Tensors(f"{kind}/dense/kernel")
        for kind in ("weights", "gradients")
    }
    assert [event.step for event in shown["weights"]] == [0, 4, 8, 12]
    assert [event.step for event in shown["gradients"]] == [12]


def test_every_scalar_is_there_however_many_steps_a_call_has(tmp_path: Path) -> None:
    """Keras's callback with `update_freq=5` lost all of an epoch's scalars."""
    writer = TensorBoard(tmp_path)
    for step in range(0, 1000, 5):
        writer.write(step, {"loss": float(step)})
        if step % 50 == 0:
            writer.write(step, {"val_loss": float(step), "epoch": step / 50})
    writer.close()

    assert len(read(tmp_path / "train").Scalars("loss")) == 200
    assert len(read(tmp_path / "validation").Scalars("epoch_loss")) == 20


def test_what_a_killed_run_wrote_for_later_steps_is_dropped_when_it_goes_on(tmp_path: Path) -> None:
    killed = TensorBoard(tmp_path)
    for step in range(1, 9):
        killed.write(step, {"loss": 1.0})
    killed.wait()
    resumed = TensorBoard(tmp_path)
    resumed.rewind(5)
    for step in range(6, 9):
        resumed.write(step, {"loss": 2.0})
    resumed.close()

    events = read(tmp_path / "train").Scalars("loss")
    assert [(event.step, event.value) for event in events] == [
        *((step, 1.0) for step in range(1, 6)),
        *((step, 2.0) for step in range(6, 9)),
    ]


def test_large_constants_are_not_part_of_the_graph() -> None:
    large = tf.constant(np.arange(100_000, dtype=np.float32))
    graph = tf.function(lambda x: x + tf.constant(large.numpy())).get_concrete_function(large).graph

    assert len(graph_bytes(graph)) < 10_000
    assert len(graph.as_graph_def().SerializeToString()) > 400_000


def test_an_embedding_that_is_not_there_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'words/city'"):
        embeddings_of(make_model(), {"words/cty": None})


def work(profiler: StepProfiler, first: int, last: int, *, at_once: int = 1) -> list[int]:
    """Runs steps as the loop does; the steps after which a call ended."""
    step = tf.function(lambda: tf.linalg.matmul(tf.ones([64, 64]), tf.ones([64, 64])))
    ends, done = [], first - 1
    while done < last:
        end = done + profiler.next_steps(done, min(at_once, last - done))
        for _ in range(end - done):
            step().numpy()
        done = end
        profiler.after(done)
        ends.append(done)
    profiler.close(done)
    return ends


def traces(folder: Path) -> list[Path]:
    return sorted(folder.glob("plugins/profile/*/*.xplane.pb"))


def steps_in(trace: Path) -> int:
    """Calls of the compiled step among the events of all threads."""
    space = xplane_pb2.XSpace.FromString(trace.read_bytes())
    return sum(
        plane.event_metadata[event.metadata_id].name == "FunctionRun"
        for plane in space.planes
        for line in plane.lines
        for event in line.events
    )


def test_a_profile_of_the_settings_holds_its_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = StepProfiler(tmp_path, tensorboard=tmp_path / "tb", steps="20:30")
    with caplog.at_level(logging.INFO):
        ends = work(profiler, 1, 100, at_once=50)

    assert ends == [19, 30, 80, 100]
    (trace,) = traces(tmp_path / "tb")
    assert steps_in(trace) == 11
    assert "profile of steps 20 to 30" in caplog.text


def test_a_file_asks_for_a_profile_while_training_runs(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, tensorboard=tmp_path / "tb", steps=None)
    work(profiler, 1, 3)
    assert not traces(tmp_path / "tb")
    (tmp_path / REQUEST).write_text("4\n")
    time.sleep(1.1)  # the profiler looks for a request once a second

    assert work(profiler, 4, 40, at_once=10) == [7, 17, 27, 37, 40]
    assert traces(tmp_path / "tb")[0].stat().st_size > 0
    assert not (tmp_path / REQUEST).exists()


def test_training_that_ends_within_a_profile_keeps_it(tmp_path: Path) -> None:
    work(StepProfiler(tmp_path, tensorboard=tmp_path / "tb", steps="2:30"), 1, 5)

    assert traces(tmp_path / "tb")[0].stat().st_size > 0


def test_an_earlier_start_of_a_job_writes_no_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{tmp_path}:{take_next(tmp_path)}")
    take_next(tmp_path)
    work(StepProfiler(tmp_path, tensorboard=tmp_path / "tb", steps="2:30"), 1, 5)

    assert not traces(tmp_path / "tb")


def test_a_profile_that_cannot_be_taken_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tf.profiler.experimental.start(str(tmp_path / "theirs"))
    try:
        work(StepProfiler(tmp_path, tensorboard=tmp_path / "tb", steps="2:3"), 1, 5)
    finally:
        tf.profiler.experimental.stop()

    assert "no profile of steps 2 to 3" in caplog.text
