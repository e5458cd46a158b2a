"""The loop against `Model.fit` on the same batches, with everything that a Keras user may use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import callbacks, layers
from tests.integration.train.small import on_one_device, unwatched

from stoker.core.errors import ConfigError
from stoker.core.multi_output import ONLY
from stoker.data.user_dataset.config import OwnDatasetConfig
from stoker.data.user_dataset.description import Count
from stoker.data.user_dataset.features import OwnFeatures
from stoker.data.user_dataset.load_dataset import OwnDataset, open_own_dataset
from stoker.train.callbacks.hooks import apply_user_hooks, require_label_of_each_output
from stoker.train.checkpoints.store import best, newest_good
from stoker.train.config import TrainConfig
from stoker.train.context.run_context import TrainResult
from stoker.train.loop.loop import fit
from stoker.train.setup.build_model import build_model, prepare_process
from stoker.train.setup.strategy import one_device

# Keras 3.15 reads its variables in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

STEPS, BATCH = 5, 8
ROWS = STEPS * BATCH - 3

Build = Callable[..., keras.Model]
Features = dict[str, keras.KerasTensor]


def rows(*, weighted: bool = False) -> tuple[Any, ...]:
    """`a` has two numbers, `b` one; the label is 0, 1 or 2."""
    random = np.random.default_rng(3)
    a, b = random.normal(size=(ROWS, 2)), random.normal(size=(ROWS, 1))
    label = (a.sum(axis=1) > 0).astype("int64") + (b[:, 0] > 0.5)
    parts = {"a": a.astype("float32"), "b": b.astype("float32")}, label
    return (*parts, random.uniform(size=ROWS).astype("float32")) if weighted else parts


def sliced(parts: tuple[Any, ...]) -> tf.data.Dataset[Any]:
    return tf.data.Dataset.from_tensor_slices(parts).batch(BATCH)


def opened(
    parts: tuple[Any, ...],
    make: Callable[[str], tf.data.Dataset[Any]] | None = None,
) -> OwnDataset:
    def dataset(split: str) -> tf.data.Dataset[Any]:
        return sliced(parts) if make is None else make(split)

    made = open_own_dataset(dataset, OwnDatasetConfig(dataset="model:dataset"))
    count = Count(batches=STEPS, rows=ROWS, batch_size=BATCH)
    return OwnDataset(
        what=made.what,
        description=made.description,
        datasets=made.datasets,
        counts={"train": count, "eval": count},
    )


def ours(
    build: Build,
    folder: Path,
    *,
    parts: tuple[Any, ...] | None = None,
    listed: Sequence[callbacks.Callback] = (),
    steps_per_call: int = 1,
    make: Callable[[str], tf.data.Dataset[Any]] | None = None,
    **settings: Any,
) -> tuple[keras.Model, TrainResult]:
    data = opened(parts or rows(), make)
    features = OwnFeatures(data.description)
    config = TrainConfig(**{"epochs": 2} | settings)
    prepare_process(precision="float32", seed=0, deterministic=False)
    built = build_model(build, features, what="model:build")
    resolved = on_one_device(
        batch_size=BATCH,
        accumulate=config.accumulate,
        steps_per_call=steps_per_call,
        xla=config.xla is True,
    )
    result = fit(
        built,
        (data, features),
        config=config,
        resolved=resolved,
        distribution=one_device(),
        context=unwatched(folder / "checkpoints", callbacks=listed),
    )
    return built.model, result


def kerass(
    build: Build,
    *,
    parts: tuple[Any, ...] | None = None,
    listed: Sequence[callbacks.Callback] = (),
    epochs: int = 2,
    class_weight: dict[int, float] | None = None,
    labeled: tuple[Any, ...] | None = None,
) -> tuple[keras.Model, dict[str, list[float]]]:
    data = opened(parts or rows())
    batches = tf.data.Dataset.from_tensor_slices(labeled or parts or rows()).batch(BATCH)
    prepare_process(precision="float32", seed=0, deterministic=False)
    model = build_model(build, OwnFeatures(data.description), what="model:build").model
    history = model.fit(
        batches,
        validation_data=batches,
        epochs=epochs,
        callbacks=list(listed),
        class_weight=class_weight,
        shuffle=False,
        verbose=0,
    )
    return model, history.history


def assert_same(one: keras.Model, other: keras.Model) -> None:
    for mine, theirs in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def of_best(history: dict[str, list[float]], result: TrainResult) -> Any:
    found = {name: values[result.best_epoch - 1] for name, values in history.items()}
    return pytest.approx(found, rel=1e-4)


def joined(features: Features) -> Any:
    return layers.Concatenate()([features["a"], features["b"]])


def classifier(features: Features) -> keras.Model:
    x = layers.Dense(6, activation="tanh", name="first")(joined(features))
    model = keras.Model(features, layers.Dense(3, activation="softmax")(x))
    model.compile(
        keras.optimizers.SGD(0.1),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    return model


def frozen(features: Features) -> keras.Model:
    x = layers.Dense(6, activation="tanh", trainable=False, name="frozen")(joined(features))
    x = layers.BatchNormalization(momentum=0.5)(x)
    x = layers.BatchNormalization(trainable=False, name="still")(x)
    x = layers.Dropout(0.5, seed=7)(x)
    model = keras.Model(features, layers.Dense(3, activation="softmax")(x))
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    return model


def two_heads(features: Features) -> keras.Model:
    x = layers.Dense(6, activation="tanh")(joined(features))
    heads = {
        "kind": layers.Dense(3, activation="softmax", name="kind")(x),
        "size": layers.Dense(1, name="size")(features["a"]),
    }
    model = keras.Model(features, heads)
    model.compile(
        keras.optimizers.SGD(0.1),
        {"kind": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.25},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    return model


class OwnStep(keras.Model):  # type: ignore[misc]  # Keras has no types
    """As Keras's guide writes it, but for a loss that is doubled."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            answers = self(x, training=True)
            loss = 2.0 * self.compute_loss(y=y, y_pred=answers, sample_weight=weight)
        gradients: Any = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=keras.ops.shape(y)[0])
            else:
                metric.update_state(y, answers)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        answers = self(x, training=False)
        loss = 3.0 * self.compute_loss(y=y, y_pred=answers)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=keras.ops.shape(y)[0])
            else:
                metric.update_state(y, answers)
        return {metric.name: metric.result() for metric in self.metrics}


def own_step(features: Features) -> keras.Model:
    x = layers.Dropout(0.5, seed=7)(layers.Dense(6, activation="tanh")(joined(features)))
    model = OwnStep(features, layers.Dense(3, activation="softmax")(x))
    model.compile(
        keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


class Plain(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Neither `call` nor `compute_loss` has an argument `training`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(4, activation="tanh"), layers.Dense(3)

    def call(self, features: dict[str, Any]) -> Any:
        return self.second(self.first(features["a"]))

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        wrong = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return keras.ops.mean(wrong)


def without_training(features: Features) -> keras.Model:
    model = Plain()
    model.compile(keras.optimizers.SGD(0.1))
    return model


@pytest.mark.parametrize("build", [classifier, frozen, two_heads, without_training])
def test_the_loop_ends_where_fit_ends(build: Build, tmp_path: Path) -> None:
    """Frozen layers, BatchNorm, Dropout, inputs and outputs by name, a last batch that is short."""
    model, result = ours(build, tmp_path, steps_per_call=3)

    features, label = rows()
    # One label for a model of several outputs, in the form that `fit` needs.
    labeled = {"kind": label, "size": label} if build is two_heads else label
    other, history = kerass(build, parts=(features, label), labeled=(features, labeled))
    assert_same(model, other)
    assert result.metrics == of_best(history, result)


class Listed(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Two outputs in a list: nothing says whose label is whose."""

    def __init__(self, features: Features) -> None:
        super().__init__()
        self.one, self.other = layers.Dense(3, activation="softmax"), layers.Dense(1)
        self.compile("sgd", loss=["sparse_categorical_crossentropy", "mse"])

    def call(self, inputs: dict[str, Any]) -> list[Any]:
        return [self.one(inputs["a"]), self.other(inputs["b"])]


def test_outputs_without_names_are_refused_where_labels_have_them(tmp_path: Path) -> None:
    features, label = rows()

    with pytest.raises(ConfigError, match="name its outputs as the labels: kind, size"):
        ours(Listed, tmp_path, parts=(features, {"kind": label, "size": label}))


def test_frozen_layers_stay_and_statistics_move(tmp_path: Path) -> None:
    model, _ = ours(frozen, tmp_path)
    prepare_process(precision="float32", seed=0, deterministic=False)
    before = build_model(frozen, OwnFeatures(opened(rows()).description), what="model:build").model

    moved = {
        layer.name: any(
            not np.array_equal(one, two)
            for one, two in zip(layer.get_weights(), old.get_weights(), strict=True)
        )
        for layer, old in zip(model.layers, before.layers, strict=True)
        if layer.get_weights()
    }
    assert [name for name, changed in moved.items() if not changed] == ["frozen", "still"]


def test_sample_weights_count_in_loss_and_validation(tmp_path: Path) -> None:
    parts = rows(weighted=True)
    model, result = ours(classifier, tmp_path, parts=parts, steps_per_call=3)

    other, history = kerass(classifier, parts=parts)
    assert_same(model, other)
    # Stoker weighs batches by their rows, where each is the weighted mean: as `fit` does.
    assert result.metrics == of_best(history, result)


CLASS_WEIGHTS = {0: 1.0, 2: 6.0}


def by_class(labels: Any) -> Any:
    return np.array([CLASS_WEIGHTS.get(int(label), 1.0) for label in labels], np.float32)


@pytest.mark.parametrize(
    "weighted",
    [pytest.param(False, marks=pytest.mark.soak), True],
    ids=["", "and sample weights"],
)
def test_class_weights_count_in_training_and_in_the_loss_that_chooses_an_epoch(
    weighted: bool, tmp_path: Path
) -> None:
    parts = rows(weighted=weighted)
    model, result = ours(classifier, tmp_path, parts=parts, class_weight=CLASS_WEIGHTS)

    # `fit` accepts them as sample weights in training and in validation.
    features, labels, *own = parts
    weights = by_class(labels) * (own[0] if own else 1.0)
    other, history = kerass(classifier, parts=(features, labels, weights))
    assert_same(model, other)
    assert result.metrics == of_best(history, result)


def rare() -> tuple[Any, ...]:
    """One of eleven is of class 1, which overlaps with the others."""
    rng = np.random.default_rng(3)
    labels = (np.arange(ROWS) % 11 == 0).astype(np.int64)
    a = (rng.normal(size=ROWS) + 1.5 * labels).astype(np.float32)[:, None]
    return {"a": a, "b": np.zeros_like(a)}, labels


def prior_first(features: Features) -> keras.Model:
    """Answers the share of the rare class to begin with, so that its plain loss can hardly fall."""
    begin = keras.initializers.Constant(float(np.log(1 / 10)))
    answer = layers.Dense(
        1, activation="sigmoid", kernel_initializer="zeros", bias_initializer=begin
    )
    model = keras.Model(features, answer(joined(features)))
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["recall"])
    return model


def test_a_rare_class_that_weighs_more_decides_the_best_epoch(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"parts": rare(), "epochs": 8, "class_weight": {0: 1.0, 1: 10.0}}
    _, result = ours(prior_first, tmp_path, **settings)
    _, history = kerass(prior_first, **settings)

    # The loss that `fit` validates with would select the first epoch.
    assert int(np.argmin(history["val_loss"])) == 0
    assert result.best_epoch > 4
    assert result.metrics["val_recall"] >= history["val_recall"][0]


class OwnTest(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Accepts features and labels, but no weights."""

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self.compute_loss(x, y, self(x, training=False))
        return {"loss": self.compute_loss(x, y, self(x, training=False))}


def test_the_ceiling_of_batches_of_one_shape_is_that_of_the_step_that_is_fed(
    tmp_path: Path,
) -> None:
    """XLA would compile another one for it, in the main thread."""
    traced: list[Any] = []

    class Traced(layers.Layer):  # type: ignore[misc]  # Keras has no types
        def call(self, inputs: Any, training: bool = False) -> Any:
            if training and isinstance(inputs, tf.Tensor):
                traced.append(inputs.shape[0])
            return inputs

    def build(features: Features) -> keras.Model:
        model = keras.Model(features, layers.Dense(3, "softmax")(Traced()(joined(features))))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    whole = tuple(
        tf.nest.map_structure(lambda part: np.resize(part, (STEPS * BATCH, *part.shape[1:])), part)
        for part in rows()
    )
    ours(
        build,
        tmp_path,
        make=lambda _: tf.data.Dataset.from_tensor_slices(whole).batch(BATCH, drop_remainder=True),
    )

    assert set(traced) == {BATCH}


def own_test(features: Features) -> keras.Model:
    model = OwnTest(features, layers.Dense(3, activation="softmax")(joined(features)))
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    return model


def test_a_custom_test_step_gets_no_class_weights_and_a_message_says_so(tmp_path: Path) -> None:
    _, result = ours(own_test, tmp_path, class_weight=CLASS_WEIGHTS)

    (line,) = result.health["findings"]
    assert "OwnTest.test_step computes val_loss, the monitored metric, without it" in line
    assert "train.monitor" in line.partition(". ")[2]


@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.soak), True])
def test_an_own_train_step_is_what_trains(weighted: bool, tmp_path: Path) -> None:
    parts = rows(weighted=weighted)
    model, result = ours(own_step, tmp_path, parts=parts, steps_per_call=3)

    other, history = kerass(own_step, parts=parts)
    assert_same(model, other)
    assert result.metrics == of_best(history, result)


@pytest.mark.parametrize(
    "setting",
    [{"accumulate": 2}, {"clip_norm": 1.0}, {"xla": True}, {"reduction_dtype": "bfloat16"}],
)
def test_what_an_own_train_step_cannot_have_is_named(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"OwnStep\.train_step .* train\.{next(iter(setting))}"):
        ours(own_step, tmp_path, **setting)


def test_the_error_of_a_custom_train_step_names_the_users_line(tmp_path: Path) -> None:
    class Failing(OwnStep):
        def train_step(self, data: Any) -> Any:
            raise ValueError("mine")

    def build(features: Features) -> keras.Model:
        model = Failing(features, layers.Dense(3)(joined(features)))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    with pytest.raises(ConfigError, match=r"Failing\.train_step .*test_train_keras_loop\.py, line"):
        ours(build, tmp_path)


def test_a_model_that_cannot_be_validated_is_refused(tmp_path: Path) -> None:
    class OnlyTrains(keras.Model):  # type: ignore[misc]  # Keras has no types
        def train_step(self, data: Any) -> Any:
            return {"loss": keras.ops.sum(data[1])}

    def build(features: Features) -> keras.Model:
        model = OnlyTrains(features, layers.Dense(3)(joined(features)))
        model.compile("sgd")
        return model

    with pytest.raises(ConfigError, match="must return a model that can be validated"):
        ours(build, tmp_path)


def test_labels_that_are_not_those_of_the_outputs_are_refused_before_training() -> None:
    built = build_model(two_heads, OwnFeatures(opened(rows()).description), what="model:build")
    model = built.model
    first, second = model.output_names

    require_label_of_each_output(model, [second, first])
    with pytest.raises(ConfigError, match=r"each of .*outputs.* Received: one label without"):
        require_label_of_each_output(model, [ONLY])
    with pytest.raises(ConfigError, match=rf"Did you mean '{second}'\?"):
        require_label_of_each_output(model, [first, f"{second}s"])
    with pytest.raises(ConfigError, match="each of the model's outputs"):
        require_label_of_each_output(model, [first, second, "third"])


class Adversaries(OwnStep):
    """A second optimizer for a part of the weights, as GANs have it."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        half = len(self.trainable_variables) // 2
        gradients: Any = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(
            [*gradients[:half], *map(tf.zeros_like, gradients[half:])], self.trainable_variables
        )
        self.second.apply(gradients[half:], self.trainable_variables[half:])
        return {"loss": loss}


def adversaries(features: Features, *, built: bool = True) -> keras.Model:
    x = layers.Dense(6, activation="tanh")(joined(features))
    model = Adversaries(features, layers.Dense(3, activation="softmax")(x))
    model.second = keras.optimizers.Adam(0.05)
    if built:
        model.second.build(model.trainable_variables[2:])
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    return model


def test_a_second_optimizer_is_in_the_checkpoint(tmp_path: Path) -> None:
    model, _ = ours(adversaries, tmp_path)
    other, _ = kerass(adversaries)

    assert_same(model, other)
    found = newest_good(tmp_path / "checkpoints")
    assert found is not None
    kept = {name: v for name, v in found.arrays().items() if name.startswith("optimizer.second/")}
    assert any(name.endswith("iteration") and int(v) == 2 * STEPS for name, v in kept.items())
    assert len(kept) == len(model.second.variables)


def test_a_second_optimizer_that_is_not_built_is_refused(tmp_path: Path) -> None:
    def build(features: Features) -> keras.Model:
        return adversaries(features, built=False)

    with pytest.raises(ConfigError, match=r"Adversaries\.second must be built"):
        ours(build, tmp_path)


class Hooks(callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Records every call and its arguments."""

    def __init__(self, *, stop_at: int | None = None) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.stop_at = stop_at

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop where it is time."""
        self.record("on_train_batch_end", batch, logs)
        if batch == self.stop_at:
            self.model.stop_training = True

    def record(self, hook: str, *parts: Any) -> None:
        """Keep a call."""
        plain = [pytest.approx(p, rel=1e-3) if isinstance(p, dict) else p for p in parts]
        self.calls.append((hook, *plain))


def _hook(name: str) -> Callable[..., None]:
    def hook(self: Hooks, *parts: Any, logs: Any = None) -> None:
        self.record(name, *parts, *([] if logs is None else [logs]))

    return hook


for _name in (
    *("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_train_batch_begin"),
    *("on_test_begin", "on_test_end", "on_test_batch_begin", "on_test_batch_end"),
):
    setattr(Hooks, _name, _hook(_name))


@pytest.mark.parametrize("stop_at", [None, 2])
def test_callbacks_hear_what_fit_tells_them(stop_at: int | None, tmp_path: Path) -> None:
    """Every hook, in order, with its logs; a stop in a batch hook ends the epoch at once."""
    mine, theirs = Hooks(stop_at=stop_at), Hooks(stop_at=stop_at)

    model, result = ours(classifier, tmp_path, listed=[mine])

    other, _ = kerass(classifier, listed=[theirs])
    assert [call[:1] for call in mine.calls] == [call[:1] for call in theirs.calls]
    assert mine.calls == [tuple(_value(part) for part in call) for call in theirs.calls]
    assert_same(model, other)
    assert result.steps == (2 * STEPS if stop_at is None else stop_at + 1)


def _value(part: Any) -> Any:
    return getattr(part, "expected", part)


def test_a_hook_for_batches_makes_calls_of_one_step(tmp_path: Path) -> None:
    resolved = on_one_device(batch_size=BATCH, xla=True)
    data = OwnFeatures(opened(rows()).description)
    plain, own = (build_model(f, data, what="model:build").model for f in (classifier, own_step))
    quiet = [callbacks.TerminateOnNaN(), callbacks.CSVLogger(tmp_path / "log.csv")]

    def seen(listed: list[Any], model: keras.Model, **settings: Any) -> tuple[int, bool]:
        found = apply_user_hooks(resolved, TrainConfig(**settings), model=model, callbacks=listed)
        return found.steps_per_call, found.xla

    assert seen(quiet, plain) == (4, True)
    assert seen([*quiet, Hooks()], plain) == (1, True)
    assert seen([Hooks()], plain, steps_per_call=4) == (4, True)
    assert seen([], own) == (4, False)


def many(folder: Path) -> list[callbacks.Callback]:
    """Keras's own; the epochs are few, so that EarlyStopping is impatient."""
    folder.mkdir()
    return [
        callbacks.EarlyStopping(
            "accuracy", mode="min", patience=1, restore_best_weights=True, start_from_epoch=0
        ),
        callbacks.ReduceLROnPlateau("val_loss", mode="max", patience=0, factor=0.5),
        callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
        callbacks.TensorBoard(folder / "board"),
        callbacks.CSVLogger(folder / "log.csv"),
        callbacks.TerminateOnNaN(),
    ]


def test_kerass_callbacks_do_what_they_do_in_fit(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    model, result = ours(classifier, tmp_path, listed=many(mine), epochs=6, steps_per_call=3)

    other, history = kerass(classifier, listed=many(theirs), epochs=6)
    assert_same(model, other)
    assert result.epochs == len(history["loss"]) < 6
    assert float(model.optimizer.learning_rate) == pytest.approx(
        float(other.optimizer.learning_rate)
    )
    names = [sorted(path.name for path in folder.glob("*")) for folder in (mine, theirs)]
    assert names[0] == names[1]
    logs = [
        np.genfromtxt(folder / "log.csv", delimiter=",", names=True) for folder in (mine, theirs)
    ]
    assert logs[0].dtype.names == logs[1].dtype.names
    for name in logs[0].dtype.names or ():
        np.testing.assert_allclose(logs[0][name], logs[1][name], rtol=1e-3)


def test_weights_that_a_callback_sets_at_the_end_are_kept_where_they_are_better(
    tmp_path: Path,
) -> None:
    good, _ = kerass(classifier, epochs=30)

    class Averaging(callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_train_end(self, logs: Any = None) -> None:
            self.model.set_weights(good.get_weights())

    class Spoiling(callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_train_end(self, logs: Any = None) -> None:
            self.model.set_weights([np.zeros_like(w) for w in self.model.get_weights()])

    for kind, better in ((Averaging, True), (Spoiling, False)):
        folder = tmp_path / kind.__name__
        weights = good.get_weights()
        _, result = ours(classifier, folder, listed=[kind()])
        arrays = best(folder / "checkpoints").arrays()
        kept = arrays["model/first/kernel"]

        assert np.array_equal(kept, weights[0]) is better
        assert kept.any()
        assert best(folder / "checkpoints").facts["position"]["best_metrics"] == result.metrics


def test_a_file_of_a_callback_is_closed_where_a_run_fails(tmp_path: Path) -> None:
    log = callbacks.CSVLogger(tmp_path / "log.csv")

    def fails(epoch: int, logs: Any) -> None:
        raise ValueError("mine")

    with pytest.raises(ConfigError, match=r"test_train_keras_loop\.py, line \d+, in fails.*mine"):
        ours(classifier, tmp_path, listed=[log, callbacks.LambdaCallback(on_epoch_end=fails)])
    assert log.csv_file.closed


@pytest.mark.parametrize("kind", ["SwapEMAWeights", "BackupAndRestore"])
def test_what_stoker_does_itself_is_refused(kind: str, tmp_path: Path) -> None:
    arguments = [tmp_path / "backup"] if kind == "BackupAndRestore" else []
    callback = getattr(callbacks, kind)(*arguments)

    with pytest.raises(ConfigError, match=f"must not contain {kind}"):
        ours(classifier, tmp_path, listed=[callback])


class Epochs(callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Which pass over the data may begin: the one after the validations that have begun."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Condition()
        self.validations = -1
        self.passes, self.early, self.late = 0, 0, 0

    def on_train_begin(self, logs: Any = None) -> None:
        self.on_test_begin(logs)

    def on_test_begin(self, logs: Any = None) -> None:
        with self.allowed:
            self.validations += 1
            self.allowed.notify_all()

    def begin(self) -> None:
        """A pass begins. One that looks at the data is of no epoch: the thread that opens it may be late."""
        with self.allowed:
            if self.validations < 0:
                self.early += 1
                return
            self.passes += 1
            needed = self.passes - 1 if self.early else self.passes - 2
            begun = self.allowed.wait_for(lambda: self.validations >= needed, timeout=30)
            self.late += not begun


@pytest.mark.parametrize(
    "steps_per_call", [*(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2)), STEPS]
)
def test_no_epoch_waits_for_the_next_pass(tmp_path: Path, steps_per_call: int) -> None:
    """It may take minutes to begin, and after the last one it is not needed."""
    epochs = Epochs()

    def make(split: str) -> tf.data.Dataset[Any]:
        if split == "eval":
            return sliced(rows())

        def generate() -> Any:
            epochs.begin()
            yield from sliced(rows()).as_numpy_iterator()

        spec = sliced(rows()).element_spec
        return tf.data.Dataset.from_generator(generate, output_signature=spec)

    settings: dict[str, Any] = {"epochs": 3, "steps_per_call": steps_per_call}
    model, result = ours(classifier, tmp_path / "a", listed=[epochs], make=make, **settings)
    plain, _ = ours(classifier, tmp_path / "b", **settings)

    assert result.steps == 3 * STEPS
    assert epochs.passes >= 3
    assert epochs.late == 0
    assert_same(model, plain)
