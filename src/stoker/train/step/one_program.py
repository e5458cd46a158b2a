"""A plain step that XLA compiles whole, from the forward pass to the update; and several in a row.

To start a program costs time that a small model feels, and each start gives every weight that it
changes new memory. So up to `MAX_STEPS_PER_PROGRAM` steps are one program, a loop that XLA compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from stoker.train.step.step_totals import StepResult, StepTotals
from stoker.train.xla.jit import jit

MAX_STEPS_PER_PROGRAM = 256
"""Steps of one program at most: while it runs nobody can ask it to end."""

MAX_PROGRAM_S = 0.25
"""Longest that a program of several steps may take."""

MIN_STEPS_PER_PROGRAM = 16
"""Where fewer steps would fill that time a step is long, and there is nothing to gain."""

MAX_PROGRAM_BYTES = 64 << 20
"""Most that the batches of one program may hold: they lie in memory side by side."""

Body = Callable[[Any], tuple[tf.Tensor, Any, tf.Tensor]]
"""A batch -> its mean loss, the outputs where metrics are told elsewhere, and whether it was finite.
It updates the model where it was, and is traced for XLA."""


def max_steps_per_program(batch: Any, *, steps_per_call: int) -> int:
    """How many steps may be one program.

    Args:
        batch: Of one step.
        steps_per_call: Steps that are asked for at once.
    """
    most = max(1, min(MAX_STEPS_PER_PROGRAM, MAX_PROGRAM_BYTES // max(1, bytes_of(batch))))
    return in_equal_parts(steps_per_call, most)


def steps_within_program_time(most: int, step_s: float) -> int:
    """How many steps may be one program, where each takes so long.

    Args:
        most: Of `max_steps_per_program`.
        step_s: Seconds of one step.
    """
    if most * step_s <= MAX_PROGRAM_S:
        return most
    fit = int(MAX_PROGRAM_S / step_s)
    return in_equal_parts(most, fit) if fit >= MIN_STEPS_PER_PROGRAM else 1


def in_equal_parts(steps: int, most: int) -> int:
    """Steps of a part, where as few parts of one length as can be hold them all."""
    return -(-steps // -(-steps // most))


def bytes_of(batch: Any) -> int:
    """What a batch of dense tensors takes."""
    return sum(int(tf.size(tensor)) * tensor.dtype.size for tensor in tf.nest.flatten(batch))


class OneProgram:
    """A step, as `make_train_step` makes it, that can do several at once."""

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
        """Compile nothing yet.

        Args:
            body: What XLA compiles.
            load: The feed's way from elements, or a part of them, to a batch, row by row.
            update_metrics: Tells the metrics of a batch and its outputs beside the program; None: the
                body does.
            rows: Rows of a step where several are done.
            steps_per_program: Steps of one program at most; it is 1 where metrics are told beside it.
            signals: As in `StepResult`.
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
        """One step, of any number of rows."""
        batch = self._load(element)
        loss, outputs, finite = self._one(batch)
        if self._tell_metrics is not None:
            # Somebody's own may be what XLA cannot compile.
            self._tell_metrics(batch, outputs)
        rows = tf.cast(tf.shape(tf.nest.flatten(batch)[0])[0], tf.float32)
        return StepResult(loss * rows, rows, finite, self._signals())

    @tf.autograph.experimental.do_not_convert
    def several(self, elements: Any, steps: tf.Tensor, first: tf.Tensor) -> StepTotals:
        """Some steps, up to the first that is not finite.

        However they are grouped, it is the same program that does them.

        Args:
            elements: [together * rows, ...], nested: their rows, and behind them any others.
            steps: How many, int64, from 1 to `steps_per_program`.
            first: Steps whose rows come before those of these, int64.
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
    """A step, as `make_train_step` makes it, where it can do several at once."""
    return step if isinstance(step, OneProgram) and step.steps_per_program > 1 else None
