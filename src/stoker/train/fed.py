"""Many steps in one Python call, over an iterator or over one resident batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from stoker.train.step import Outcome


class Sums(NamedTuple):
    """What the steps of a call did, scalars."""

    loss_sum: tf.Tensor
    """Over the finite steps: mean loss x rows."""

    rows: tf.Tensor
    """Rows of these steps, float32."""

    wait_s: tf.Tensor
    """Seconds blocked in next(iterator)."""

    steps: tf.Tensor
    """Steps that changed the weights; fewer than asked for where it ended before."""

    finite: tf.Tensor
    """False where the step after these had a loss or a gradient that is not finite."""

    signals: tf.Tensor
    """[2] int32: how many workers were asked to end, and to save after this call."""

    last_loss: tf.Tensor
    """Mean loss of the last step, finite or not."""


def make_run_fed(step: Callable[[Any], Outcome], *, rows_a_step: int | None) -> Any:
    """Many steps over an iterator in one call, with the wait for input timed inside the graph.

    A call ends before its time after a step that was not finite, or when a worker is asked to end.
    Steps do not overlap: an exchange of one step that does not wait for the weights would meet that
    of another step on another replica.

    Args:
        step: What `make_train_step` made.
        rows_a_step: Where an element holds the rows of a whole call: how many of them make a step.
            None where an element is for one step.

    Returns:
        A `tf.function` of the iterator and the number of steps, int64, that gives `Sums`.
    """
    now_s = _clock()

    def wait_for_next(iterator: Any, after: tf.Tensor) -> tuple[Any, tf.Tensor]:
        # The clock starts when what came before has ended, and stops when the element is there.
        with tf.control_dependencies([after]):
            asked_s = now_s()
        with tf.control_dependencies([asked_s]):
            element = next(iterator)
        with tf.control_dependencies(tf.nest.flatten(element, expand_composites=True)):
            return element, now_s() - asked_s

    @tf.function(reduce_retracing=True)
    def run_batches(iterator: Any, steps: tf.Tensor) -> Sums:
        done, going, finite = tf.constant(0, tf.int64), tf.constant(True), tf.constant(True)
        signals, last_loss = tf.constant([0, 0]), tf.constant(0.0)
        loss_sum, rows, wait_s = tf.constant(0.0), tf.constant(0.0), tf.constant(0.0, tf.float64)
        while tf.logical_and(done < steps, going):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            element, waited_s = wait_for_next(iterator, loss_sum)
            outcome = step(element)
            finite, last_loss = outcome.finite, outcome.loss_sum / outcome.rows
            loss_sum += tf.where(finite, outcome.loss_sum, 0.0)
            rows += tf.where(finite, outcome.rows, 0.0)
            done += tf.cast(finite, tf.int64)
            wait_s += waited_s
            signals = outcome.signals
            going = tf.logical_and(finite, tf.equal(signals[0], 0))
        return Sums(loss_sum, rows, wait_s, done, finite, signals, last_loss)

    @tf.function(reduce_retracing=True)
    def run_rows(iterator: Any, steps: tf.Tensor) -> Sums:
        done, going, finite = tf.constant(0, tf.int64), tf.constant(True), tf.constant(True)
        signals, last_loss = tf.constant([0, 0]), tf.constant(0.0)
        loss_sum, rows = tf.constant(0.0), tf.constant(0.0)
        rows_of_call, wait_s = wait_for_next(iterator, loss_sum)
        while tf.logical_and(done < steps, going):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            outcome = step(step_of(rows_of_call, done, rows_a_step or 1))
            finite, last_loss = outcome.finite, outcome.loss_sum / outcome.rows
            loss_sum += tf.where(finite, outcome.loss_sum, 0.0)
            rows += tf.where(finite, outcome.rows, 0.0)
            done += tf.cast(finite, tf.int64)
            signals = outcome.signals
            going = tf.logical_and(finite, tf.equal(signals[0], 0))
        return Sums(loss_sum, rows, wait_s, done, finite, signals, last_loss)

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
    # By its name a check for Python inside the step knows that it is ours.
    with tf.name_scope("stoker"):
        read = tf.numpy_function(lambda: np.float64(time.monotonic()), [], tf.float64)
        return tf.ensure_shape(read, [])


def step_of(call: Any, step: tf.Tensor | int, rows: int) -> Any:
    """The rows of one step, cut out of the rows of a call."""
    return tf.nest.map_structure(lambda tensor: tensor[step * rows : (step + 1) * rows], call)


def make_run_resident(
    step: Callable[[Any], Outcome], sample: Any
) -> Callable[[Any, tf.Tensor], tf.Tensor]:
    """The same steps on one element that stays on the device: the ceiling that input can reach.

    Args:
        step: What `make_train_step` made.
        sample: The element of one step, so that a step for any number of rows is compiled, as for
            fed batches; or of as many as each replica has been handed.
    """
    batch_spec = tf.nest.map_structure(
        lambda part: (
            tf.TensorSpec([None, *part.shape[1:]], part.dtype)
            if tf.is_tensor(part)
            else tf.type_spec_from_value(part)
        ),
        sample,
    )

    @tf.function(input_signature=[batch_spec, tf.TensorSpec([], tf.int64)])
    def run_resident(element: Any, steps: tf.Tensor) -> tf.Tensor:
        loss_sum = tf.constant(0.0)
        for _ in tf.range(steps):  # type: ignore[attr-defined]
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            loss_sum += step(element).loss_sum
        return loss_sum

    return run_resident
