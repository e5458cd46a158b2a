"""Steps that XLA compiles as a whole, from the forward pass to the update, and programs of several steps.

For a small model, the time to start a program matters, and each start allocates new memory for every
changed weight. So up to `MAX_STEPS_PER_PROGRAM` steps form a single program with a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from stoker.train.step.jit import jit
from stoker.train.step.step_totals import StepResult, StepTotals

MAX_STEPS_PER_PROGRAM = 256
"""Maximum number of steps in a program: a program cannot be stopped while it runs."""

MAX_PROGRAM_S = 0.25
"""Maximum run time of a program of several steps, seconds."""

MIN_STEPS_PER_PROGRAM = 16
"""If `MAX_PROGRAM_S` is enough for fewer steps than this number, a program contains only one step."""

MAX_PROGRAM_BYTES = 64 << 20
"""Maximum total size of the batches of a program, which are in memory at the same time, bytes."""

Body = Callable[[Any], tuple[tf.Tensor, Any, tf.Tensor]]
"""A step that is traced for XLA: batch -> mean loss; the model's outputs, if metrics are updated outside; and
whether everything is finite. It updates the model if everything is finite."""


def max_steps_per_program(batch: Any, *, steps_per_call: int) -> int:
    """Return the maximum number of steps in a program, by the size of the batches.

    Args:
        batch: Batch of a step.
        steps_per_call: Number of steps per call.
    """
    most = max(1, min(MAX_STEPS_PER_PROGRAM, MAX_PROGRAM_BYTES // max(1, bytes_of(batch))))
    return in_equal_parts(steps_per_call, most)


def steps_within_program_time(most: int, step_s: float) -> int:
    """Return the number of steps in a program that takes at most `MAX_PROGRAM_S`; 1 if too few steps would fit.

    Args:
        most: The result of `max_steps_per_program`.
        step_s: Time of a step, seconds.
    """
    if most * step_s <= MAX_PROGRAM_S:
        return most
    fit = int(MAX_PROGRAM_S / step_s)
    return in_equal_parts(most, fit) if fit >= MIN_STEPS_PER_PROGRAM else 1


def in_equal_parts(steps: int, most: int) -> int:
    """Divide steps into as few equal parts as possible; return the number of steps per part."""
    return -(-steps // -(-steps // most))


def bytes_of(batch: Any) -> int:
    """Return the size of a batch of dense tensors, bytes."""
    return sum(int(tf.size(tensor)) * tensor.dtype.size for tensor in tf.nest.flatten(batch))


class OneProgram:
    """A step like the result of `make_train_step`, which can also run several steps in one program."""

    def __init__(
        self,
        body: Body,
        load: Callable[[Any], Any],
        *,
        update_metrics: Callable[[Any, Any], None] | None,
        rows: int,
        steps_per_program: int,
        signals: Callable[[], tf.Tensor],
    ) -> None:
        """Store the arguments; nothing is compiled yet.

        Args:
            body: The function that XLA compiles.
            load: Converts elements, or parts of them, to a batch, row by row.
            update_metrics: Updates the metrics outside the program; None: `body` updates them.
            rows: Number of rows per step, for programs of several steps.
            steps_per_program: Maximum number of steps in a program; 1 if metrics are updated outside it.
            signals: See `StepResult`.
        """
        self.groups = update_metrics is None
        self.steps_per_program = steps_per_program if self.groups else 1
        self.rows = rows
        self._body, self._load = body, load
        self._tell_metrics, self._signals = update_metrics, signals
        self._one = jit(body, role="step")
        self._loop = jit(self._steps, role=f"{steps_per_program} steps")

    @tf.autograph.experimental.do_not_convert
    def __call__(self, element: Any) -> StepResult:
        """Run a single step, with any number of rows."""
        batch = self._load(element)
        loss, outputs, finite = self._one(batch)
        if self._tell_metrics is not None:
            # Update user-defined metrics outside the program, because XLA may be unable to compile them.
            self._tell_metrics(batch, outputs)
        rows = tf.cast(tf.shape(tf.nest.flatten(batch)[0])[0], tf.float32)
        return StepResult(loss * rows, rows, finite, self._signals())

    @tf.autograph.experimental.do_not_convert
    def several(self, elements: Any, steps: tf.Tensor, first: tf.Tensor) -> StepTotals:
        """Run some steps in a program, up to the first step that is not finite.

        The same program is used for any number of steps.

        Args:
            elements: Nested tensors [steps_per_program * rows, ...], which contain the rows of the steps.
            steps: Number of steps, int64, from 1 to `steps_per_program`.
            first: Index of the first of these steps in `elements`, int64.
        """
        loss_sum, done, finite, last_loss = self._loop(self._load(elements), steps, first)
        with tf.control_dependencies([done]):
            signals = tf.identity(self._signals())
        return StepTotals(
            loss_sum=loss_sum,
            rows=tf.cast(done, tf.float32) * self.rows,
            wait_s=tf.constant(0.0, tf.float64),
            steps=done,
            finite=finite,
            signals=signals,
            last_loss=last_loss,
        )

    def _steps(self, batches: Any, steps: tf.Tensor, first: tf.Tensor) -> tuple[tf.Tensor, ...]:
        rows = self.rows

        def of_step(number: tf.Tensor) -> Any:
            begin = tf.cast(first + number, tf.int32) * rows
            return tf.nest.map_structure(
                lambda tensor: tf.slice(
                    tensor, [begin, *[0] * (tensor.shape.rank - 1)], [rows, *tensor.shape[1:]]
                ),
                batches,
            )

        done, finite = tf.constant(0, tf.int64), tf.constant(True)
        loss_sum, loss = tf.constant(0.0), tf.constant(0.0)
        while tf.logical_and(done < steps, finite):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            loss, _, finite = self._body(of_step(done))
            loss_sum += tf.where(finite, loss * rows, 0.0)
            done += tf.cast(finite, tf.int64)
        return loss_sum, done, finite, loss


def multi_step_program(step: Any) -> OneProgram | None:
    """Return the step if it can run several steps in a program; else None."""
    return step if isinstance(step, OneProgram) and step.steps_per_program > 1 else None
