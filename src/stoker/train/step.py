"""One training step, and many steps in one Python call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from stoker.train.model import BuiltModel

Batch = tuple[Any, ...]
"""Features by name, each [batch, ...], labels [batch, ...], and weights [batch] where there are."""

Sums = tuple[tf.Tensor, tf.Tensor, tf.Tensor]
"""Over the steps of a call: loss x rows, rows, seconds blocked in next(iterator)."""


def told(batch: Batch, outputs: Any) -> dict[str, Any]:
    """A batch and its answers as Keras's losses and metrics are told them."""
    features, labels, *weights = batch
    parts = {"x": features, "y": labels, "y_pred": outputs}
    return parts | {"sample_weight": weights[0]} if weights else parts


def make_train_step(built: BuiltModel, *, xla: bool) -> Callable[[Batch], tf.Tensor]:
    """One step: forward, loss, backward, update, metrics.

    Args:
        built: The compiled model; its optimizer is built here.
        xla: Compile the forward and backward pass by XLA.

    Returns:
        A function of a batch that updates the model in place and returns the loss, a scalar.
    """
    model, optimizer = built.model, built.model.optimizer
    optimizer.build(model.trainable_variables)

    def forward_backward(batch: Batch) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        features = batch[0]
        with tf.GradientTape() as tape:
            outputs = model(built.adapt(features), training=True)
            loss = model.compute_loss(**told(batch, outputs), training=True)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, [v.value for v in model.trainable_variables])
        return loss, outputs, gradients

    compiled = tf.function(forward_backward, jit_compile=True) if xla else forward_backward

    def step(batch: Batch) -> tf.Tensor:
        loss, outputs, gradients = compiled(batch)
        optimizer.apply(gradients, model.trainable_variables)
        model.compute_metrics(**told(batch, outputs))
        # The step has ended when every weight is written: else a wait for input that is measured
        # from here on would hold a part of the update.
        updated = [tf.convert_to_tensor(v.value) for v in model.trainable_variables]
        with tf.control_dependencies(updated):
            return tf.cast(tf.identity(loss), tf.float32)

    return step


def make_eval_step(
    built: BuiltModel, load: Callable[[Any], Batch]
) -> Callable[[Any], tuple[tf.Tensor, tf.Tensor]]:
    """A compiled function of a fed element: updates the metrics, returns loss x rows and rows."""
    model = built.model

    @tf.function(reduce_retracing=True)
    def step(element: Any) -> tuple[tf.Tensor, tf.Tensor]:
        batch = load(element)
        outputs = model(built.adapt(batch[0]), training=False)
        loss = model.compute_loss(**told(batch, outputs), training=False)
        model.compute_metrics(**told(batch, outputs))
        rows = tf.cast(tf.shape(batch[1])[0], tf.float32)
        return tf.cast(loss, tf.float32) * rows, rows

    return step


def make_run_fed(
    step: Callable[[Batch], tf.Tensor], load: Callable[[Any], Batch], *, rows_a_step: int | None
) -> Callable[[Any, tf.Tensor], Sums]:
    """Many steps over an iterator in one call, with the wait for input timed inside the graph.

    Args:
        step: What `make_train_step` made.
        load: The feed's way from an element of the iterator, or a part of it, to a batch.
        rows_a_step: Where an element holds the rows of a whole call: how many of them make a step.
            None where an element is a batch.
    """
    now_s = _clock()

    def wait_for_next(iterator: Any, after: tf.Tensor) -> tuple[Any, tf.Tensor]:
        # The clock starts when what came before has ended, and stops when the element is there.
        with tf.control_dependencies([after]):
            asked_s = now_s()
        with tf.control_dependencies([asked_s]):
            element = next(iterator)
        with tf.control_dependencies(tf.nest.flatten(element)):
            return element, now_s() - asked_s

    @tf.function(reduce_retracing=True)
    def run_batches(iterator: Any, steps: tf.Tensor) -> Sums:
        loss_sum, rows_sum = tf.constant(0.0), tf.constant(0.0)
        wait_s = tf.constant(0.0, tf.float64)
        for _ in tf.range(steps):  # type: ignore[attr-defined]
            element, waited_s = wait_for_next(iterator, loss_sum)
            batch = load(element)
            rows = tf.cast(tf.shape(batch[1])[0], tf.float32)
            loss_sum += step(batch) * rows
            rows_sum += rows
            wait_s += waited_s
        return loss_sum, rows_sum, wait_s

    @tf.function(reduce_retracing=True)
    def run_rows(iterator: Any, steps: tf.Tensor) -> Sums:
        loss_sum, rows_sum = tf.constant(0.0), tf.constant(0.0)
        rows_of_call, wait_s = wait_for_next(iterator, loss_sum)
        for index in tf.range(steps):  # type: ignore[attr-defined]
            batch = load(step_of(rows_of_call, index, rows_a_step or 1))
            rows = tf.cast(tf.shape(batch[1])[0], tf.float32)
            loss_sum += step(batch) * rows
            rows_sum += rows
        return loss_sum, rows_sum, wait_s

    return run_batches if rows_a_step is None else run_rows


def _clock() -> Callable[[], tf.Tensor]:
    try:
        tf.timestamp()
    except tf.errors.FailedPreconditionError:
        # TensorFlow refuses its own clock where operations must be deterministic, which holds for
        # the whole process.
        return _python_clock
    return tf.timestamp


def _python_clock() -> tf.Tensor:
    read = tf.numpy_function(lambda: np.float64(time.monotonic()), [], tf.float64)
    return tf.ensure_shape(read, [])


def step_of(call: Any, step: tf.Tensor | int, rows: int) -> Any:
    """The rows of one step, cut out of the rows of a call."""
    return tf.nest.map_structure(lambda tensor: tensor[step * rows : (step + 1) * rows], call)


def make_run_resident(
    step: Callable[[Batch], tf.Tensor], load: Callable[[Any], Batch], sample: Any
) -> Callable[[Any, tf.Tensor], tf.Tensor]:
    """The same steps on one element that stays on the device: the ceiling that input can reach.

    Args:
        step: What `make_train_step` made.
        load: The feed's way from an element to a batch, which is a part of the compiled step.
        sample: The element of one step, so that a step for any number of rows is compiled, as for
            fed batches.
    """
    batch_spec = tf.nest.map_structure(
        lambda tensor: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype), sample
    )

    @tf.function(input_signature=[batch_spec, tf.TensorSpec([], tf.int64)])
    def run_resident(element: Any, steps: tf.Tensor) -> tf.Tensor:
        loss_sum = tf.constant(0.0)
        for _ in tf.range(steps):  # type: ignore[attr-defined]
            loss_sum += step(load(element))
        return loss_sum

    return run_resident
