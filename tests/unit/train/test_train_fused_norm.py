"""BatchNormalization in one kernel computes the same as Keras's operations, and replaces only them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from stoker.train.model.remat import rematerialize
from stoker.train.optimizer.fused_kernels import fuse_batch_norms

KERNEL = "FusedBatchNormV3"

SHAPES = {"images": (6, 5, 4, 3), "series": (6, 5, 3), "rows": (6, 3), "a row": (1, 3)}

LAYERS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "without scale": {"scale": False},
    "without center": {"center": False},
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


MIXED = ("mixed_bfloat16", "mixed_float16")


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


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("policy", MIXED)
def test_16_bits_reach_the_kernel_as_they_are(policy: str, shape: tuple[int, ...]) -> None:
    x = batch_of(shape)
    ours, kernels = trained(keras.layers.BatchNormalization(dtype=policy), x, wanted=True)
    theirs, _ = trained(keras.layers.BatchNormalization(dtype=policy), x, wanted=False)

    small = policy.removeprefix("mixed_")
    assert kernel_inputs(policy, shape) == (small, "float32", "float32")
    assert KERNEL in kernels
    assert ours[0].dtype == theirs[0].dtype == small
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            our.astype("float32"), their.astype("float32"), rtol=1e-2, atol=0.5
        )
    # Keras computes them in float32 from the same 16 bits.
    for our, their in zip(ours[-2:], theirs[-2:], strict=True):
        np.testing.assert_allclose(our, their, rtol=2e-5, atol=2e-5)


def kernel_inputs(policy: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Dtypes of the kernel's input, scale and offset, where no cast is between it and its layer."""
    model = model_of(keras.layers.BatchNormalization(dtype=policy), shape)
    fuse_batch_norms(model, wanted=True)
    forward = tf.function(lambda x: model(x, training=True))
    spec = tf.TensorSpec(shape, tf.float32)
    (kernel,) = (
        operation
        for operation in forward.get_concrete_function(spec).graph.get_operations()
        if operation.type == KERNEL
    )
    return tuple(each.dtype.name for each in list(kernel.inputs)[:3])


@pytest.mark.parametrize("policy", ["float32", *MIXED])
def test_a_batch_of_no_rows_gives_no_rows(policy: str) -> None:
    x = batch_of((0, 5, 4, 3))
    ours, kernels = trained(keras.layers.BatchNormalization(dtype=policy), x, wanted=True)
    theirs, _ = trained(keras.layers.BatchNormalization(dtype=policy), x, wanted=False)

    assert KERNEL in kernels
    assert [each.shape for each in ours] == [each.shape for each in theirs]
    # Keras's moving statistics become those of an empty batch.
    for our, their in zip(ours[-2:], theirs[-2:], strict=True):
        np.testing.assert_array_equal(our, their)


def test_nothing_lies_between_images_the_kernel_and_the_relu_behind_it() -> None:
    """The form that TensorFlow's remapper makes one kernel of, in float16 on a GPU."""
    model = keras.Sequential(
        [
            keras.Input((4, 4, 8)),
            keras.layers.Conv2D(8, 3, use_bias=False, dtype="mixed_float16"),
            keras.layers.BatchNormalization(dtype="mixed_float16"),
            keras.layers.ReLU(dtype="mixed_float16"),
        ]
    )
    fuse_batch_norms(model, wanted=True)
    forward = tf.function(lambda x: model(x, training=True))
    graph = forward.get_concrete_function(tf.TensorSpec([None, 4, 4, 8])).graph
    (kernel,) = (each for each in graph.get_operations() if each.type == KERNEL)

    assert kernel.inputs[0].op.type == "Conv2D"
    assert [each.type for each in kernel.outputs[0].consumers()] == ["Relu"]


def losses(policy: str, *, wanted: bool) -> list[float]:
    """The loss of each of 40 steps of a small network of convolutions, BatchNormalization and relu."""
    keras.utils.set_random_seed(7)
    keras.mixed_precision.set_dtype_policy(policy)
    try:
        model = keras.Sequential([keras.Input((5, 5, 3))])
        for filters in (7, 12):
            model.add(keras.layers.Conv2D(filters, 3, padding="same", use_bias=False))
            model.add(keras.layers.BatchNormalization())
            model.add(keras.layers.ReLU())
        model.add(keras.layers.GlobalAveragePooling2D())
        model.add(keras.layers.Dense(3, dtype="float32"))
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    fuse_batch_norms(model, wanted=wanted)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=128.0)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 3, 24)
    images = rng.normal(size=(24, 5, 5, 3)) + 0.5 * labels[:, None, None, None]
    x, y = tf.constant(images, tf.float32), tf.constant(labels)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)
        values = [each.value for each in model.trainable_variables]
        optimizer.apply(tape.gradient(scaled, values), model.trainable_variables)
        return loss

    return [float(step()) for _ in range(40)]


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("mixed_bfloat16", 0.005), ("mixed_float16", 0.001)]
)
def test_a_training_has_the_loss_curve_of_kerass_operations(policy: str, tolerance: float) -> None:
    """The tolerance is of the first loss; the curve falls to less than half of it meanwhile."""
    ours, theirs = losses(policy, wanted=True), losses(policy, wanted=False)

    assert theirs[-1] < 0.5 * theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * theirs[0])


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
    rematerialize(model, ["norm"])
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
