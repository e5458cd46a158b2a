"""A run reports speed that it loses silently otherwise; a clean run reports nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers
from tests.integration.train.killed import Trainer
from tests.integration.train.small import on_one_device, unwatched

from stoker.core.errors import CheckFailed
from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.transform import Transform
from stoker.train.config import TrainConfig
from stoker.train.context.run_context import RunSetup, TrainResult
from stoker.train.health.degradation import RETRACES
from stoker.train.health.step_operations import step_operations
from stoker.train.loop.loop import fit
from stoker.train.loop.run_health import RunHealth
from stoker.train.setup.build_model import build_model, prepare_process
from stoker.train.setup.strategy import one_device
from stoker.train.watch.watch import Watch

HOST_CALLS = {"PyFunc", "PyFuncStateless", "EagerPyFunc", "Print", "PrintV2"}

Build = Callable[..., keras.Model]


def joined(features: dict[str, Any]) -> Any:
    return layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])


def clean(features: dict[str, Any]) -> keras.Model:
    """Products of 16 bits have sides in multiples of 8, and the answers are float32."""
    x = layers.Dense(8, dtype="float32", name="widened")(joined(features))
    x = layers.Dense(16, activation="tanh", name="hidden")(x)
    x = layers.Dropout(0.1)(layers.BatchNormalization()(x))
    return compiled(features, layers.Dense(1, activation="sigmoid", dtype="float32")(x))


def compiled(features: dict[str, Any], outputs: Any, **settings: Any) -> keras.Model:
    model = keras.Model(features, outputs)
    model.compile(optimizer="adam", loss="binary_crossentropy", **settings)
    return model


def train(
    data: tuple[Dataset, Transform],
    folder: Path,
    build: Build,
    *,
    context: dict[str, Any] | None = None,
    **resolved: Any,
) -> TrainResult:
    chosen = on_one_device(**resolved)
    prepare_process(precision=chosen.precision, seed=0, deterministic=False)
    try:
        return fit(
            build_model(build, data[1], what="model:build"),
            data,
            config=TrainConfig(epochs=1),
            resolved=chosen,
            distribution=one_device(),
            context=unwatched(folder, **context or {}),
        )
    finally:
        keras.mixed_precision.set_dtype_policy("float32")


class Graphs(Watch):
    """Keeps the graph of the step that a run is trained by."""

    def __init__(self) -> None:
        self.seen: list[tf.Graph] = []

    def graph(self, graph: tf.Graph) -> None:
        self.seen.append(graph)


@pytest.mark.parametrize(
    "resolved",
    [
        {},
        pytest.param({"precision": "mixed_bfloat16", "steps_per_call": 1}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_clean_run_finds_nothing_and_its_step_never_calls_python(
    dataset: Dataset, transform: Transform, tmp_path: Path, resolved: dict[str, Any]
) -> None:
    """Its products are in the graph that is walked: it is the step, and not a call to somewhere."""
    watch = Graphs()

    result = train((dataset, transform), tmp_path, clean, context={"watch": watch}, **resolved)

    assert result.health["findings"] == []
    [graph] = watch.seen
    operations = list(step_operations(SimpleNamespace(graph=graph)))
    assert sum(operation.kind == "MatMul" for operation in operations) >= 3
    # Our own clock is in Python once a test before this one has made the process deterministic.
    theirs = {operation.kind for operation in operations if not operation.is_own}
    assert HOST_CALLS.isdisjoint(theirs)


class Printing(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Prints nothing that anybody sees, and stops for it all the same."""

    def call(self, x: Any) -> Any:
        tf.print("", output_stream="file:///dev/null")
        return x


class InPython(layers.Layer):  # type: ignore[misc]  # Keras has no types
    def call(self, x: Any) -> Any:
        same = tf.py_function(lambda rows: rows, [x], x.dtype)
        return tf.ensure_shape(same, x.shape)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


class ByProduct(keras.metrics.Metric):  # type: ignore[misc]  # Keras has no types
    """A metric of somebody's own, which XLA does not compile with the step."""

    def __init__(self) -> None:
        super().__init__(name="by_product")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        wrong = keras.ops.cast(keras.ops.reshape(y_true, (-1, 1)), "float32") - y_pred
        self.total.assign_add(keras.ops.sum(keras.ops.matmul(keras.ops.transpose(wrong), wrong)))

    def result(self) -> Any:
        return self.total


def printing(features: dict[str, Any]) -> keras.Model:
    x = Printing(name="printing")(layers.Dense(8)(joined(features)))
    return compiled(features, layers.Dense(1, activation="sigmoid")(x))


def in_python(features: dict[str, Any]) -> keras.Model:
    x = InPython(name="in_python")(layers.Dense(8)(joined(features)))
    return compiled(features, layers.Dense(1, activation="sigmoid")(x))


def outside_xla(features: dict[str, Any]) -> keras.Model:
    x = layers.Dense(8, activation="tanh")(joined(features))
    outputs = layers.Dense(1, activation="sigmoid")(x)
    return compiled(features, outputs, metrics=[ByProduct()])


def of_30_units(features: dict[str, Any]) -> keras.Model:
    x = layers.Dense(8, dtype="float32")(joined(features))
    x = layers.Dense(30, activation="tanh", name="thirty")(x)
    return compiled(features, layers.Dense(1, activation="sigmoid", dtype="float32")(x))


def ends_in_16_bits(features: dict[str, Any]) -> keras.Model:
    x = layers.Dense(8, dtype="float32")(joined(features))
    x = layers.Dense(8, activation="tanh")(x)
    return compiled(features, layers.Dense(8, activation="sigmoid", name="answers")(x)[:, :1])


@pytest.mark.parametrize(
    ("build", "resolved", "said"),
    [
        (printing, {}, ("waits for the host", "PrintV2 in", "printing")),
        (in_python, {}, ("waits for the host", "EagerPyFunc in", "in_python")),
        (outside_xla, {"xla": True}, ("XLA is on", "it compiles", "not compiled: ")),
        (
            of_30_units,
            {"precision": "mixed_bfloat16"},
            ("not multiples of 8", "thirty", "(30 units)"),
        ),
        (
            clean,
            {"precision": "mixed_bfloat16", "batch_size": 30},
            ("not multiples of 8", "train.batch_size (30)"),
        ),
        (
            ends_in_16_bits,
            {"precision": "mixed_bfloat16"},
            ("outputs are computed in 16 bits by", "answers"),
        ),
    ],
    ids=["tf.print", "py_function", "xla", "30 units", "30 rows", "16 bits"],
)
def test_what_a_run_loses_is_in_its_record_and_in_its_log(
    dataset: Dataset,
    transform: Transform,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    build: Build,
    resolved: dict[str, Any],
    said: tuple[str, ...],
) -> None:
    result = train((dataset, transform), tmp_path, build, **resolved)

    [finding] = result.health["findings"]
    assert all(words in finding for words in said), finding
    assert finding in caplog.text


def test_a_run_under_a_keras_distribution_is_refused(
    dataset: Dataset, transform: Transform, tmp_path: Path
) -> None:
    mesh = keras.distribution.DeviceMesh((1,), ["batch"], devices=["cpu:0"])

    def build(features: dict[str, Any]) -> keras.Model:
        keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
        return clean(features)

    try:
        with pytest.raises(CheckFailed, match=r"keras\.distribution is set"):
            train((dataset, transform), tmp_path, build)
    finally:
        keras.distribution.set_distribution(None)


def test_a_step_that_is_traced_for_every_shape_is_reported_once(
    transform: Transform, tmp_path: Path
) -> None:
    """Of the run's own step it cannot come to that: its input has one signature."""

    @tf.function
    def step(rows: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(rows)

    built = build_model(clean, transform, what="model:build")
    setup = RunSetup(
        built=built,
        config=TrainConfig(),
        resolved=on_one_device(),
        distribution=one_device(),
        context=unwatched(tmp_path),
    )
    guard = RunHealth(setup)
    for rows in range(1, RETRACES + 1):
        step(tf.ones([rows]))
    guard.check_traces(step)
    assert guard.record()["findings"] == []

    step(tf.ones([RETRACES + 1]))
    guard.check_traces(step)
    guard.check_traces(step)

    [finding] = guard.record()["findings"]
    assert f"traced {RETRACES + 1} times" in finding


def test_a_model_made_outside_of_the_scope_ends_its_run(
    trainer: Trainer, dataset: Dataset, transform: Transform, tmp_path: Path
) -> None:
    """On two logical devices, in a process of its own; made inside, the same run goes through."""
    script = Path(__file__).with_name("scope_child.py")

    outside, inside = trainer.script(script, dataset.root, transform.root, tmp_path).splitlines()[
        -2:
    ]

    assert outside.startswith("variables were created outside the strategy's scope: ")
    assert "hidden/kernel" in outside
    assert inside == "[]"
