"""The loop against Keras's own step, and what must not change its result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from numpy.typing import NDArray
from tests.integration.train.small import on_one_device, unwatched

from stoker.core.errors import ConfigError, UserError
from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.transform import Transform
from stoker.data.feed.order import shuffled_indices
from stoker.data.feed.pipeline import as_it_is
from stoker.telemetry.writers import Everywhere
from stoker.telemetry.writers.append_only import JsonLines
from stoker.telemetry.writers.tensorboard import TensorBoard
from stoker.train.checkpoints.state import TrainingState, restore_model
from stoker.train.checkpoints.store import best, places, read_manifest
from stoker.train.config import CheckpointConfig, TrainConfig
from stoker.train.context.run_context import TrainResult
from stoker.train.context.utilization import measure_ceiling
from stoker.train.loop.loop import fit
from stoker.train.setup.build_model import BuiltModel, build_model, prepare_process
from stoker.train.setup.strategy import one_device
from stoker.train.step.multi_step import make_multi_step, make_run_resident
from stoker.train.step.program import StepInput
from stoker.train.step.step import StepSettings, make_train_step

BATCH = 32
STEP_S = 0.03


def build(features: dict[str, keras.KerasTensor]) -> keras.Model:
    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    x = layers.Dense(8, activation="relu", kernel_regularizer=keras.regularizers.L2(0.01))(x)
    x = layers.BatchNormalization()(x)
    x = layers.Dropout(0.2)(x)
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
    optimizer = keras.optimizers.Adam(0.05, clipnorm=1.0)
    model.compile(optimizer=optimizer, loss="binary_crossentropy", metrics=["accuracy"])
    return model


def run(
    dataset: Dataset,
    transform: Transform,
    folder: Path,
    *,
    function: Callable[..., Any] = build,
    memory_bytes: int = 1 << 34,
    precision: Any = "float32",
    xla: bool = False,
    steps_per_call: int = 4,
    **settings: Any,
) -> tuple[TrainResult, BuiltModel]:
    config = TrainConfig(**{"epochs": 3, "batch_size": BATCH} | settings)
    resolved = on_one_device(steps_per_call=steps_per_call, precision=precision, xla=xla)
    prepare_process(precision=precision, seed=config.seed, deterministic=False)
    built = build_model(function, transform, what="model:build")
    writer = Everywhere([JsonLines(folder / "metrics.jsonl"), TensorBoard(folder / "tb")])
    try:
        result = fit(
            built,
            (dataset, transform),
            config=config,
            resolved=resolved,
            distribution=one_device(),
            context=unwatched(folder / "checkpoints", memory_bytes=memory_bytes, writer=writer),
        )
    finally:
        writer.close()
        keras.mixed_precision.set_dtype_policy("float32")
    return result, built


def weights(built: BuiltModel) -> list[Any]:
    return [np.asarray(variable.numpy()) for variable in built.model.variables]


@pytest.fixture(scope="module")
def plain(
    dataset: Dataset, transform: Transform, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainResult, list[Any]]:
    """The result and the weights of a run of `build` without further settings."""
    result, built = run(dataset, transform, tmp_path_factory.mktemp("plain"))
    return result, weights(built)


def test_the_loop_ends_where_kerass_own_step_ends_on_the_same_batches(
    dataset: Dataset, transform: Transform, plain: tuple[TrainResult, list[Any]]
) -> None:
    """Dropout's seeds, BatchNorm, regularisation, clipping and the short last batch included."""
    prepare_process(precision="float32", seed=0, deterministic=False)
    other = build_model(build, transform, what="model:build").model
    table = dataset.table("train").to_pandas()
    for epoch in range(3):
        order = shuffled_indices(np.arange(len(table)), size=len(table), seed=0, epoch=epoch)
        for start in range(0, len(table), BATCH):
            rows = table.iloc[order[start : start + BATCH]]
            features = {name: tf.constant(rows[name].to_numpy()) for name in ("a", "b")}
            other.train_on_batch(features, tf.constant(rows["y"].to_numpy()))

    for ours, theirs in zip(plain[1], other.variables, strict=True):
        np.testing.assert_allclose(ours, np.asarray(theirs.numpy()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"steps_per_call": 1}, marks=pytest.mark.soak),
        {"steps_per_call": 7},
        {"memory_bytes": 0},
    ],
)
def test_how_the_steps_are_run_does_not_change_what_is_learned(
    dataset: Dataset,
    transform: Transform,
    tmp_path: Path,
    plain: tuple[TrainResult, list[Any]],
    other: dict[str, Any],
) -> None:
    again, rebuilt = run(dataset, transform, tmp_path, **other)

    assert again.metrics["val_loss"] == pytest.approx(plain[0].metrics["val_loss"], rel=1e-4)
    for one, two in zip(plain[1], weights(rebuilt), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5)


@pytest.mark.soak
def test_xla_does_not_change_what_is_learned(
    dataset: Dataset, transform: Transform, tmp_path: Path
) -> None:
    """Without Dropout: XLA has random numbers of its own."""

    def plain(features: dict[str, keras.KerasTensor]) -> keras.Model:
        x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
        x = layers.BatchNormalization()(layers.Dense(8, activation="relu")(x))
        model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
        model.compile(optimizer="adam", loss="binary_crossentropy")
        return model

    _, built = run(dataset, transform, tmp_path / "a", function=plain)
    _, rebuilt = run(dataset, transform, tmp_path / "b", function=plain, xla=True)

    for one, two in zip(weights(built), weights(rebuilt), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "precision", ["mixed_bfloat16", pytest.param("mixed_float16", marks=pytest.mark.soak)]
)
def test_mixed_precision_learns_and_keeps_float32_weights(
    dataset: Dataset, transform: Transform, tmp_path: Path, precision: str
) -> None:
    result, built = run(dataset, transform, tmp_path, precision=precision, epochs=5)

    assert result.metrics["val_accuracy"] > 0.8
    assert all(v.dtype == "float32" for v in built.model.trainable_variables)


def test_measuring_the_ceiling_changes_nothing(dataset: Dataset, transform: Transform) -> None:
    prepare_process(precision="float32", seed=0, deterministic=False)
    built = build_model(build, transform, what="model:build")
    batch = (
        {name: tf.zeros([BATCH]) for name in ("a", "b")},
        tf.zeros([BATCH], tf.int64),
    )
    outputs = built.model(built.adapt(batch[0]), training=False)
    built.model.compute_metrics(x=batch[0], y=batch[1], y_pred=outputs)
    step = make_train_step(
        built, as_it_is, distribution=one_device(), settings=StepSettings(batch_size=BATCH)
    )
    state = TrainingState(built.model)
    before = {name: value.tobytes() for name, value in state.capture().items()}

    found = measure_ceiling(make_run_resident(step, batch), batch, state=state, seconds=0.02)

    assert 1e-6 < found.step_s < 1
    assert {name: value.tobytes() for name, value in state.capture().items()} == before


@pytest.mark.parametrize("checks_before_update", [True, False])
def test_the_wait_for_input_begins_where_the_step_has_ended(
    dataset: Dataset, transform: Transform, checks_before_update: bool
) -> None:
    """A batch comes every one and a half steps: counted from a step's begin, all were a wait."""
    prepare_process(precision="float32", seed=0, deterministic=False)

    def sleep(gradient: NDArray[np.float32]) -> NDArray[np.float32]:
        time.sleep(STEP_S)  # a step of a known length, however busy the machine is
        return gradient

    @tf.custom_gradient
    def slow(x: tf.Tensor) -> Any:
        def backward(gradient: tf.Tensor) -> tf.Tensor:
            # Nothing orders it after or before a clock but what depends on it, as any arithmetic.
            slept = tf.numpy_function(sleep, [gradient], tf.float32, stateful=False)
            return tf.ensure_shape(slept, x.shape)

        return tf.identity(x), backward

    class Slow(layers.Layer):  # type: ignore[misc]  # Keras has no types
        def call(self, x: Any) -> Any:
            return slow(x)

    def with_slow(features: dict[str, keras.KerasTensor]) -> keras.Model:
        x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
        model = keras.Model(features, layers.Dense(1)(Slow()(layers.Dense(4)(x))))
        model.compile(optimizer="sgd", loss="mse")
        return model

    def generate() -> Any:
        for _ in range(20 + 2):  # two calls, and what is taken ahead
            time.sleep(1.5 * STEP_S)  # as the step's
            yield {name: np.zeros(BATCH, np.float32) for name in ("a", "b")}, np.zeros(BATCH)

    built = build_model(with_slow, transform, what="model:build")
    column = tf.TensorSpec([BATCH], tf.float32)
    spec = ({"a": column, "b": column}, tf.TensorSpec([BATCH], tf.float32))
    settings = StepSettings(batch_size=BATCH, checks_before_update=checks_before_update)
    first = tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), spec)
    outputs = built.model(built.adapt(first[0]), training=False)
    built.model.compute_metrics(x=first[0], y=first[1], y_pred=outputs)
    step = make_train_step(built, as_it_is, distribution=one_device(), settings=settings)
    call = make_multi_step(step, rows_per_step=None)
    batches = tf.data.Dataset.from_generator(generate, output_signature=spec)
    step_input = StepInput(iterator=iter(batches), ahead=True)
    step_input.take_first()

    def timed() -> tuple[float, float]:
        begun_s = time.monotonic()
        sums = call(step_input.iterator, tf.constant(10, tf.int64), True, step_input.left)
        step_input.left = sums.left
        return time.monotonic() - begun_s, float(sums.wait_s)

    timed()
    wall_s, wait_s = timed()

    assert wall_s > 10 * STEP_S
    assert 0 <= wait_s < 0.7 * wall_s


def test_the_best_epoch_is_kept_and_its_metrics_are_those_of_its_weights(
    dataset: Dataset, transform: Transform, tmp_path: Path
) -> None:
    result, built = run(dataset, transform, tmp_path, epochs=6, monitor="val_accuracy")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["val_accuracy"] for line in lines if "val_accuracy" in line]

    assert len(accuracies) == 6
    assert result.best_epoch == 1 + int(np.argmax(accuracies))
    found = best(tmp_path / "checkpoints")
    assert found.facts["position"]["best_epoch"] == result.best_epoch
    assert found.step == result.best_epoch * 7
    restore_model(built.model, found.arrays(), average="ema")
    table = dataset.table("eval").to_pandas()
    answers = built.model(built.adapt({n: tf.constant(table[n].to_numpy()) for n in ("a", "b")}))
    accuracy = ((np.asarray(answers)[:, 0] > 0.5) == table["y"].to_numpy()).mean()
    assert accuracy == pytest.approx(result.metrics["val_accuracy"], abs=1e-6)
    assert list((tmp_path / "tb").glob("events.out.tfevents.*"))


def test_a_checkpoint_due_in_a_call_that_ends_an_epoch_is_written_after_the_validation(
    dataset: Dataset, transform: Transform, tmp_path: Path
) -> None:
    often = CheckpointConfig(every_steps=1, keep_last=9)
    # The first epoch is the best by this, so that no other is kept for being the best.
    worst: dict[str, Any] = {"monitor": "val_loss", "monitor_mode": "max"}
    result, _ = run(
        dataset, transform, tmp_path, steps_per_call=50, epochs=5, checkpoint=often, **worst
    )

    found = {read_manifest(path).step for path in places(tmp_path / "checkpoints")}
    assert result.best_epoch == 1
    epoch = result.steps // 5
    assert found & {2 * epoch, 3 * epoch, 4 * epoch}


def test_a_loss_that_is_not_a_number_stops_at_its_step_and_leaves_no_checkpoint(
    dataset: Dataset, transform: Transform, tmp_path: Path
) -> None:
    def broken(features: dict[str, keras.KerasTensor]) -> keras.Model:
        model = build(features)
        model.compile(optimizer=keras.optimizers.SGD(1e30), loss="mse")
        return model

    with pytest.raises(UserError, match=r"of step \d+ must be finite"):
        run(dataset, transform, tmp_path, function=broken)
    assert not (tmp_path / "checkpoints" / "last").exists()


def test_a_loss_that_does_not_fit_the_label_is_one_line(
    dataset: Dataset, transform: Transform, tmp_path: Path
) -> None:
    def mismatched(features: dict[str, keras.KerasTensor]) -> keras.Model:
        column = keras.ops.expand_dims(features["a"], -1)
        model = keras.Model(features, layers.Dense(3)(column))
        model.compile(optimizer="adam", loss="categorical_crossentropy")
        return model

    with pytest.raises(ConfigError, match="a first batch through the model and its loss"):
        run(dataset, transform, tmp_path, function=mismatched)


def test_a_monitor_that_the_model_has_not_is_named_with_the_nearest(
    dataset: Dataset, transform: Transform, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'val_accuracy'"):
        run(dataset, transform, tmp_path, monitor="val_acuracy")
