"""Operations of complete training steps in graphs that the watcher wrote, compared with counts by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from stoker.measure.operation_tally import Tally
from stoker.measure.step_flops import count_step
from stoker.scriptprofile.counting import on_the_cpu
from stoker.scriptprofile.watcher.stoker_watch.model_facts import write_graph
from stoker.scriptprofile.watcher.stoker_watch.watch import FACTS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the watcher writes."""
    monkeypatch.setattr(FACTS, "folder", str(tmp_path))
    return tmp_path


def step_of(
    forward: Callable[[Any], Any], variables: list[Any], **options: Any
) -> Callable[[Any], Any]:
    """Forward and backward pass, and an update."""

    @tf.function(**options)
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(forward(x))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return step


def counted(folder: Path, function: Any, x: Any, *, traced: Any = None) -> Tally:
    """The count of a function that was traced with open shapes and called with this tensor."""
    concrete = function.get_concrete_function(x if traced is None else traced)
    written = write_graph(concrete, given=(x,))
    return count_step({**written, "kind": "dataset", "calls": 1}, folder)


OPEN = tf.TensorSpec([None, 20], tf.float32)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("traced", [None, OPEN])
def test_both_passes_of_two_products_with_the_batch_that_was_fed(
    folder: Path, *, compiled: bool, traced: Any
) -> None:
    first, second = tf.Variable(tf.ones([20, 50])), tf.Variable(tf.ones([50, 3]))
    step = step_of(lambda x: tf.nn.relu(x @ first) @ second, [first, second], jit_compile=compiled)

    found = counted(folder, step, tf.ones([32, 20]), traced=traced)

    # Forward both; backward of the weights both, of what enters only where somebody needs it.
    one, two = 2 * 32 * 20 * 50, 2 * 32 * 50 * 3
    assert found.work == {("products of matrices", "float32"): 2 * one + 3 * two}
    assert (found.unknown, found.notes) == ((), ())


@pytest.mark.parametrize(
    ("convolve", "kernel", "forward"),
    [
        (
            lambda x, kernel: tf.nn.conv2d(x, kernel, strides=1, padding="VALID"),
            (3, 3, 6, 8),
            14 * 14 * 8 * 2 * 9 * 6,
        ),
        (
            lambda x, kernel: tf.nn.depthwise_conv2d(x, kernel, [1, 1, 1, 1], "SAME"),
            (3, 3, 6, 2),
            16 * 16 * 12 * 2 * 9,
        ),
    ],
)
def test_both_gradients_of_a_convolution_cost_what_it_costs_itself(
    folder: Path, convolve: Any, kernel: tuple[int, ...], forward: int
) -> None:
    scale, weights = tf.Variable(tf.ones([6])), tf.Variable(tf.ones(kernel))
    step = step_of(lambda x: convolve(x * scale, weights), [scale, weights])

    found = counted(
        folder, step, tf.ones([4, 16, 16, 6]), traced=tf.TensorSpec([None, 16, 16, 6], tf.float32)
    )

    # The scale before it needs the gradient of what enters.
    assert found.work == {("convolutions", "float32"): 3 * 4 * forward}
    assert found.unknown == ()


def test_types_are_told_apart(folder: Path) -> None:
    half = tf.Variable(tf.ones([20, 10], tf.bfloat16))

    @tf.function
    def step(x: Any) -> Any:
        return tf.cast(tf.cast(x, tf.bfloat16) @ half, tf.float32) @ tf.ones([10, 5])

    found = counted(folder, step, tf.ones([8, 20]))

    assert found.work == {
        ("products of matrices", "bfloat16"): 2 * 8 * 20 * 10,
        ("products of matrices", "float32"): 2 * 8 * 10 * 5,
    }


def test_functions_that_are_called_and_loops_are_counted_as_often_as_they_run(folder: Path) -> None:
    weights = tf.Variable(tf.ones([20, 20]))

    @tf.function
    def inner(x: Any) -> Any:
        return x @ weights

    @tf.function
    def step(x: Any) -> Any:
        for _ in tf.range(5):  # type: ignore[attr-defined]  # AutoGraph's loop
            x = inner(x)
        return inner(x)

    found = counted(folder, step, tf.ones([8, 20]), traced=OPEN)

    assert found.total == 6 * 2 * 8 * 20 * 20
    assert found.unknown == ()


def test_what_is_not_needed_is_not_run_and_not_counted(folder: Path) -> None:
    weights = tf.ones([20, 20])

    @tf.function
    def step(x: Any) -> Any:
        _ = x @ weights
        return tf.reduce_sum(x)

    assert counted(folder, step, tf.ones([8, 20])).total == 0


def test_an_unknown_size_gives_no_figure_and_is_named(folder: Path) -> None:
    @tf.function
    def step(x: Any) -> Any:
        chosen = tf.boolean_mask(x, tf.reduce_sum(x, axis=1) > 0)
        return chosen @ tf.ones([20, 3])

    found = counted(folder, step, tf.ones([8, 20]))

    assert "MatMul of a size that is not known" in found.unknown[0]


def test_a_loop_of_unknown_length_gives_no_figure(folder: Path) -> None:
    @tf.function
    def step(x: Any) -> Any:
        while tf.reduce_sum(x) < 100:
            x = x @ tf.ones([20, 20])
        return x

    found = counted(folder, step, tf.ones([8, 20]))

    assert "a loop of unknown length" in found.unknown[0]


def test_a_step_of_keras_with_an_open_batch_is_counted_for_the_batch_that_was_fed(
    folder: Path,
) -> None:
    model = keras.Sequential(
        [
            keras.Input((12, 12, 3)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    spec = (
        tf.TensorSpec([None, 12, 12, 3], tf.float32),
        tf.TensorSpec([None], tf.int64),
    )
    batch = tf.ones([16, 12, 12, 3]), tf.zeros([16], tf.int64)
    function = tf.function(model.train_step).get_concrete_function(spec)

    written = write_graph(function, given=(batch,))
    found = count_step({**written, "kind": "fit", "calls": 1}, folder)

    # Of the first layer only the weights' gradient is needed.
    convolution, dense = 16 * 10 * 10 * 8 * 2 * 9 * 3, 16 * 2 * (5 * 5 * 8) * 10
    assert found.work == {
        ("convolutions", "float32"): 2 * convolution,
        ("products of matrices", "float32"): 3 * dense,
    }
    assert found.unknown == ()


def test_a_turn_of_a_loop_over_a_dataset_is_one_step(folder: Path) -> None:
    weights = tf.Variable(tf.ones([20, 4]))

    @tf.function
    def epoch(batches: Any) -> Any:
        total = tf.constant(0.0)
        for x, y in batches:
            total += tf.reduce_sum(x @ weights) + tf.reduce_sum(y)
        return total

    rows = np.ones([100, 20], np.float32), np.ones([100], np.float32)
    dataset = tf.data.Dataset.from_tensor_slices(rows).batch(16)
    batch = tf.ones([16, 20]), tf.ones([16])
    written = write_graph(epoch.get_concrete_function(dataset), batch=batch)

    found = count_step({**written, "kind": "inside", "calls": 1}, folder)

    assert (found.total, found.unknown) == (2 * 16 * 20 * 4, ())


def test_a_large_constant_is_written_without_its_values(folder: Path) -> None:
    large = tf.constant(np.random.default_rng(0).random([500, 400]).astype(np.float32))

    @tf.function
    def step(x: Any) -> Any:
        # Captured as an input it would be: so it is made a constant of the graph.
        return x @ tf.constant(large.numpy())

    written = write_graph(
        step.get_concrete_function(tf.TensorSpec([None, 500])), given=(tf.ones([2, 500]),)
    )

    assert (folder / written["graph"]).stat().st_size < 20_000
    assert count_step({**written, "kind": "dataset", "calls": 1}, folder).total == 2 * 2 * 500 * 400


def test_shapes_that_cannot_be_told_apart_are_left_open(folder: Path) -> None:
    @tf.function
    def step(x: Any) -> Any:
        return x @ tf.ones([20, 3])

    concrete = step.get_concrete_function(OPEN)

    assert write_graph(concrete, given=(tf.ones([8, 20]), tf.ones([3])))["given"] == {}
    assert write_graph(concrete, given=(tf.ones([8, 21]),))["given"] == {}


def test_work_that_a_script_puts_on_the_cpu_is_named_and_what_belongs_there_is_not(
    folder: Path,
) -> None:
    @tf.function
    def step(x: Any) -> Any:
        with tf.device("CPU:0"):
            rows = tf.shape(x)[0]
            slow = tf.sin(x, name="slow")
        return (slow @ tf.ones([20, 3])) / tf.cast(rows, tf.float32)

    placed = counted(folder, step, tf.ones([8, 20])).placed

    assert "Sin slow" in on_the_cpu(placed)
    assert "MatMul" not in on_the_cpu(placed)
    assert on_the_cpu([node for node in placed if node.op != "Sin"]) == ""


def test_an_operation_without_a_kernel_for_gpus_is_named_and_not_where_xla_compiles_it(
    folder: Path,
) -> None:
    def step(x: Any) -> Any:
        return tf.linalg.sqrtm(x, name="root") @ x

    plain = counted(folder, tf.function(step), tf.eye(8)).placed
    compiled = counted(folder, tf.function(step, jit_compile=True), tf.eye(8)).placed

    assert "MatrixSquareRoot root" in on_the_cpu(plain)
    # XLA is to compile this concrete function.
    assert on_the_cpu(compiled) == ""
