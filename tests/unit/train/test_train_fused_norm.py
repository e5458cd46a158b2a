"""BatchNormalization by one kernel leads where Keras's operations lead, and stands in for nothing else."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from stoker.train.fused_norm import fuse_batch_norms
from stoker.train.remat import rematerialise

KERNEL = "FusedBatchNormV3"

SHAPES = {"images": (6, 5, 4, 3), "series": (6, 5, 3), "rows": (6, 3), "a row": (1, 3)}

LAYERS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "without scale": {"scale": False},
    "without centre": {"center": False},
    "other numbers": {"momentum": 0.5, "epsilon": 0.1},
}

ELSEWHERE: dict[str, dict[str, Any]] = {
    "channels first": {"axis": 1},
    "renorm": {"renorm": True},
    "synchronized": {"synchronized": True},
    "less than cuDNN's epsilon": {"epsilon": 1e-6},
    "frozen": {"trainable": False},
    "float64": {"dtype": "float64"},
}


class Own(keras.layers.BatchNormalization):  # type: ignore[misc]  # Keras has no types
    """Somebody's own."""


def model_of(layer: keras.Layer, shape: tuple[int, ...]) -> keras.Model:
    """The layer alone, its weights not those that it begins with."""
    model = keras.Sequential([keras.Input(shape[1:]), layer])
    rng = np.random.default_rng(1)
    for weight in layer.weights:
        weight.assign(rng.uniform(0.5, 1.5, weight.shape))
    return model


def batch_of(shape: tuple[int, ...]) -> tf.Tensor:
    """Numbers that are far from the standard ones."""
    return tf.constant(np.random.default_rng(0).normal(3.0, 2.0, shape).astype("float32"))


def trained(layer: keras.Layer, x: tf.Tensor, *, wanted: bool) -> tuple[list[Any], set[str]]:
    """Outputs, gradients and all weights after a step of the layer, and the kernels that made them."""
    model = model_of(layer, x.numpy().shape)
    fuse_batch_norms(model, wanted=wanted)
    factors = tf.constant(np.arange(tf.size(x), dtype="float32").reshape(x.shape))

    @tf.function
    def step(x: tf.Tensor) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = model(x, training=True)
            loss = tf.reduce_sum(tf.cast(outputs, tf.float32) * factors)
        return [outputs, *tape.gradient(loss, [x, *(v.value for v in model.trainable_variables)])]

    found = [tensor.numpy() for tensor in step(x)]
    kernels = {o.type for o in step.get_concrete_function(x).graph.get_operations()}
    return [*found, *(v.numpy() for v in model.variables)], kernels


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("settings", LAYERS.values(), ids=LAYERS)
def test_it_leads_where_kerass_operations_lead(
    settings: dict[str, Any], shape: tuple[int, ...]
) -> None:
    x = batch_of(shape)
    ours, kernels = trained(keras.layers.BatchNormalization(**settings), x, wanted=True)
    theirs, plain = trained(keras.layers.BatchNormalization(**settings), x, wanted=False)

    assert KERNEL in kernels
    assert KERNEL not in plain
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_in_mixed_precision_it_computes_in_float32_too(policy: str) -> None:
    x = batch_of(SHAPES["images"])
    ours, kernels = trained(keras.layers.BatchNormalization(dtype=policy), x, wanted=True)
    theirs, _ = trained(keras.layers.BatchNormalization(dtype=policy), x, wanted=False)

    assert KERNEL in kernels
    assert ours[0].dtype == theirs[0].dtype == policy.removeprefix("mixed_")
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            our.astype("float32"), their.astype("float32"), rtol=1e-2, atol=0.5
        )


@pytest.mark.parametrize("settings", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_the_kernel_does_not_compute_stays_kerass(settings: dict[str, Any]) -> None:
    x = batch_of(SHAPES["images"])
    ours, kernels = trained(keras.layers.BatchNormalization(**settings), x, wanted=True)
    theirs, _ = trained(keras.layers.BatchNormalization(**settings), x, wanted=False)

    assert KERNEL not in kernels
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(our, their)


def test_a_layer_of_somebodys_own_is_left_alone() -> None:
    _, kernels = trained(Own(), batch_of(SHAPES["images"]), wanted=True)

    assert KERNEL not in kernels


def test_a_layer_deep_in_a_model_is_found() -> None:
    x = batch_of(SHAPES["images"])
    block = keras.Sequential([keras.layers.Conv2D(3, 1), keras.layers.BatchNormalization()])
    _, kernels = trained(block, x, wanted=True)

    assert KERNEL in kernels


def test_inference_is_as_it_was_to_the_bit() -> None:
    x = batch_of(SHAPES["images"])
    model = model_of(keras.layers.BatchNormalization(), SHAPES["images"])
    before = model(x, training=False).numpy()

    fuse_batch_norms(model, wanted=True)

    np.testing.assert_array_equal(model(x, training=False).numpy(), before)
    np.testing.assert_array_equal(model(x).numpy(), before)


def test_a_mask_is_heeded() -> None:
    x = batch_of(SHAPES["series"])
    mask = tf.sequence_mask([5, 4, 3, 2, 1, 5], 5)

    def found(*, wanted: bool) -> list[Any]:
        layer = keras.layers.BatchNormalization()
        model = model_of(layer, SHAPES["series"])
        fuse_batch_norms(model, wanted=wanted)
        outputs = layer(x, training=True, mask=mask).numpy()
        return [outputs, *(v.numpy() for v in layer.variables)]

    for our, their in zip(found(wanted=True), found(wanted=False), strict=True):
        np.testing.assert_array_equal(our, their)


def test_it_can_be_taken_back() -> None:
    layer = keras.layers.BatchNormalization()
    model = model_of(layer, SHAPES["images"])

    fuse_batch_norms(model, wanted=True)
    fuse_batch_norms(model, wanted=True)
    assert "call" in vars(layer)
    fuse_batch_norms(model, wanted=False)

    assert "call" not in vars(layer)


def test_what_is_computed_again_for_its_gradient_still_is() -> None:
    layer = keras.layers.BatchNormalization(name="norm")
    model = model_of(layer, SHAPES["images"])
    rematerialise(model, ["norm"])
    call = layer.call

    fuse_batch_norms(model, wanted=True)

    assert layer.call == call


def test_a_gradient_has_a_gradient() -> None:
    x = batch_of(SHAPES["images"])

    def penalty(*, wanted: bool) -> list[Any]:
        model = model_of(keras.layers.BatchNormalization(), SHAPES["images"])
        fuse_batch_norms(model, wanted=wanted)

        @tf.function
        def step() -> list[Any]:
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    loss = tf.reduce_sum(model(x, training=True) ** 3)
                gradient: Any = inner.gradient(loss, x)
                found = tf.reduce_sum(gradient**2)
            return outer.gradient(found, [v.value for v in model.trainable_variables])

        return [gradient.numpy() for gradient in step()]

    for our, their in zip(penalty(wanted=True), penalty(wanted=False), strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-3, atol=1e-3)


def test_what_is_not_finite_stays_to_be_seen() -> None:
    x = batch_of(SHAPES["images"]).numpy()
    x[0, 0, 0, 0] = np.nan
    found, _ = trained(keras.layers.BatchNormalization(), tf.constant(x), wanted=True)

    outputs, _, gamma, *_ = found
    assert np.isnan(outputs[..., 0]).any()
    assert np.isnan(gamma[0])
