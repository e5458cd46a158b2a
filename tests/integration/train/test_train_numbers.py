"""Numbers gone wrong, and memory that runs out, done to the loop itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tests.integration.train.small import on_one_device, small_dataset, unwatched

from stoker.core.errors import UserError
from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.build import build_transform
from stoker.data.features.preprocessing.transform import Transform
from stoker.train.checkpoints.store import open_checkpoint, places
from stoker.train.config import CheckpointConfig, TrainConfig
from stoker.train.context.run_context import TrainResult
from stoker.train.health.divergence import DivergenceConfig
from stoker.train.loop import run
from stoker.train.loop.loop import fit
from stoker.train.optimizer.loss_scaling import all_finite, may_defer_finite_check
from stoker.train.setup.build_model import BuiltModel, build_model, prepare_process
from stoker.train.setup.strategy import one_device

BATCH = 32
BAD_ROW = 70
SOAK = pytest.mark.soak


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Transform]:
    root = tmp_path_factory.mktemp("spoiled")
    dataset = small_dataset(root / "data", bad_row=BAD_ROW)
    return dataset, build_transform(dataset, None, root / "transform", label="y")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Transform]:
    root = tmp_path_factory.mktemp("sound")
    dataset = small_dataset(root / "data")
    return dataset, build_transform(dataset, None, root / "transform", label="y")


def build(features: dict[str, Any]) -> keras.Model:
    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    x = layers.Dense(8, activation="tanh", name="hidden")(x)
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy")
    return model


def train(
    data: tuple[Dataset, Transform],
    folder: Path,
    *,
    function: Any = build,
    resolved: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[TrainResult, BuiltModel]:
    config = TrainConfig(**{"epochs": 2} | settings)
    precision = settings.get("precision", "float32")
    prepare_process(precision=precision, seed=0, deterministic=False)
    built = build_model(function, data[1], what="model:build")
    chosen = on_one_device(**{"steps_per_call": 3, "precision": precision} | (resolved or {}))
    try:
        result = fit(
            built,
            data,
            config=config,
            resolved=chosen,
            distribution=one_device(),
            context=unwatched(folder),
        )
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    return result, built


def weights_are_finite(folder: Path) -> bool:
    found = [open_checkpoint(path) for path in places(folder)]
    values = [value for each in found for value in each.arrays().values()]
    return bool(found) and all(
        np.isfinite(value.astype(np.float64)).all() for value in values if value.dtype.kind == "f"
    )


def test_a_nan_in_the_data_ends_the_run_at_its_step_with_its_feature_and_row(
    spoiled: tuple[Dataset, Transform], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"the loss of step [1-7] must be finite") as raised:
        train(spoiled, tmp_path)

    assert "It began in feature a" in raised.value.line()
    assert "of its batch" in raised.value.line()
    assert weights_are_finite(tmp_path)


def test_after_a_rollback_training_goes_on_without_the_bad_samples(
    spoiled: tuple[Dataset, Transform], tmp_path: Path
) -> None:
    """The row comes once an epoch, in another step each, and costs the budget once."""
    result, built = train(spoiled, tmp_path, on_nan="rollback", nan_budget=1)

    assert result.steps == 14
    assert len(result.health["rollbacks"]) == 2
    assert all(np.isfinite(v.numpy()).all() for v in built.model.weights)
    assert weights_are_finite(tmp_path)
    assert result.metrics["val_loss"] < 0.69


def test_a_spent_budget_of_rollbacks_ends_the_run(
    spoiled: tuple[Dataset, Transform], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"train\.nan_budget allows 0 rollback"):
        train(spoiled, tmp_path, on_nan="rollback", nan_budget=0)

    assert weights_are_finite(tmp_path)


def test_a_layer_that_makes_infinities_is_named(
    sound: tuple[Dataset, Transform], tmp_path: Path
) -> None:
    def broken(features: dict[str, Any]) -> keras.Model:
        x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
        x = layers.Dense(4, name="fine")(x)
        x = layers.Activation(lambda t: keras.ops.log(t * 0.0), name="logarithm")(x)
        model = keras.Model(features, layers.Dense(1)(x))
        model.compile(optimizer="sgd", loss="mse")
        return model

    with pytest.raises(UserError, match="logarithm"):
        train(sound, tmp_path, function=broken)


MIN = -2.38
"""One row of the sound training split lies below it."""


class Rooted(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Its values are finite, and a gradient is NaN where a row's `a` is not above a bound."""

    def __init__(self, bound: float) -> None:
        super().__init__(name="rooted")
        self.bound = bound

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        # The slope of a root is infinite at 0, and 0 times it is NaN.
        return x + keras.ops.sqrt(keras.ops.relu(x[:, :1] - self.bound) * self.scale)


def rooted(features: dict[str, Any]) -> keras.Model:
    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    x = layers.Dense(8, activation="tanh", name="hidden")(Rooted(MIN)(x))
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy")
    return model


def rooted_own(features: dict[str, Any]) -> keras.Model:
    class RootedOwn(keras.Model):  # type: ignore[misc]  # Keras has no types
        """Reads its loss before the update: that one is finite."""

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    plain = rooted(features)
    model = RootedOwn(plain.inputs, plain.outputs)
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy")
    return model


OFTEN = CheckpointConfig(every_steps=1, keep_last=100)


@pytest.mark.parametrize(
    ("xla", "per_call"),
    [
        (False, 1),
        pytest.param(False, 3, marks=SOAK),
        # That a program of XLA ends at such a step, test_train_one_program shows.
        pytest.param(True, 1, marks=SOAK),
        pytest.param(True, 3, marks=SOAK),
    ],
    ids=["plain-1", "plain-3", "xla-1", "xla-3"],
)
def test_a_gradient_that_is_not_finite_ends_the_run_at_its_step_though_the_loss_is(
    sound: tuple[Dataset, Transform],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    xla: bool,
    per_call: int,
) -> None:
    """The weights were damaged before anybody looked: no checkpoint may have seen them."""
    with pytest.raises(UserError, match=r"gradients? of step (\d+) must be finite") as raised:
        train(
            sound,
            tmp_path,
            function=rooted,
            checkpoint=OFTEN,
            resolved={"steps_per_call": per_call, "xla": xla},
        )

    assert "checks each step" in caplog.text
    assert "passes back through rooted" in raised.value.line()
    assert weights_are_finite(tmp_path)
    # The same as of a run that looks first.
    monkeypatch.setattr(run, "may_defer_finite_check", lambda *_: False)
    same = {"steps_per_call": per_call, "xla": xla}
    with pytest.raises(UserError) as first:
        train(sound, tmp_path / "first", function=rooted, resolved=same)
    assert raised.value.line() == first.value.line()


@pytest.mark.parametrize("per_call", [pytest.param(1, marks=SOAK), 3])
def test_a_step_of_the_users_that_is_not_finite_reaches_no_checkpoint(
    sound: tuple[Dataset, Transform], tmp_path: Path, per_call: int
) -> None:
    """Its loss is finite, the weights that it has written are not."""
    at: dict[str, Any] = {"steps_per_call": per_call}
    with pytest.raises(UserError, match=r"gradients? of step (\d+) must be finite") as raised:
        train(sound, tmp_path / "own", function=rooted_own, checkpoint=OFTEN, resolved=at)
    with pytest.raises(UserError) as ours:
        train(sound, tmp_path / "ours", function=rooted, resolved=at)

    assert weights_are_finite(tmp_path / "own")
    step = re.compile(r"of step \d+")
    assert step.findall(raised.value.line()) == step.findall(ours.value.line())
    assert "weight rooted/scale, after the step" in raised.value.line()
    assert "The model's train_step updated it before it could be checked" in raised.value.line()

    result, built = train(
        sound,
        tmp_path / "back",
        function=rooted_own,
        checkpoint=OFTEN,
        resolved=at,
        on_nan="rollback",
    )
    # The row is met once in each of two epochs.
    assert len(result.health["rollbacks"]) == 2
    assert all(np.isfinite(variable.numpy()).all() for variable in built.model.weights)
    assert weights_are_finite(tmp_path / "back")


@pytest.mark.parametrize("per_call", [pytest.param(1, marks=SOAK), 3, pytest.param(7, marks=SOAK)])
def test_steps_that_update_at_once_lead_to_the_bits_of_those_that_look_first(
    sound: tuple[Dataset, Transform],
    spoiled: tuple[Dataset, Transform],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    per_call: int,
) -> None:
    """Also where a run finds something, goes back, and looks first from then on."""

    def weights(name: str, data: tuple[Dataset, Transform]) -> list[Any]:
        settings = {"on_nan": "rollback", "checkpoint": OFTEN}
        at = {"steps_per_call": per_call}
        _, built = train(data, tmp_path / name, resolved=at, **settings)
        return [variable.numpy() for variable in built.model.weights]

    at_once = [*weights("sound", sound), *weights("spoiled", spoiled)]
    monkeypatch.setattr(run, "may_defer_finite_check", lambda *_: False)
    looked = [*weights("sound-looked", sound), *weights("spoiled-looked", spoiled)]

    for one, other in zip(at_once, looked, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_could_hide_a_bad_gradient_is_looked_at_first() -> None:
    def may(*, constraint: Any = None, **optimizer: Any) -> bool:
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1, kernel_constraint=constraint)])
        model.compile(optimizer=keras.optimizers.Adam(**optimizer), loss="mse")
        return may_defer_finite_check(model, TrainConfig(), on_one_device())

    class Own(keras.optimizers.SGD):  # type: ignore[misc]  # Keras has no types
        pass

    assert may()
    assert may(clipnorm=1.0)
    plain = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    plain.compile(optimizer="sgd", loss="mse")
    exactly = TrainConfig(deterministic=True)
    assert may_defer_finite_check(plain, exactly, on_one_device())
    assert not may_defer_finite_check(plain, exactly, on_one_device(xla=True))
    assert not may(clipvalue=1.0)
    assert not may(constraint=keras.constraints.MaxNorm())
    scaled = keras.mixed_precision.LossScaleOptimizer
    for optimizer, replicas, may_be in (
        (Own(), 1, False),
        (scaled(Own()), 1, False),
        (scaled(keras.optimizers.SGD()), 2, False),
        # The device looks at each gradient before anything is done to it.
        (scaled(keras.optimizers.SGD()), 1, True),
        (scaled(keras.optimizers.SGD(clipvalue=1.0)), 1, True),
    ):
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        model.compile(optimizer=optimizer, loss="mse")
        resolved = on_one_device(replicas=replicas)
        assert may_defer_finite_check(model, TrainConfig(), resolved) is may_be


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop", "Adagrad", "Ftrl", "Lion", "Adafactor"])
@pytest.mark.parametrize("clip", [{}, {"clipnorm": 1.0}, {"global_clipnorm": 1.0}], ids=str)
def test_no_optimizer_of_kerass_hides_a_bad_gradient(
    name: str, value: float, clip: dict[str, float]
) -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4, use_bias=False)])
    model.compile(optimizer=getattr(keras.optimizers, name)(**clip), loss="mse")
    optimizer, variables = model.optimizer, model.trainable_variables
    optimizer.build(variables)
    optimizer.apply([tf.ones((4, 4))], variables)
    assert all_finite(model)

    optimizer.apply([tf.tensor_scatter_nd_update(tf.ones((4, 4)), [[1, 2]], [value])], variables)
    # And it stays there.
    optimizer.apply([tf.ones((4, 4))], variables)

    assert not all_finite(model)


def test_divergence_is_reported_and_recorded(
    sound: tuple[Dataset, Transform], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def wild(features: dict[str, Any]) -> keras.Model:
        x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
        model = keras.Model(features, layers.Dense(1)(x))
        model.compile(optimizer=keras.optimizers.SGD(1.2), loss="mse")
        return model

    result, _ = train(
        sound,
        tmp_path,
        function=wild,
        epochs=6,
        resolved={"steps_per_call": 1},
        divergence=DivergenceConfig(updates=5, window=20),
    )

    assert any("training diverges" in line for line in result.health["findings"])
    assert "training diverges" in caplog.text


def hungry(features: dict[str, Any]) -> keras.Model:
    """Its loss takes 4 TiB for 16 rows and more, and nothing for fewer."""

    class Hungry(keras.Model):  # type: ignore[misc]  # Keras has no types
        def compute_loss(
            self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
        ) -> Any:
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            if not training:
                return loss
            return loss + tf.reduce_sum(
                tf.random.uniform(tf.stack([tf.shape(y)[0] // 16, 1 << 20, 1 << 20]))
            )

    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    x = layers.Dense(8, activation="tanh")(x)
    model = Hungry(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy")
    return model


def hungry_own(features: dict[str, Any]) -> keras.Model:
    """Its own `train_step` takes 4 TiB."""

    class HungryOwn(keras.Model):  # type: ignore[misc]  # Keras has no types
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            taken = tf.reduce_sum(
                tf.random.uniform(tf.stack([tf.shape(data[1])[0], 1 << 20, 1 << 20]))
            )
            return logs | {"loss": logs["loss"] + 0.0 * taken}

    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    model = HungryOwn(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy")
    return model


@pytest.fixture(scope="module")
def out_of_memory() -> dict[str, Any]:
    """What a process of its own saw of `hungry`, in which nothing waits for memory."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("oom_scenarios.py"))],
        env=os.environ | {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def test_a_step_that_does_not_fit_is_cut_and_learns_the_same(
    out_of_memory: dict[str, Any],
) -> None:
    """32 -> 16 -> 8 rows a pass, 1 -> 2 -> 4 passes: the global batch stays."""
    assert out_of_memory["reductions"] == 2
    assert any(
        "train.batch_size 16 -> 8, train.accumulate 2 -> 4" in line
        for line in out_of_memory["said"]
    )
    assert out_of_memory["alike"]


def test_the_batch_of_a_custom_step_is_not_reduced_and_a_message_says_so(
    out_of_memory: dict[str, Any],
) -> None:
    said = out_of_memory["own"]

    assert said.startswith(
        "a step of train.batch_size 32 does not fit in memory; its batch is not reduced"
    )
    assert "HungryOwn.train_step takes a whole batch" in said
    assert "Received: out of memory: " in said
    assert said.endswith("Set train.batch_size to 16 or less, use train.remat.")


def test_on_oom_stop_gives_the_figure(out_of_memory: dict[str, Any]) -> None:
    assert "a step of train.batch_size 32 does not fit in memory" in out_of_memory["stopped"]
