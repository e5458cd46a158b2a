"""Speed that is lost silently, seen in real graphs; what needs two devices is in integration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

from stoker.train.health.degradation import (
    check_host_sync,
    check_idle_devices,
    check_keras_distribution,
    check_retraces,
    check_scope,
    check_xla,
)
from stoker.train.health.precision import apply_tf32, check_outputs, check_tensor_cores


@pytest.fixture
def bfloat16() -> Iterator[None]:
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    yield
    keras.mixed_precision.set_dtype_policy("float32")


def traced(
    model: keras.Model, x: tf.Tensor, *, xla: bool, extra: Callable[[tf.Tensor], Any] | None = None
) -> Any:
    """A step as the loop makes it: many in one call, forward and backward in a function inside."""

    def forward_backward(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(model(x, training=True), tf.float32))
        return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])

    inner = tf.function(forward_backward, jit_compile=True) if xla else forward_backward

    @tf.function
    def run(x: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        total = tf.constant(0.0)
        for _ in tf.range(steps):  # type: ignore[attr-defined]  # AutoGraph iterates over the tensor
            loss, gradients = inner(x)
            for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
                variable.value.assign_sub(0.1 * gradient)
            if extra is not None:
                loss += tf.cast(extra(x), tf.float32)
            total += loss
        return total

    return run.get_concrete_function(x, tf.constant(2))


def two_layers(units: int = 16, out: int = 1) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(units, name="hidden"),
            layers.Dense(out, name="answer", dtype="float32"),
        ]
    )


X = tf.ones((8, 8))


def test_python_and_printing_inside_the_step_are_named_with_their_layer() -> None:
    class Talking(layers.Layer):  # type: ignore[misc]  # Keras has no types
        def call(self, x: Any) -> Any:
            tf.print("mean", tf.reduce_mean(x))
            return tf.ensure_shape(tf.numpy_function(lambda a: a, [x], tf.float32), x.shape)

    model = keras.Sequential([keras.Input((8,)), Talking(name="talking"), layers.Dense(1)])
    found = check_host_sync(traced(model, X, xla=False))

    assert found is not None
    assert "PrintV2 in sequential" in found.message
    assert "talking" in found.message
    assert "PyFunc" in found.message


def test_a_clean_step_and_our_own_clock_are_not_reported() -> None:
    def clock(x: tf.Tensor) -> Any:
        with tf.name_scope("stoker"):
            return tf.ensure_shape(tf.numpy_function(lambda: 1.0, [], tf.float64), [])

    assert check_host_sync(traced(two_layers(), X, xla=True, extra=clock)) is None


def test_xla_that_compiles_the_step_is_seen_as_used() -> None:
    assert check_xla(traced(two_layers(), X, xla=True)) is None


def test_xla_that_compiles_nothing_is_an_error_that_names_the_layers() -> None:
    found = check_xla(traced(two_layers(), X, xla=False))

    assert found is not None
    assert (found.kind, found.severity) == ("xla_unused", "error")
    assert "compiles none of" in found.message
    assert "hidden" in found.message


def test_xla_that_compiles_a_part_is_a_warning_and_strings_are_said_to_be_the_reason() -> None:
    outside = two_layers()

    def with_strings(x: tf.Tensor) -> Any:
        lengths = tf.strings.length(tf.strings.as_string(x))
        return tf.reduce_sum(outside(tf.cast(lengths, tf.float32)))

    found = check_xla(traced(two_layers(), X, xla=True, extra=with_strings))

    assert found is not None
    assert found.severity == "warning"
    assert "XLA does not support strings" in found.message


def test_more_traces_than_usual_are_counted() -> None:
    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(x)

    for rows in range(1, 4):
        step(tf.ones((rows,)))
    assert check_retraces(step) is None

    step(tf.ones((9,)))
    found = check_retraces(step)
    assert found is not None
    assert "traced 4 times" in found.message


@pytest.mark.usefixtures("bfloat16")
def test_16_bit_products_that_miss_the_tensor_cores_are_named_with_side_and_layer() -> None:
    found = check_tensor_cores(traced(two_layers(units=30), X, xla=True), batch_size=12)

    assert found is not None
    assert "train.batch_size (12)" in found.message
    assert "hidden (30 units)" in found.message.replace("hidden_1", "hidden")
    assert "answer" not in found.message


@pytest.mark.usefixtures("bfloat16")
def test_16_bit_products_in_multiples_of_8_are_well() -> None:
    assert check_tensor_cores(traced(two_layers(units=32), X, xla=True), batch_size=16) is None


def test_float32_products_are_not_looked_at() -> None:
    assert check_tensor_cores(traced(two_layers(units=30), X, xla=True), batch_size=12) is None


@pytest.mark.usefixtures("bfloat16")
def test_convolutions_and_attention_are_looked_at_too() -> None:
    images = keras.Input((8, 8, 3))
    x = layers.Conv2D(12, 3, name="conv")(images)
    x = layers.Conv2D(16, 3, name="after")(x)
    model = keras.Model(images, layers.Dense(1, dtype="float32")(layers.Flatten()(x)))
    found = check_tensor_cores(traced(model, tf.ones((8, 8, 8, 3)), xla=False), batch_size=8)

    assert found is not None
    assert "(12 filters)" in found.message
    assert "(12 input channels)" in found.message
    assert "3 input channels" not in found.message

    words = keras.Input((16, 24))
    attended = layers.MultiHeadAttention(2, 12, name="attention", flash_attention=False)
    pooled = layers.GlobalAveragePooling1D()(attended(words, words))
    model = keras.Model(words, layers.Dense(1, dtype="float32")(pooled))
    found = check_tensor_cores(traced(model, tf.ones((8, 16, 24)), xla=False), batch_size=8)

    assert found is not None
    assert "attention" in found.message
    assert "12 inputs" in found.message


def test_devices_that_hold_no_variable_are_idle() -> None:
    names = ["/device:GPU:0", "/device:GPU:1"]
    found = check_idle_devices(two_layers().variables, names)

    assert found is not None
    assert "GPU:0, GPU:1" in found.message
    assert check_idle_devices(two_layers().variables, names[:1]) is None


def test_without_a_strategy_there_is_no_scope_to_be_outside_of() -> None:
    assert check_scope(two_layers().variables, tf.distribute.get_strategy()) is None


def test_a_keras_distribution_is_an_error_on_tensorflow() -> None:
    assert check_keras_distribution() is None
    mesh = keras.distribution.DeviceMesh((1,), ["batch"], devices=["cpu:0"])
    keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
    try:
        found = check_keras_distribution()
    finally:
        keras.distribution.set_distribution(None)

    assert found is not None
    assert found.severity == "error"


def answering(*last: layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((8,)), layers.Dense(8), *last])


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize(
    ("last", "named"),
    [
        (lambda: [layers.Dense(3, activation="softmax", name="answer")], "answer"),
        (
            lambda: [
                layers.Dense(3, activation="softmax", name="answer"),
                layers.Activation("linear", dtype="float32"),
            ],
            "answer",
        ),
        (lambda: [layers.Dense(3, name="answer"), layers.Reshape((3, 1))], "answer"),
        (lambda: [layers.Dense(3, activation="softmax", name="answer", dtype="float32")], None),
        (lambda: [layers.Dense(3), layers.Softmax(dtype="float32")], None),
    ],
)
def test_answers_in_16_bits_are_named_by_the_layer_that_makes_them(
    last: Callable[[], list[layers.Layer]], named: str | None
) -> None:
    model = answering(*last())
    found = check_outputs(model, model(X))

    assert (found is None) == (named is None)
    if found is not None:
        assert named is not None
        assert named in found.message


@pytest.mark.usefixtures("bfloat16")
def test_a_subclassed_model_is_judged_by_what_it_answers() -> None:
    class Own(keras.Model):  # type: ignore[misc]  # Keras has no types
        def __init__(self, dtype: str | None) -> None:
            super().__init__()
            self.last = layers.Dense(1, dtype=dtype, name="last")

        def build(self, shape: Any) -> None:
            self.last.build(shape)

        def call(self, x: Any) -> Any:
            return self.last(x)

    small, whole = Own(None), Own("float32")
    found = check_outputs(small, small(X))

    assert found is not None
    assert "last" in found.message
    assert check_outputs(whole, whole(X)) is None


def test_in_float32_nothing_is_reported_about_outputs() -> None:
    model = answering(layers.Dense(3, activation="softmax"))

    assert check_outputs(model, model(X)) is None


def test_tf32_is_turned_off_and_on() -> None:
    enabled = tf.config.experimental.tensor_float_32_execution_enabled
    apply_tf32(on=False)
    assert not enabled()
    apply_tf32(on=True)
    assert enabled()


def test_a_finding_is_one_line_for_the_log_and_one_error() -> None:
    found = check_xla(traced(two_layers(), X, xla=False))

    assert found is not None
    assert found.line() == found.as_error().line()
