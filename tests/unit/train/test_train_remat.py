"""Layers that are computed again for their gradient: the same numbers, by any model's form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from stoker.core.errors import ConfigError
from stoker.train.model.keras_model import walk_layers
from stoker.train.model.remat import rematerialize

X = tf.constant(np.random.default_rng(0).normal(size=(32, 8)), tf.float32)
Y = tf.ones((32, 1))


class Block(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """What a second run could spoil: BatchNorm, Dropout, losses, `training` that is inherited."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.norm = layers.BatchNormalization()
        self.dense = layers.Dense(
            8, activation="tanh", kernel_regularizer="l2", activity_regularizer="l2"
        )
        self.drop = layers.Dropout(0.4)

    def build(self, shape: Any) -> None:
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        return x + self.drop(self.dense(self.norm(x)))


def functional() -> keras.Model:
    inputs = x = keras.Input((8,))
    for index in range(3):
        x = Block(name=f"block{index}")(x)
    return keras.Model(inputs, layers.Dense(1)(x))


def with_models_inside() -> keras.Model:
    inputs = x = keras.Input((8,))
    for index in range(2):
        inner = [keras.Input((8,)), layers.Dense(8, "relu"), layers.Dropout(0.3)]
        x = keras.Sequential(inner, name=f"block{index}")(x)
    return keras.Model(inputs, layers.Dense(1)(x))


class Subclassed(keras.Model):  # type: ignore[misc]  # Keras has no types
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Block(name=f"block{index}") for index in range(2)]
        self.last = layers.Dense(1)

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Lookup(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Whole numbers in, and a gradient in slices."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.table = layers.Embedding(5, 4)

    def build(self, shape: Any) -> None:
        self.table.build(shape)

    def call(self, inputs: dict[str, Any]) -> Any:
        return {"y": ops.tanh(ops.mean(self.table(inputs["ids"]), axis=1)) * inputs["scale"]}


def looking_up() -> keras.Model:
    inputs = keras.Input((8,))
    ids = ops.cast(inputs > 0, "int32")
    found = Lookup(name="block")({"ids": ids, "scale": inputs[:, :1]})
    return keras.Model(inputs, layers.Dense(1)(found["y"]))


def attending() -> keras.Model:
    inputs = keras.Input((8,))
    ids = ops.cast(ops.clip(ops.abs(inputs) * 2, 0, 4), "int32")
    x = layers.Embedding(5, 6, mask_zero=True)(ids)
    x = layers.MultiHeadAttention(2, 3, dropout=0.2, name="block")(x, x)
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def trained(build: Callable[[], keras.Model], *, remat: bool, xla: bool | None) -> list[Any]:
    """Gradients of two steps, the state after them, the answer of inference."""
    keras.utils.set_random_seed(0)
    model = build()
    model.compile("sgd", "mse")
    model.compute_loss(x=X, y=Y, y_pred=model(X))
    if remat:
        assert rematerialize(model, ["block*"])

    def step() -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=X, y=Y, y_pred=model(X, training=True))
        return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])

    run = step if xla is None else tf.function(step, jit_compile=xla)
    seen = []
    for _ in range(2):
        loss, gradients = run()
        seen += [loss, *(tf.convert_to_tensor(gradient) for gradient in gradients)]
    seen += [variable.value for variable in model.non_trainable_variables]
    return [np.asarray(value) for value in [*seen, model(X)]]


@pytest.mark.parametrize(
    ("build", "xla"),
    [
        *((build, xla) for build in (functional, with_models_inside) for xla in (None, False)),
        *((Subclassed, xla) for xla in (None, False, True)),
        pytest.param(functional, True, marks=pytest.mark.soak),
        pytest.param(with_models_inside, True, marks=pytest.mark.soak),
    ],
)
def test_gradients_and_state_are_those_of_the_plain_model(
    build: Callable[[], keras.Model], xla: bool | None
) -> None:
    plain, again = trained(build, remat=False, xla=xla), trained(build, remat=True, xla=xla)

    for expected, got in zip(plain, again, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("build", [looking_up, attending])
def test_whole_numbers_masks_and_slices_pass_through(build: Callable[[], keras.Model]) -> None:
    plain, again = trained(build, remat=False, xla=False), trained(build, remat=True, xla=False)

    for expected, got in zip(plain, again, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


@pytest.fixture
def bfloat16() -> Iterator[None]:
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    yield
    keras.mixed_precision.set_dtype_policy("float32")


@pytest.mark.usefixtures("bfloat16")
def test_mixed_precision_is_the_same_in_both_runs() -> None:
    plain = trained(with_models_inside, remat=False, xla=False)
    again = trained(with_models_inside, remat=True, xla=False)

    for expected, got in zip(plain, again, strict=True):
        np.testing.assert_array_equal(got.astype("float32"), expected.astype("float32"))


def test_keras_s_own_scope_has_another_gradient_with_dropout() -> None:
    """Why we have our own; when this fails, ours can go."""

    def gradient(*, scope: bool) -> Any:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((8,))
        with keras.RematScope(mode="full" if scope else None):
            dropped = layers.Dropout(0.5, seed=1)(layers.Dense(8)(inputs))
        model = keras.Model(inputs, layers.Dense(1)(dropped))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(X, training=True) ** 2)
        return np.asarray(tape.gradient(loss, model.trainable_variables[0].value))

    assert not np.allclose(gradient(scope=True), gradient(scope=False), rtol=0.01)


def test_inference_has_nothing_of_it_in_its_graph() -> None:
    model = functional()
    rematerialize(model, ["block*"])
    graph = tf.function(lambda x: model(x, training=False)).get_concrete_function(X).graph
    custom = [op for op in graph.get_operations() if "_gradient_op_type" in op.node_def.attr]

    assert custom == []


def test_patterns_take_paths_and_names_and_what_is_inside_a_match_is_a_part_of_it() -> None:
    assert rematerialize(functional(), ["block[01]"]) == ("block0", "block1")
    assert rematerialize(functional(), ["block2/drop*", "block2"]) == ("block2",)
    assert rematerialize(Subclassed(), ["drop*"]) != ()


def test_a_pattern_that_matches_nothing_names_a_layer_that_is_near() -> None:
    with pytest.raises(ConfigError, match=r"Received: 'blok\*'\. Did you mean 'block\d'"):
        rematerialize(functional(), ["blok*"])


def test_layers_are_walked_once_with_their_paths() -> None:
    model = Subclassed()
    model.again = model.blocks[0]
    paths = [path for path, _ in walk_layers(model)]

    assert len(paths) == len(set(paths))
    assert paths.index("block0") < min(i for i, p in enumerate(paths) if p.startswith("block0/"))
    assert sum(path.startswith("block0/") for path in paths) == 3
