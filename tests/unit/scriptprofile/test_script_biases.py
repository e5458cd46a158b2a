"""A bias is reported if a BatchNormalization cancels it, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tests.unit.scriptprofile.watched import fit, watched

from stoker.scriptprofile.rules.diagnose import diagnose
from stoker.scriptprofile.rules.input_rules import Machine
from stoker.scriptprofile.watcher.stoker_watch.model_facts import late_facts, useless_biases


def conv(**changes: Any) -> Any:
    return layers.Conv2D(4, 3, **({"name": "conv"} | changes))


def norm(**changes: Any) -> Any:
    return layers.BatchNormalization(**changes)


def chain(*parts: Any) -> keras.Model:
    return keras.Sequential([keras.Input((8, 8, 3)), *parts])


def branched() -> keras.Model:
    x = keras.Input((8, 8, 3))
    y = conv()(x)
    return keras.Model(x, layers.Add()([norm()(y), y]))


def given_out() -> keras.Model:
    x = keras.Input((8, 8, 3))
    y = conv()(x)
    return keras.Model(x, [norm()(y), y])


def shared(*, what: str) -> keras.Model:
    x, y = keras.Input((8, 8, 3)), keras.Input((8, 8, 3))
    one, two = conv(), norm()
    other = one if what == "conv" else conv(name="other")
    last = two if what == "norm" else norm()
    return keras.Model([x, y], [two(one(x)), last(other(y))])


def shared_block() -> keras.Model:
    x, y = keras.Input((8, 8, 3)), keras.Input((8, 8, 3))
    block = chain(conv(), norm())
    return keras.Model([x, y], layers.Subtract()([block(x), block(y)]))


def in_inference() -> keras.Model:
    x = keras.Input((8, 8, 3))
    return keras.Model(x, norm()(conv()(x), training=False))


def frozen() -> keras.Model:
    model = chain(conv(), norm())
    model.trainable = False
    return model


class InCode(keras.Model):  # type: ignore[misc]  # Keras has no types
    """What its `call` does with its layers is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = conv(), norm()

    def call(self, x: Any) -> Any:
        return self.two(keras.ops.relu(self.one(x)))


class OwnNorm(layers.BatchNormalization):  # type: ignore[misc]  # Keras has no types
    """Somebody's own."""


NOT_USELESS: dict[str, Callable[[], keras.Model]] = {
    "no bias": lambda: chain(conv(use_bias=False), norm()),
    "an activation in the layer": lambda: chain(conv(activation="relu"), norm()),
    "an activation between": lambda: chain(conv(), layers.ReLU(), norm()),
    "dropout between": lambda: chain(conv(), layers.Dropout(0.1), norm()),
    "nothing behind": lambda: chain(conv()),
    "layer normalization": lambda: chain(conv(), layers.LayerNormalization()),
    "group normalization": lambda: chain(conv(), layers.GroupNormalization(2)),
    "another axis": lambda: chain(conv(), norm(axis=1)),
    "channels first, another axis": lambda: chain(
        conv(data_format="channels_first", padding="same"), norm()
    ),
    "renormalized by what was before": lambda: chain(conv(), norm(renorm=True)),
    "a bias that is held down": lambda: chain(conv(bias_regularizer="l2"), norm()),
    "a bias of one sign": lambda: chain(conv(bias_constraint="non_neg"), norm()),
    "a frozen layer": lambda: chain(conv(trainable=False), norm()),
    "a frozen norm": lambda: chain(conv(), norm(trainable=False)),
    "a frozen model": frozen,
    "two readers": branched,
    "an output of the model": given_out,
    "a layer that is shared": lambda: shared(what="conv"),
    "a norm that is shared": lambda: shared(what="norm"),
    "a block that is shared": shared_block,
    "by moving statistics": in_inference,
    "somebody's own norm": lambda: chain(conv(), OwnNorm()),
    "written in code": InCode,
}


@pytest.mark.parametrize("make", NOT_USELESS.values(), ids=NOT_USELESS)
def test_a_bias_that_may_matter_is_left_alone(make: Callable[[], keras.Model]) -> None:
    assert useless_biases(make()) == []


def nested() -> keras.Model:
    x = keras.Input((8, 8, 3))
    return keras.Model(x, layers.Flatten()(chain(conv(), norm())(x)))


def in_a_class() -> keras.Model:
    model = InCode()
    model.three = chain(conv(name="three"), norm())
    return model


def added_later() -> keras.Model:
    """Each `add` calls all layers before it once more."""
    model = keras.Sequential([keras.Input((8, 8, 3))])
    for layer in (conv(), norm(), layers.ReLU(), layers.Flatten(), layers.Dense(1)):
        model.add(layer)
    return model


USELESS: dict[str, tuple[Callable[[], keras.Model], list[str]]] = {
    "convolution": (lambda: chain(conv(), norm(), layers.ReLU()), ["conv"]),
    "channels first": (
        lambda: chain(conv(data_format="channels_first", padding="same"), norm(axis=1)),
        ["conv"],
    ),
    "depthwise, then separable": (
        lambda: chain(
            layers.DepthwiseConv2D(3, name="deep"),
            norm(),
            layers.SeparableConv2D(4, 3, name="apart"),
            norm(),
        ),
        ["deep", "apart"],
    ),
    "dense over every pixel": (lambda: chain(layers.Dense(5, name="dense"), norm()), ["dense"]),
    "inside of another model": (nested, ["conv"]),
    "a graph inside of a class": (in_a_class, ["three"]),
    "layer by layer": (added_later, ["conv"]),
}


@pytest.mark.parametrize(("make", "names"), USELESS.values(), ids=USELESS)
def test_a_bias_that_is_taken_out_again_is_found(
    make: Callable[[], keras.Model], names: list[str]
) -> None:
    assert [layer.name for layer in useless_biases(make())] == names


def test_keras_applications_resnet50_has_53_of_them() -> None:
    found = useless_biases(keras.applications.ResNet50(weights=None))

    assert len(found) == 53
    assert found[0].name == "conv1_conv"


def test_such_a_bias_has_no_effect_in_training() -> None:
    model = chain(conv(), norm())
    x = tf.constant(np.random.default_rng(0).normal(size=(4, 8, 8, 3)), tf.float32)
    (layer,) = useless_biases(model)
    with tf.GradientTape() as tape:
        before = model(x, training=True)
        loss = tf.reduce_sum(before**3)
    gradient: Any = tape.gradient(loss, layer.bias.value)
    layer.bias.assign([3.0, -1.0, 10.0, 0.5])

    np.testing.assert_allclose(model(x, training=True), before, atol=1e-4)
    assert np.abs(gradient.numpy()).max() < 1e-2


def test_the_finding_on_biases_names_the_line_that_made_the_first() -> None:
    model = chain(conv(), norm(), conv(name="second"), norm())
    model.compile(loss="mse")
    facts = late_facts(model, lambda _: ("/home/me/train.py", 12))
    biased = fit(model=dict(fit().model) | facts)
    (finding,) = (
        each
        for each in diagnose([watched(biased)], Machine(cores=4, memory_bytes=8 << 30)).minor
        if each.kind == "useless_bias"
    )

    assert (finding.place.file, finding.place.line) == ("/home/me/train.py", 12)
    assert "2 layers have a bias" in finding.observation
    assert (
        "conv, second (8 of 292 parameters, 2.74%; the time was not measured)"
        in finding.observation
    )
    assert "use_bias=False" in finding.change
    assert finding.gain is None
