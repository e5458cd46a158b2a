"""XLA tried while a run trains: nothing waits for it, both forms of the step are one training."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from numpy.typing import NDArray
from tests.integration.train.small import on_one_device, unwatched

from stoker.core import threads
from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.transform import Transform
from stoker.train.checkpoints.store import newest_good
from stoker.train.config import TrainConfig
from stoker.train.context.run_context import TrainResult
from stoker.train.loop.loop import fit
from stoker.train.setup.build_model import BuiltModel, build_model, prepare_process
from stoker.train.setup.strategy import one_device
from stoker.train.step import compiled, xla_trial
from stoker.train.step.program import Program
from stoker.train.watch.watch import Watch

EPOCHS = 20
"""Each of two calls."""

MEANWHILE = 3
"""Calls that training makes, at least, while XLA compiles."""


def build(features: dict[str, keras.KerasTensor]) -> keras.Model:
    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    # Both use other kernels if XLA does not compile: BatchNormalization and Adam.
    x = layers.BatchNormalization()(layers.Dense(4, activation="relu")(x))
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(layers.Dropout(0.1)(x)))
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
    return model


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run is too short; the compiler is waited for after some calls, however slow it is."""
    monkeypatch.setattr(xla_trial, "MIN_REMAINING_S", 0.0)
    monkeypatch.setattr(xla_trial, "SWITCH_S", -1e9)
    monkeypatch.setattr(xla_trial, "CALL_S", 0.0)
    monkeypatch.setattr(xla_trial, "FORM_S", 0.0)
    numbers: dict[int, int] = {}

    def ended(compiling: Any) -> bool:
        number = numbers[id(compiling)] = numbers.get(id(compiling), 0) + 1
        if number > MEANWHILE:
            compiling._thread.join()
        return number > MEANWHILE

    monkeypatch.setattr(xla_trial._Compiling, "ended", property(ended))


def run(
    dataset: Dataset,
    transform: Transform,
    folder: Path,
    *,
    function: Any = build,
    epochs: int = EPOCHS,
    xla_trial: bool = True,
    **context: Any,
) -> tuple[TrainResult, BuiltModel]:
    config = TrainConfig(epochs=epochs, batch_size=32)
    prepare_process(precision="float32", seed=0, deterministic=False)
    built = build_model(function, transform, what="model:build")
    result = fit(
        built,
        (dataset, transform),
        config=config,
        resolved=on_one_device(xla_trial=xla_trial),
        distribution=one_device(),
        context=unwatched(folder, **context),
    )
    return result, built


def weights(built: BuiltModel) -> list[NDArray[Any]]:
    model = built.model
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.asarray(variable.numpy()) for variable in variables]


class Spelled(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """A layer with an operation that XLA does not support; it returns its input."""

    def call(self, inputs: Any) -> Any:
        numbers = tf.strings.to_number(tf.strings.as_string(tf.stop_gradient(inputs)))
        return inputs + 0.0 * tf.ensure_shape(numbers, inputs.shape)


def tiny(features: dict[str, keras.KerasTensor], *, spelled: bool = False) -> keras.Model:
    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    x = layers.Dense(1, activation="sigmoid")(Spelled()(x) if spelled else x)
    model = keras.Model(features, x, name="tiny")
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
    return model


@pytest.fixture(scope="module")
def plain(
    dataset: Dataset, transform: Transform, tmp_path_factory: pytest.TempPathFactory
) -> BuiltModel:
    """`tiny` after a training without XLA."""
    folder = tmp_path_factory.mktemp("plain")
    return run(dataset, transform, folder, function=tiny, xla_trial=False)[1]


@pytest.fixture(scope="module")
def plain_large(
    dataset: Dataset, transform: Transform, tmp_path_factory: pytest.TempPathFactory
) -> BuiltModel:
    """`build` after such a training."""
    folder = tmp_path_factory.mktemp("plain")
    return run(dataset, transform, folder, xla_trial=False)[1]


class Seen(Watch):
    """Notes whether each change of the step stays."""

    def __init__(self) -> None:
        self.changes: list[bool] = []

    def step_changed(self, *, stays: bool) -> None:
        self.changes.append(stays)


def position_of(folder: Path) -> dict[str, Any]:
    found = newest_good(folder)
    assert found is not None
    position: dict[str, Any] = found.facts["position"]
    return position


def require_close(built: BuiltModel, other: BuiltModel) -> None:
    for one, two in zip(weights(built), weights(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("XLA: ")]


@pytest.mark.parametrize(
    "memory_bytes",
    [pytest.param(1 << 34, marks=pytest.mark.soak), 0],
    ids=["whole calls", "batches"],
)
def test_the_faster_step_stays_from_a_checkpoint_on_and_learns_the_same(
    dataset: Dataset,
    transform: Transform,
    tmp_path: Path,
    plain_large: BuiltModel,
    memory_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(xla_trial, "MARGIN", 0.0)
    watch = Seen()

    result, built = run(
        dataset, transform, tmp_path / "tried", memory_bytes=memory_bytes, watch=watch
    )

    position = position_of(tmp_path / "tried")
    assert position["xla"] is True
    assert result.xla == {"used": True, "why": position["xla_why"], "cache": None}
    assert lines(caplog) == [f"XLA: {position['xla_why']}"]
    assert "used from the checkpoint at step" in position["xla_why"]
    require_close(built, plain_large)
    # What is reported and traced is the step that the run ends with.
    assert (result.resolved.xla, result.resolved.why["xla"]) == (True, position["xla_why"])
    assert watch.changes == [False] * (len(watch.changes) - 1) + [True]
    assert len(watch.changes) > xla_trial.PAIRS
    assert any(does == "XLA compiles" for _, does in threads._threads)


def test_the_slower_step_goes_and_a_resumed_run_does_not_try_again(
    dataset: Dataset,
    transform: Transform,
    tmp_path: Path,
    plain: BuiltModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(xla_trial, "MARGIN", 1e9)

    result, built = run(dataset, transform, tmp_path / "tried", function=tiny)
    more, _ = run(dataset, transform, tmp_path / "tried", function=tiny, epochs=EPOCHS + 20)

    assert position_of(tmp_path / "tried")["xla"] is False
    assert not result.xla["used"]
    assert not result.resolved.xla
    assert not more.xla["used"]
    (said,) = lines(caplog)
    assert said.endswith("ms per step), not used")
    require_close(built, plain)


def test_a_resumed_run_follows_the_record_and_shows_what_it_compiles(
    dataset: Dataset,
    transform: Transform,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(xla_trial, "MARGIN", 0.0)
    monkeypatch.setattr(compiled, "SILENT_S", 0.0)
    run(dataset, transform, tmp_path, function=tiny)
    decided = position_of(tmp_path)["xla_why"]
    notices: list[str] = []

    result, _ = run(
        dataset, transform, tmp_path, function=tiny, epochs=EPOCHS + 1, on_wait=notices.append
    )

    assert result.xla == {"used": True, "why": decided, "cache": None}
    assert lines(caplog) == [f"XLA: {decided}"], "it was not tried again"
    assert notices[0] == "compiling, 0:00: the training step of tiny for 32 samples, by XLA"
    assert notices[-1].endswith("for 18 samples, by XLA"), "an epoch's last step has fewer rows"


class Killed(Exception):
    """In place of SIGKILL."""


@pytest.mark.soak
def test_a_run_killed_before_the_record_tries_again_and_learns_the_same(
    dataset: Dataset,
    transform: Transform,
    tmp_path: Path,
    plain: BuiltModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(xla_trial, "MARGIN", 0.0)

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(xla_trial.XlaTrial, "_decide", killed)
        with pytest.raises(Killed):
            run(dataset, transform, tmp_path / "tried", function=tiny)
    assert position_of(tmp_path / "tried")["xla"] is None

    _, built = run(dataset, transform, tmp_path / "tried", function=tiny)

    assert position_of(tmp_path / "tried")["xla"] is True
    require_close(built, plain)


def test_where_memory_runs_out_the_trial_ends_and_the_batch_stays(
    dataset: Dataset,
    transform: Transform,
    tmp_path: Path,
    plain: BuiltModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    call = Program.call

    def without_memory(program: Program, *args: Any, **options: Any) -> Any:
        sums = call(program, *args, **options)
        if program.xla:
            # After a step: the variables are at another step than the last checkpoint.
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
        return sums

    monkeypatch.setattr(Program, "call", without_memory)

    result, built = run(dataset, transform, tmp_path / "tried", function=tiny)

    assert lines(caplog) == ["XLA: not used, memory ran out during the trial"]
    assert result.health["reductions"] == []
    assert position_of(tmp_path / "tried")["batch_size"] == 32
    for one, other in zip(weights(built), weights(plain), strict=True):
        np.testing.assert_array_equal(one, other)


def in_a_process(folder: Path, cache: Path) -> dict[str, Any]:
    """What `xla_trial_child.py` tells."""
    folder.mkdir()
    child = Path(__file__).with_name("xla_trial_child.py")
    done = subprocess.run(
        [sys.executable, "-m", f"tests.integration.train.{child.stem}", folder, cache],
        cwd=child.parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    output: dict[str, Any] = json.loads(done.stdout)
    return output


@pytest.mark.soak
def test_only_the_background_compiles_and_the_next_process_nothing(tmp_path: Path) -> None:
    output = in_a_process(tmp_path / "one", tmp_path / "cache")

    assert output["xla"]["used"]
    # One for full steps, one for an epoch's last. Neither the first call with the real variables, nor
    # the other thirty, nor the measurement of the ceiling has compiled anything.
    assert output["files"] == output["xla"]["cache"]["written"] == 2
    assert output["written"]["4"] == 0, "training had begun before"
    assert output["calls"][0], "and went on meanwhile"

    again = in_a_process(tmp_path / "two", tmp_path / "cache")

    assert again["xla"]["used"]
    assert (again["xla"]["cache"]["found"], again["xla"]["cache"]["written"]) == (2, 0)


def test_what_xla_cannot_compile_costs_nothing(
    dataset: Dataset,
    transform: Transform,
    tmp_path: Path,
    plain: BuiltModel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spelled = partial(tiny, spelled=True)

    result, built = run(dataset, transform, tmp_path / "tried", function=spelled)

    assert not result.xla["used"]
    (said,) = lines(caplog)
    assert said.startswith("XLA: not used, ")
    assert "AsString" in said
    for one, other in zip(weights(built), weights(plain), strict=True):
        np.testing.assert_array_equal(one, other)
