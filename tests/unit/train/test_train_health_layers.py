"""The first value that is not finite is found in models of every form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from stoker.train.health.layers import BadValues, first_bad_values
from stoker.train.model.keras_model import walk_layers
from stoker.train.model.remat import rematerialize

RNG = np.random.default_rng(0)
FEATURES = {"a": tf.constant(RNG.normal(size=(6, 4)), tf.float32)}
LABELS = tf.ones((6, 1))


class Log(layers.Layer):  # type: ignore[misc]  # Keras has no types
    def call(self, x: Any) -> Any:
        return ops.log(x)


class RootOfZero(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Finite forward; its gradient at zero is infinite."""

    def call(self, x: Any) -> Any:
        return ops.sqrt(ops.relu(x))


class Block(layers.Layer):  # type: ignore[misc]  # Keras has no types
    def __init__(self, inner: layers.Layer, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = layers.Dense(4, name="dense")
        self.inner = inner
        self.norm = layers.BatchNormalization(name="norm")
        self.drop = layers.Dropout(0.5, name="drop")

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.norm.build((None, 4))

    def call(self, x: Any) -> Any:
        return self.drop(self.norm(self.inner(self.dense(x))))


class Subclassed(keras.Model):  # type: ignore[misc]  # Keras has no types
    def __init__(self, inner: layers.Layer) -> None:
        super().__init__()
        self.blocks = [Block(layers.Activation("relu"), name="b0"), Block(inner, name="b1")]
        self.out = layers.Dense(1, name="out")

    def call(self, features: dict[str, Any]) -> Any:
        x = features["a"]
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Between(keras.Model):  # type: ignore[misc]  # Keras has no types
    """The bad operation stands between two layers, in none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(4, name="first"), layers.Dense(1, name="last")

    def call(self, features: dict[str, Any]) -> Any:
        return self.last(ops.sqrt(ops.relu(self.first(features["a"]))))


def functional(inner: layers.Layer) -> keras.Model:
    inputs = keras.Input((4,), name="a")
    x = Block(inner, name="b1")(layers.Dense(4, name="first")(inputs)) + 1.0
    return keras.Model({"a": inputs}, layers.Dense(1)(x))


def shared(inner: layers.Layer) -> keras.Model:
    """One layer at two places: only the second makes it bad."""
    inputs = keras.Input((4,), name="a")
    double = layers.Dense(4, kernel_initializer="identity", name="double")
    x = inner(double(double(inputs)))
    return keras.Model({"a": inputs}, layers.Dense(1)(x))


def nested(inner: layers.Layer) -> keras.Model:
    below = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="x"), inner], name="below")
    inputs = keras.Input((4,), name="a")
    return keras.Model({"a": inputs}, layers.Dense(1)(below(layers.Dense(4)(inputs))))


def look(
    model: keras.Model, *, features: Any = None, labels: Any = None, weights: Any = None
) -> BadValues | None:
    model.compile("adam", "mse")
    outputs = model(FEATURES)
    model.compute_loss(x=FEATURES, y=LABELS, y_pred=outputs)
    batch = [FEATURES if features is None else features, LABELS if labels is None else labels]
    before = [np.asarray(variable.value) for variable in model.variables]

    found = first_bad_values(
        model, [*batch, *([] if weights is None else [weights])], adapt=lambda given: given
    )

    for kept, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(kept, np.asarray(variable.value))
    assert not any("call" in vars(layer) for _, layer in walk_layers(model))
    return found


IN_EVERY_KIND = pytest.mark.parametrize(
    ("build", "path"),
    [
        (Subclassed, "b1/inner"),
        (functional, "b1/inner"),
        (shared, "inner"),
        (nested, "below/inner"),
    ],
)
"""Where the same layer lies in each kind of model."""


@IN_EVERY_KIND
def test_the_first_layer_whose_output_is_not_finite_is_named(
    build: Callable[[layers.Layer], keras.Model], path: str
) -> None:
    keras.utils.set_random_seed(0)
    found = look(build(Log(name="inner")))

    assert found is not None
    assert (found.place, found.name) == ("output", path)
    assert found.nan_share + found.infinite_share > 0
    assert found.least is not None
    assert found.rows


@IN_EVERY_KIND
def test_the_first_layer_from_the_loss_whose_gradient_is_not_finite_is_named(
    build: Callable[[layers.Layer], keras.Model], path: str
) -> None:
    keras.utils.set_random_seed(0)
    found = look(build(RootOfZero(name="inner")))

    assert found is not None
    assert (found.place, found.name) == ("gradient", path)


def test_a_bad_gradient_between_layers_is_placed_behind_the_layer_before() -> None:
    found = look(Between())

    assert found is not None
    assert (found.place, found.name) == ("gradient", "what follows first")


def test_an_operation_that_is_not_a_layer_is_named_too() -> None:
    inputs = keras.Input((4,), name="a")
    model = keras.Model({"a": inputs}, layers.Dense(1)(ops.log(layers.Dense(4)(inputs))))
    found = look(model)

    assert found is not None
    assert (found.place, found.name) == ("output", "log")


@pytest.mark.parametrize(
    ("inner", "where"), [(Log, ("output", "b1/inner")), (RootOfZero, ("gradient", "b1/inner"))]
)
def test_a_rematerialized_block_is_looked_into_too(
    inner: Callable[..., layers.Layer], where: tuple[str, str]
) -> None:
    keras.utils.set_random_seed(0)
    model = functional(inner(name="inner"))
    rematerialize(model, ["b1"])
    model.compile("adam", "mse")
    model.compute_loss(x=FEATURES, y=LABELS, y_pred=model(FEATURES))
    found = first_bad_values(model, (FEATURES, LABELS), adapt=lambda given: given)

    assert found is not None
    assert (found.place, found.name) == where


@pytest.mark.parametrize("build", [Subclassed, functional, shared, nested])
def test_a_step_that_is_finite_has_nothing_bad(build: Callable[..., keras.Model]) -> None:
    assert look(build(layers.Activation("relu"))) is None


def test_nan_in_a_feature_is_reported_with_feature_and_rows() -> None:
    values = np.ones((6, 4), np.float32)
    values[[1, 4], 2] = np.nan
    found = look(functional(Log(name="inner")), features={"a": tf.constant(values)})

    assert found == BadValues(
        place="feature",
        name="a",
        nan_share=2 / 24,
        infinite_share=0.0,
        least=1.0,
        most=1.0,
        dtype="float32",
        rows=(1, 4),
    )


def test_labels_and_sample_weights_are_looked_at_before_the_model_is() -> None:
    bad = tf.constant([[1.0]] * 5 + [[np.inf]])
    in_label = look(functional(Log()), labels=bad)
    in_weight = look(functional(Log()), weights=bad[:, 0])

    assert in_label is not None
    assert in_weight is not None
    assert (in_label.place, in_label.rows) == ("label", (5,))
    assert (in_weight.place, in_weight.rows) == ("sample weight", (5,))


def test_a_weight_that_is_bad_already_is_named_before_what_it_makes() -> None:
    model = functional(layers.Activation("relu"))
    model.layers[-1].kernel.assign(np.full((4, 1), np.inf))
    found = look(model)

    assert found is not None
    assert (found.place, found.name) == ("weight", model.layers[-1].kernel.path)


def test_a_loss_that_overflows_on_finite_answers_is_the_loss_itself() -> None:
    inputs = keras.Input((4,), name="a")
    answers = layers.Dense(1, activation=lambda x: (x + 1.0) * 1e37)(inputs)
    found = look(keras.Model({"a": inputs}, answers))

    assert found is not None
    assert (found.place, found.infinite_share) == ("loss", 1.0)


def test_float16_that_overflows_is_found_in_the_layer_that_overflows() -> None:
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        inputs = keras.Input((4,), name="a")
        x = layers.Dense(4, kernel_initializer="ones", name="wide")(inputs * 20_000.0)
        model = keras.Model({"a": inputs}, layers.Dense(1, dtype="float32")(x))
        found = look(model, features={"a": tf.ones((6, 4))})
    finally:
        keras.mixed_precision.set_dtype_policy("float32")

    assert found is not None
    assert (found.place, found.name, found.dtype) == ("output", "wide", "float16")


def test_masks_reach_the_layers_while_they_are_watched() -> None:
    """With mask_zero, the mean over steps leaves padding out: without it the loss would differ."""
    inputs = keras.Input((3,), name="a", dtype="int32")
    x = layers.Embedding(5, 2, mask_zero=True)(inputs)
    model = keras.Model({"a": inputs}, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))
    seen: list[Any] = []
    model.layers[2].call = _noting(model.layers[2].call, seen)
    model.compile("adam", "mse")
    ids = {"a": tf.constant([[1, 2, 0], [3, 0, 0]])}
    model.compute_loss(x=ids, y=tf.ones((2, 1)), y_pred=model(ids))
    seen.clear()

    assert first_bad_values(model, (ids, tf.ones((2, 1))), adapt=lambda given: given) is None
    np.testing.assert_array_equal(np.asarray(seen[0]), [[True, True, False], [True, False, False]])


def _noting(plain: Callable[..., Any], seen: list[Any]) -> Callable[..., Any]:
    def call(inputs: Any, mask: Any = None) -> Any:
        seen.append(mask)
        return plain(inputs, mask=mask)

    return call
