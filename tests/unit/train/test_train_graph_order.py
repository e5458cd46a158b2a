"""Where one operation runs at a time, each convolution's filters come before its input."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from stoker.train.graph_order import filters_first, operations
from stoker.train.model import BuiltModel
from stoker.train.step import StepSettings, make_train_step
from stoker.train.strategy import Distribution

INPUT, FILTERS = "Conv2DBackpropInput", "Conv2DBackpropFilter"


def model_of() -> keras.Model:
    """Three convolutions, the second and third beside each other on what the first gives."""
    keras.utils.set_random_seed(3)
    image = keras.Input((16, 16, 3))
    first = layers.Conv2D(4, 3, activation="relu")(image)
    left = layers.Conv2D(4, 3, activation="relu", name="left")(first)
    beside = [left, layers.Conv2D(4, 3)(first)]
    answer = layers.Dense(1)(layers.GlobalAveragePooling2D()(layers.Add()(beside)))
    return keras.Model(image, answer)


def gradient_of(model: keras.Model, *, ordered: bool, of_gradient: bool = False) -> Any:
    """A function of images: the gradients of all weights, and its graph."""

    @tf.function
    def gradients(images: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(images)
                loss = tf.reduce_mean(model(images, training=True) ** 2)
            if of_gradient:
                asked = [images, *(v.value for v in model.trainable_variables)]
                steep = [tf.convert_to_tensor(each) for each in inner.gradient(loss, asked)]
                loss += tf.add_n([tf.reduce_mean(each**2) for each in steep])
        before = len(operations())
        found = tape.gradient(loss, [v.value for v in model.trainable_variables])
        if ordered:
            filters_first(operations()[before:], found)
        return found

    return gradients


def pairs_of(graph: tf.Graph) -> list[tuple[tf.Operation, tf.Operation]]:
    """Each gradient of an input with that of the same convolution's filters."""
    made = graph.get_operations()
    return [
        (one, other)
        for one in made
        for other in made
        if (one.type, other.type) == (INPUT, FILTERS) and one.inputs[2] is other.inputs[2]
    ]


@pytest.fixture(scope="module")
def images() -> tf.Tensor:
    return tf.constant(np.random.default_rng(4).normal(size=(5, 16, 16, 3)).astype(np.float32))


def test_filters_come_first_and_no_number_changes(images: tf.Tensor) -> None:
    model = model_of()
    as_it_was, ordered = (gradient_of(model, ordered=wanted) for wanted in (False, True))

    pairs = pairs_of(ordered.get_concrete_function(images).graph)

    assert len(pairs) == 3
    assert all(filters in one.control_inputs for one, filters in pairs)
    assert not any(
        one.control_inputs for one, _ in pairs_of(as_it_was.get_concrete_function(images).graph)
    )
    for before, after in zip(as_it_was(images), ordered(images), strict=True):
        np.testing.assert_array_equal(before, after)


def test_nothing_waits_for_filters_that_are_frozen(images: tf.Tensor) -> None:
    model = model_of()
    model.get_layer("left").trainable = False

    pairs = pairs_of(gradient_of(model, ordered=True).get_concrete_function(images).graph)

    waits = ["/left" not in filters.name for _, filters in pairs]
    assert sorted(waits) == [False, True, True]
    assert [filters in one.control_inputs for one, filters in pairs] == waits


def test_a_layer_that_is_used_twice_has_no_circle(images: tf.Tensor) -> None:
    keras.utils.set_random_seed(3)
    image = keras.Input((16, 16, 3))
    twice = layers.Conv2D(3, 3, padding="same", activation="relu")
    model = keras.Model(image, layers.GlobalAveragePooling2D()(twice(twice(image))))
    as_it_was, ordered = (gradient_of(model, ordered=wanted) for wanted in (False, True))

    for before, after in zip(as_it_was(images), ordered(images), strict=True):
        np.testing.assert_array_equal(before, after)


def test_a_gradient_of_a_gradient_has_no_circle(images: tf.Tensor) -> None:
    model = model_of()
    as_it_was, ordered = (
        gradient_of(model, ordered=wanted, of_gradient=True) for wanted in (False, True)
    )

    for before, after in zip(as_it_was(images), ordered(images), strict=True):
        np.testing.assert_allclose(before, after, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_a_step_has_that_order_only_where_one_operation_runs_at_a_time(
    threads: int, images: tf.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: threads)
    model = model_of()
    model.compile(optimizer="adam", loss="mse")
    step = tf.function(
        make_train_step(
            BuiltModel(model=model, adapt=lambda features: features),
            lambda element: element,
            distribution=Distribution(name="one_device", strategy=tf.distribute.get_strategy()),
            settings=StepSettings(batch_size=5, accumulate=1, xla=False),
        )
    )

    graph = step.get_concrete_function((images, tf.ones([5, 1]))).graph

    assert [filters in one.control_inputs for one, filters in pairs_of(graph)] == [threads == 1] * 3
