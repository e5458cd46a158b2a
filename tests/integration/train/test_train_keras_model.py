"""A compiled Keras model is trained as `fit` would train it."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from stoker.core.errors import ConfigError
from stoker.train.model.keras_model import (
    arrange_labels,
    arrange_weights,
    class_weights,
    extra_optimizers,
    overrides,
    run_custom_step,
    with_class_weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ROWS, BATCH = 24, 8


class OwnStep(keras.Model):  # type: ignore[misc]  # Keras has no types
    """The custom `train_step` of Keras's guide."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = 2 * self.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight)
        gradients: Any = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted, sample_weight=weight)
        return {metric.name: metric.result() for metric in self.metrics}


class NoLoss(OwnStep):
    def train_step(self, data: Any) -> dict[str, Any]:
        super().train_step(data)
        return {"mae": 1.0}


class Failing(OwnStep):
    def train_step(self, data: Any) -> dict[str, Any]:
        raise ValueError("mine")


def made(kind: type[keras.Model] = keras.Model, *, classes: int = 1, loss: str = "mse") -> Any:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    activation = "softmax" if classes > 1 else None
    model = kind(inputs, keras.layers.Dense(classes, activation=activation)(inputs))
    metric = "accuracy" if classes > 1 else "mae"
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=[metric], jit_compile=False)
    return model


def rows() -> tuple[NDArray[Any], NDArray[Any]]:
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def batches(*arrays: Any) -> "tf.data.Dataset[Any]":
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)


def by_own_steps(model: keras.Model, *arrays: Any) -> dict[str, float]:
    model._symbolic_build(data_batch=next(iter(batches(*arrays))))
    # AutoGraph hides the type of an error of ours.
    step = tf.function(lambda *batch: run_custom_step(model, "train_step", batch), autograph=False)
    for batch in batches(*arrays):
        logs = step(*batch)
    return {name: float(value) for name, value in logs.items()}


def by_step(model: keras.Model, labels: Any, *arrays: Any) -> dict[str, float]:
    """The step of `stoker.train.step.step`, in short."""
    first_batch = next(iter(batches(*arrays)))
    model._symbolic_build(data_batch=(first_batch[0], *labels(first_batch)))

    @tf.function
    def step(*batch: Any) -> None:
        y, *weight = labels(batch)
        parts = {"x": batch[0], "y": y, "sample_weight": weight[0] if weight else None}
        with tf.GradientTape() as tape:
            outputs = model(batch[0], training=True)
            loss = model.compute_loss(**parts, y_pred=outputs, training=True)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        model.optimizer.apply(gradients, model.trainable_variables)
        model.compute_metrics(**parts, y_pred=outputs)

    for batch in batches(*arrays):
        step(*batch)
    results = {name: float(value) for name, value in model.get_metrics_result().items()}
    return {name: value for name, value in results.items() if name != "loss"}


def fitted(model: keras.Model, *arrays: Any, **options: Any) -> dict[str, float]:
    history = model.fit(*arrays, batch_size=BATCH, shuffle=False, verbose=0, **options).history
    return {name: values[0] for name, values in history.items()}


def assert_same_weights(one: keras.Model, other: keras.Model) -> None:
    for ours, theirs in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_overrides_names_what_is_the_users() -> None:
    class OwnLoss(keras.Sequential):  # type: ignore[misc]  # Keras has no types
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    patched = made()
    patched.compute_metrics = lambda *args, **kwargs: {}

    assert overrides(made()) == frozenset()
    assert overrides(made(OwnStep)) == {"train_step"}
    assert overrides(OwnLoss()) == {"compute_loss"}
    assert overrides(patched) == {"compute_metrics"}


@pytest.mark.parametrize("weighted", [False, True])
def test_an_own_train_step_is_run_as_fit_runs_it(weighted: bool) -> None:
    arrays = [*rows(), np.linspace(0, 1, ROWS, dtype="float32")][: 3 if weighted else 2]
    ours, keras_own = made(OwnStep), made(OwnStep)

    logs = by_own_steps(ours, *arrays)

    options = {"sample_weight": arrays[2]} if weighted else {}
    assert logs == pytest.approx(fitted(keras_own, *arrays[:2], **options), rel=1e-5)
    assert_same_weights(ours, keras_own)


def test_an_own_step_whose_logs_have_no_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"NoLoss\.train_step must return a dict with a `loss`"):
        by_own_steps(made(NoLoss), *rows())


def test_the_error_of_a_custom_train_step_names_the_users_line() -> None:
    with pytest.raises(
        ConfigError, match=r"test_train_keras_model\.py, line \d+, in train_step\)\. .*: mine"
    ):
        by_own_steps(made(Failing), *rows())


def test_further_optimizers_are_found() -> None:
    model = made(OwnStep)
    model.second = keras.optimizers.Adam()

    assert extra_optimizers(model) == {"second": model.second}
    assert extra_optimizers(made()) == {}


CLASSES = np.arange(ROWS) % 3


@pytest.mark.parametrize("xla", [False, True])
@pytest.mark.parametrize(
    "labels",
    [
        CLASSES,
        CLASSES[:, None],
        CLASSES.astype("float32"),
        np.eye(3, dtype="float32")[CLASSES],
        np.eye(3, dtype="int64")[CLASSES],
    ],
)
def test_class_weights_are_kerass(labels: NDArray[Any], xla: bool) -> None:
    from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

    weights = {0: 0.5, 2: 5.0}
    graph = tf.function(lambda y: class_weights(y, weights), jit_compile=xla)

    assert (
        graph(labels).numpy().tolist() == class_weight_to_sample_weights(labels, weights).tolist()
    )


def test_a_model_trains_with_class_weights_as_by_fit() -> None:
    x, _ = rows()
    weights = {0: 0.5, 1: 3.0, 2: 5.0}
    ours, keras_own = (made(classes=3, loss="sparse_categorical_crossentropy") for _ in range(2))

    by_step(ours, lambda batch: with_class_weights(batch, weights)[1:], x, CLASSES)

    fitted(keras_own, x, CLASSES, class_weight=weights)
    assert_same_weights(ours, keras_own)


def test_class_weights_multiply_sample_weights() -> None:
    labels = tf.constant([0, 1])
    for shape in ([2], [2, 1]):
        given = tf.reshape(tf.constant([2.0, 3.0]), shape)
        weighted = with_class_weights(({}, labels, given), {1: 5.0})
        assert weighted[2].numpy().tolist() == np.reshape([2.0, 15.0], shape).tolist()


@pytest.mark.parametrize(
    ("labels", "weights", "said"),
    [
        ({"a": tf.constant([0])}, {0: 1.0}, "needs a model with one output"),
        (tf.constant(["a"]), {0: 1.0}, "needs labels that are classes"),
        (tf.zeros([2, 2, 2]), {0: 1.0}, "needs labels that are classes"),
        (tf.constant([0]), {0: -1.0}, "weights of 0 or more"),
        (tf.constant([0]), {0: float("nan")}, "weights of 0 or more"),
        (tf.constant([0]), {}, "weights of 0 or more"),
    ],
)
def test_wrong_class_weights_are_refused(labels: Any, weights: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        class_weights(labels, weights)


def two_by_two(outputs: str) -> keras.Model:
    keras.utils.set_random_seed(2)
    left, right = keras.Input((3,), name="left"), keras.Input((1,), name="right")
    hidden = keras.layers.Dense(4, activation="tanh")(keras.layers.Concatenate()([left, right]))
    price = keras.layers.Dense(1, name="price")(hidden)
    sold = keras.layers.Dense(1, activation="sigmoid", name="sold")(hidden)
    structure: Any = [price, sold] if outputs == "list" else {"price": price, "sold": sold}
    model = keras.Model({"left": left, "right": right}, structure)
    model.compile(
        keras.optimizers.SGD(0.1),
        loss={"price": "mse", "sold": "binary_crossentropy"},
        loss_weights={"price": 0.3, "sold": 2.0},
        metrics={"price": ["mae"], "sold": ["accuracy"]},
        jit_compile=False,
    )
    return model


def two_labels() -> tuple[dict[str, Any], dict[str, Any]]:
    x, y = rows()
    labels = {"sold": (y > 0).astype("float32"), "price": y}  # not in the order of the outputs
    return {"left": x, "right": y * 0.1}, labels


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("outputs", ["list", "dict"])
def test_two_inputs_and_two_outputs_train_as_by_fit(outputs: str, weighted: bool) -> None:
    features, labels = two_labels()
    weights = np.linspace(0.1, 1, ROWS, dtype="float32")
    ours, keras_own = two_by_two(outputs), two_by_two(outputs)

    def arranged(batch: Any) -> tuple[Any, ...]:
        y = arrange_labels(batch[1], ours.output, names=ours.output_names)
        return (y, arrange_weights(batch[2], y)) if weighted else (y,)

    metrics = by_step(ours, arranged, *(features, labels, weights)[: 3 if weighted else 2])

    options: Mapping[str, Any] = {"sample_weight": weights} if weighted else {}
    ordered = [labels["price"], labels["sold"]] if outputs == "list" else labels
    if outputs == "list" and weighted:
        options = {"sample_weight": [weights, weights]}
    history = fitted(keras_own, features, ordered, **options)
    assert metrics == pytest.approx({k: v for k, v in history.items() if k != "loss"}, rel=1e-5)
    assert set(metrics) == {"price_loss", "sold_loss", "price_mae", "sold_accuracy"}
    assert_same_weights(ours, keras_own)


def test_labels_take_the_structure_of_the_outputs() -> None:
    labels = {"b": 2, "a": 1}

    assert arrange_labels(labels, [0, 0], names=["a", "b"]) == [1, 2]
    assert arrange_labels(labels, (0, 0), names=["a", "b"]) == (1, 2)
    assert arrange_labels(labels, {"a": 0, "b": 0}, names=["x", "y"]) == {"a": 1, "b": 2}
    assert arrange_labels({"a": 1}, 0, names=["a"]) == 1


@pytest.mark.parametrize("labels", [{"price": 1}, {"price": 1, "sold": 2, "else": 3}, {}])
def test_every_output_needs_its_label_and_no_other(labels: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="each of the model's outputs: price, sold"):
        arrange_labels(labels, {"price": 0, "sold": 0}, names=["price", "sold"])
