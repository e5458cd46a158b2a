"""The results of one step, and the totals of several."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class StepResult(NamedTuple):
    """The result of one step, scalars."""

    loss_sum: tf.Tensor
    """Mean loss x rows."""

    rows: tf.Tensor
    """Rows of the global batch, float32."""

    finite: tf.Tensor
    """Whether loss and gradients are finite; if not, no weight was changed. For steps that update
    without checking: whether the loss is finite."""

    signals: tf.Tensor
    """[2] int32: how many workers must stop, and to save after this call."""


class StepTotals(NamedTuple):
    """The totals of some steps; scalars except `left`."""

    loss_sum: tf.Tensor
    """Mean loss x rows; meaningless if a step was not finite."""

    rows: tf.Tensor
    """Rows of the steps, float32; meaningless likewise."""

    wait_s: tf.Tensor
    """Time blocked in next(iterator), seconds, float64."""

    steps: tf.Tensor
    """Steps that changed the weights, int64; fewer than requested if the call ended early."""

    finite: tf.Tensor
    """False if the next step had a loss or gradient that is not finite; for steps that update
    without checking, it may also be one of these steps."""

    signals: tf.Tensor
    """[2] int32: how many workers must stop, and to save after this call."""

    last_loss: tf.Tensor
    """Mean loss of the last step, finite or not."""

    left: Any = ()
    """Input that a call took and did not use, nested; see `StepInput`."""

    def and_then(self, later: StepTotals) -> StepTotals:
        """Add the totals of later steps."""
        return later._replace(
            loss_sum=self.loss_sum + later.loss_sum,
            rows=self.rows + later.rows,
            wait_s=self.wait_s + later.wait_s,
            steps=self.steps + later.steps,
        )


def totals_of_step(result: StepResult) -> StepTotals:
    """Return the totals of one step, without its wait for input."""
    return StepTotals(
        loss_sum=result.loss_sum,
        rows=result.rows,
        wait_s=tf.constant(0.0, tf.float64),
        steps=tf.cast(result.finite, tf.int64),
        finite=result.finite,
        signals=result.signals,
        last_loss=result.loss_sum / result.rows,
    )
