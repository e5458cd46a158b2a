"""The results of a step, and the totals of several steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class StepResult(NamedTuple):
    """The result of a step; all but `signals` are scalars."""

    loss_sum: tf.Tensor
    """Mean loss x rows."""

    rows: tf.Tensor
    """Number of rows of the global batch, float32."""

    finite: tf.Tensor
    """Whether loss and gradients are finite; if not, no weight was changed. For steps that update without a
    check: whether the loss is finite."""

    signals: tf.Tensor
    """[2] int32: how many workers must stop, and how many must save after this call."""


class StepTotals(NamedTuple):
    """The totals of some steps; all but `signals` and `left` are scalars."""

    loss_sum: tf.Tensor
    """Sum of mean loss x rows; meaningless if a step was not finite."""

    rows: tf.Tensor
    """Number of rows of the steps, float32; meaningless if a step was not finite."""

    wait_s: tf.Tensor
    """Time blocked in next(iterator), seconds, float64."""

    steps: tf.Tensor
    """Number of steps that changed the weights, int64; fewer than requested if the call ended early."""

    finite: tf.Tensor
    """False if the call ended because the next step had a loss or gradient that is not finite. If steps update
    without a check, one of the counted steps may be that step."""

    signals: tf.Tensor
    """[2] int32: how many workers must stop, and how many must save after this call."""

    last_loss: tf.Tensor
    """Mean loss of the last step, finite or not."""

    left: Any = ()
    """Input that the call took but did not use, nested; see `StepInput`."""

    def and_then(self, later: StepTotals) -> StepTotals:
        """Add the totals of later steps."""
        return later._replace(
            loss_sum=self.loss_sum + later.loss_sum,
            rows=self.rows + later.rows,
            wait_s=self.wait_s + later.wait_s,
            steps=self.steps + later.steps,
        )


def totals_of_step(result: StepResult) -> StepTotals:
    """Return the totals of a single step; its wait for input is 0."""
    return StepTotals(
        loss_sum=result.loss_sum,
        rows=result.rows,
        wait_s=tf.constant(0.0, tf.float64),
        steps=tf.cast(result.finite, tf.int64),
        finite=result.finite,
        signals=result.signals,
        last_loss=result.loss_sum / result.rows,
    )
