"""Operations of models counted by hand, and what the device reaches."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

from stoker.core.errors import ConfigError, UserError
from stoker.measure.mfu import ModelFlops, count_flops
from stoker.measure.peak_flops import DTYPES, measure_peak_flops


def counted(shape: tuple[int | None, ...], *stack: Any, **given: Any) -> ModelFlops:
    inputs = x = keras.Input(shape)
    for layer in stack:
        x = layer(x)
    return count_flops(keras.Model(inputs, x), **given)


def test_a_dense_stack() -> None:
    found = counted((20,), layers.Dense(50, activation="relu"), layers.Dense(3))

    assert found.forward_per_sample == 2 * 20 * 50 + 2 * 50 * 3
    assert found.step_per_sample == 3 * found.forward_per_sample
    assert found.in_products == found.forward_per_sample
    assert found.in_convolutions == 0
    assert found.not_counted == ()


@pytest.mark.parametrize("batch_size", [1, 7])
def test_the_count_is_of_one_sample_whatever_the_batch(batch_size: int) -> None:
    assert counted((5,), layers.Dense(4), batch_size=batch_size).forward_per_sample == 40


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        # Outputs x 2 x window x channels in.
        (layers.Conv2D(8, 3, padding="valid"), 14 * 14 * 8 * 2 * 9 * 6),
        (layers.Conv2D(8, 3, padding="same"), 16 * 16 * 8 * 2 * 9 * 6),
        (layers.Conv2D(8, (5, 3), strides=2, padding="same"), 8 * 8 * 8 * 2 * 15 * 6),
        (layers.Conv2D(8, 4, strides=(3, 2)), 5 * 7 * 8 * 2 * 16 * 6),
        (layers.Conv2D(8, 3, dilation_rate=2), 12 * 12 * 8 * 2 * 9 * 6),
        (layers.Conv2D(9, 3, groups=3), 14 * 14 * 9 * 2 * 9 * 2),
        (layers.DepthwiseConv2D(3, depth_multiplier=2), 14 * 14 * 12 * 2 * 9),
        (layers.SeparableConv2D(8, 3), 14 * 14 * (6 * 2 * 9 + 8 * 2 * 6)),
        # Each of the numbers that enter is spread over the window and the channels out.
        (layers.Conv2DTranspose(8, 3, strides=2), 16 * 16 * 6 * 2 * 9 * 8),
    ],
)
def test_convolutions(layer: layers.Layer, expected: int) -> None:
    found = counted((16, 16, 6), layer)

    assert found.in_convolutions == found.forward_per_sample == expected
    assert found.not_counted == ()


@pytest.mark.parametrize(
    ("name", "multiplications"),
    [
        # He et al., arXiv:1512.03385, table 1
        pytest.param("ResNet50", 3.8e9, marks=pytest.mark.soak),
        ("MobileNetV2", 300e6),  # Sandler et al., arXiv:1801.04381, table 4
    ],
)
def test_networks_count_what_their_authors_say(name: str, multiplications: float) -> None:
    found = count_flops(getattr(keras.applications, name)(weights=None), batch_size=1)

    assert found.forward_per_sample == pytest.approx(2 * multiplications, rel=0.02)
    assert found.not_counted == ()


def test_convolutions_of_other_dimensions() -> None:
    assert counted((20, 3), layers.Conv1D(4, 5)).in_convolutions == 16 * 4 * 2 * 5 * 3
    assert counted((6, 6, 6, 2), layers.Conv3D(4, 3)).in_convolutions == 4**3 * 4 * 2 * 27 * 2


def test_attention() -> None:
    inputs = keras.Input((10, 8))
    model = keras.Model(inputs, layers.MultiHeadAttention(num_heads=2, key_dim=4)(inputs, inputs))

    found = count_flops(model)

    projections = 4 * 2 * 10 * 8 * (2 * 4)
    scores_and_values = 2 * (2 * 2 * 10 * 10 * 4)
    assert found.forward_per_sample == found.in_products == projections + scores_and_values
    assert found.not_counted == ()


def test_einsum_with_an_ellipsis_and_what_is_broadcast() -> None:
    def product(given: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        return tf.einsum("...ij,...jk->...ik", *given)

    specs = (tf.TensorSpec([3, 5, 2, 4]), tf.TensorSpec([1, 4, 7]))

    assert count_flops(product, inputs=specs).forward_per_sample == 2 * 5 * 2 * 4 * 7


CELLS = [(layers.GRU, 3), (layers.LSTM, 4), (layers.SimpleRNN, 1)]


@pytest.mark.parametrize(("kind", "gates"), CELLS)
@pytest.mark.parametrize("unroll", [False, True])
def test_recurrent_layers_count_every_step(kind: Any, gates: int, unroll: bool) -> None:
    found = counted((10, 8), kind(6, unroll=unroll))

    assert found.forward_per_sample == 10 * gates * 2 * (8 * 6 + 6 * 6)
    assert found.not_counted == ()


def test_both_directions_are_counted() -> None:
    found = counted((10, 8), layers.Bidirectional(layers.LSTM(6)), layers.Dense(1))

    assert found.forward_per_sample == 2 * 10 * 4 * 2 * (8 * 6 + 6 * 6) + 2 * 12


def test_a_loop_of_unknown_length_is_one_turn_and_said_so() -> None:
    found = counted((None, 8), layers.GRU(6))

    assert found.forward_per_sample == 3 * 2 * (8 * 6 + 6 * 6)
    (note,) = found.not_counted
    assert "loop of unknown length" in note

    given = counted((None, 8), layers.GRU(6), inputs=tf.TensorSpec([None, 10, 8]))
    assert given.forward_per_sample == 10 * found.forward_per_sample
    assert given.not_counted == ()


def test_a_loop_that_may_end_early_is_counted_whole_with_a_note() -> None:
    def until_large(given: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(2, 11, 3):  # type: ignore[attr-defined]  # AutoGraph's loop
            given = tf.matmul(given, tf.ones([4, 4]))
            if tf.reduce_max(given) > 100.0:
                break
        return given

    found = count_flops(until_large, inputs=tf.TensorSpec([2, 4]))

    assert found.forward_per_sample == 3 * 2 * 4 * 4
    assert ["at most 3 iterations" in note for note in found.not_counted] == [True]


def test_loops_within_functions_within_loops() -> None:
    @tf.function
    def inner(given: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(5):  # type: ignore[attr-defined]  # AutoGraph's loop
            given = tf.matmul(given, tf.ones([4, 4]))
        return given

    def outer(given: tf.Tensor) -> tf.Tensor:
        return tf.map_fn(lambda row: inner(row[tf.newaxis])[0], given)

    found = count_flops(outer, inputs=tf.TensorSpec([6, 4]))

    assert found.forward_per_sample == 5 * 2 * 4 * 4
    assert found.not_counted == ()


def test_of_two_branches_the_larger_is_counted() -> None:
    def either(given: tf.Tensor) -> tf.Tensor:
        if tf.reduce_sum(given) > 0.0:
            return tf.matmul(given, tf.ones([4, 4]))
        return given

    found = count_flops(either, inputs=tf.TensorSpec([2, 4]))

    assert found.forward_per_sample == 2 * 4 * 4
    assert ["largest branch" in note for note in found.not_counted] == [True]


def test_a_gpus_recurrent_kernel_is_counted_as_the_loop_is() -> None:
    def gru(given: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.CudnnRNNV3(
            input=given,
            input_h=tf.zeros([1, 2, 6]),
            input_c=tf.zeros([0]),
            params=tf.zeros([3 * (8 * 6 + 6 * 6) + 36]),
            sequence_lengths=tf.fill([2], 10),
            rnn_mode="gru",
            num_proj=0,
        )[0]

    # Time comes first: [10, 2 samples, 8].
    traced = tf.function(lambda rows: gru(tf.transpose(rows, [1, 0, 2])))
    found = count_flops(traced.get_concrete_function(tf.TensorSpec([2, 10, 8])))

    assert found.forward_per_sample == 10 * 3 * 2 * (8 * 6 + 6 * 6)


def test_operations_without_a_formula_are_reported() -> None:
    def solve(given: tf.Tensor) -> tf.Tensor:
        return tf.linalg.inv(given)

    found = count_flops(solve, inputs=tf.TensorSpec([2, 3, 3]))

    assert found.forward_per_sample == 0
    assert ["MatrixInverse" in note for note in found.not_counted] == [True]


def test_a_model_with_named_inputs_and_one_whose_class_is_the_users() -> None:
    named = {"a": keras.Input((3,), name="a"), "b": keras.Input((4,), name="b")}
    both = layers.Dense(2)(layers.Concatenate()([named["b"], named["a"]]))
    assert count_flops(keras.Model(named, both)).forward_per_sample == 2 * 7 * 2

    class Own(keras.Model):  # type: ignore[misc]  # Keras has no types
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(5)

        def call(self, given: Any) -> Any:
            return self.dense(given["x"])

    given = {"x": tf.TensorSpec([None, 3])}
    assert count_flops(Own(), inputs=given).forward_per_sample == 2 * 3 * 5
    with pytest.raises(UserError, match="needs `inputs`"):
        count_flops(Own())


def test_a_sequential_model_that_was_never_called() -> None:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(5)])

    assert count_flops(model).forward_per_sample == 2 * 3 * 5


def test_a_function_that_is_traced_for_any_batch_is_refused() -> None:
    traced = tf.function(lambda x: tf.matmul(x, tf.ones([4, 4])))

    with pytest.raises(UserError, match="known batch size"):
        count_flops(traced.get_concrete_function(tf.TensorSpec([None, 4])))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_peak_is_reached_by_a_size_that_was_tried(dtype: str) -> None:
    peak = measure_peak_flops(dtype, seconds=0.2)

    assert peak.dtype == dtype
    assert "device:CPU" in peak.device or "device:GPU" in peak.device
    assert peak.products_per_s > 1e6
    assert peak.convolutions_per_s > 1e6
    assert peak.product_size >= 256
    assert len(peak.convolution_size) == 3


def test_a_peak_of_what_is_not_a_float_or_takes_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match=DTYPES[0]):
        measure_peak_flops("int8", seconds=1)
    with pytest.raises(ConfigError, match="more than 0 seconds"):
        measure_peak_flops("float32", seconds=0)
