"""What `build` may return, and what it may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from stoker.core.errors import ConfigError
from stoker.data.features.preprocessing.transform import Transform
from stoker.train.setup.build_model import build_model, prepare_process

Features = dict[str, keras.KerasTensor]
VALUES = {"a": tf.constant([1.0, 2.0]), "b": tf.constant([10.0, 20.0])}


def column(feature: keras.KerasTensor) -> keras.KerasTensor:
    return keras.ops.expand_dims(feature, -1)


def compiled(model: keras.Model) -> keras.Model:
    model.compile(optimizer="sgd", loss="mse")
    return model


def from_dict(features: Features) -> keras.Model:
    return compiled(keras.Model(features, column(features["a"] - features["b"])))


def from_list(features: Features) -> keras.Model:
    inputs = [features["b"], features["a"]]
    return compiled(keras.Model(inputs, column(features["a"] - features["b"])))


def from_one(features: Features) -> keras.Model:
    return compiled(keras.Model(features["a"], column(features["a"] - 18.0)))


def from_subset(features: Features) -> keras.Model:
    return compiled(keras.Model({"a": features["a"]}, column(features["a"] - 18.0)))


class Difference(keras.Model):  # type: ignore[misc]  # Keras has no types
    def call(self, features: dict[str, Any]) -> Any:
        return column(features["a"] - features["b"])


def subclassed(features: Features) -> keras.Model:
    return compiled(Difference())


def sequential_on_a(features: Features) -> keras.Model:
    rows = layers.Lambda(lambda a: keras.ops.expand_dims(a, -1) - 18.0)
    return compiled(keras.Sequential([keras.Input((), name="a"), rows]))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (from_dict, [-9.0, -18.0]),
        (from_list, [-9.0, -18.0]),
        (from_one, [-17.0, -16.0]),
        (from_subset, [-17.0, -16.0]),
        (sequential_on_a, [-17.0, -16.0]),
        (subclassed, [-9.0, -18.0]),
    ],
)
def test_features_reach_the_model_by_name_whatever_its_inputs_form(
    transform: Transform, build: Callable[..., keras.Model], expected: list[float]
) -> None:
    prepare_process(precision="float32", seed=0, deterministic=False)
    built = build_model(build, transform, what="model:build")

    answer = np.asarray(built.model(built.adapt(VALUES)))

    np.testing.assert_array_equal(answer[:, 0], expected)


def test_build_may_take_the_transform_too(transform: Transform) -> None:
    seen = []

    def build(features: Features, given: Any) -> keras.Model:
        seen.append(given)
        return from_dict(features)

    build_model(build, transform, what="model:build")
    assert seen == [transform.output]


class OwnStep(keras.Model):  # type: ignore[misc]  # Keras has no types
    def train_step(self, data: Any) -> Any:
        return {}


def without_loss(kind: type[keras.Model]) -> keras.Model:
    model = kind()
    model.compile(optimizer="sgd")
    return model


def sequential() -> keras.Model:
    return keras.Sequential([keras.Input((1,)), layers.Dense(1)])


class OwnSteps(keras.Model):  # type: ignore[misc]  # Keras has no types
    """As a GAN of Keras's guide is, with a `test_step`."""

    def train_step(self, data: Any) -> Any:
        return {}

    def test_step(self, data: Any) -> Any:
        return {}


def with_own_steps() -> keras.Model:
    model = OwnSteps()
    model.compile()
    return model


def raising(features: Features) -> keras.Model:
    raise ValueError("first line\nsecond line")


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda features: None, "must return a compiled keras.Model"),
        (lambda features: keras.Model(features, features["a"]), "compiled with an optimizer"),
        (lambda features: without_loss(keras.Model), "compiled with a loss"),
        (
            lambda features: without_loss(OwnStep),
            r"can be validated.*def test_step\(self, data\).*monitor: val_.*features\['\w+'\]",
        ),
        (lambda features: with_own_steps(), r"def call\(self, inputs\).*inputs\['\w+'\]"),
        (lambda features: compiled(sequential()), "one of the features"),
        (raising, r"model:build failed \(test_train_model.py, line \d+, in raising\)"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    transform: Transform, build: Callable[..., Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        build_model(build, transform, what="model:build")
    assert "\n" not in caught.value.line()


def test_a_loss_on_logits_is_known_to_the_export(transform: Transform) -> None:
    def build(features: Features) -> keras.Model:
        model = keras.Model(features, layers.Dense(1)(column(features["a"])))
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(optimizer="sgd", loss=loss)
        return model

    assert build_model(build, transform, what="model:build").from_logits()
    assert not build_model(from_dict, transform, what="model:build").from_logits()
