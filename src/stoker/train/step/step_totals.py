"""What becomes of a step, and of several."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class StepResult(NamedTuple):
    """What became of one step, scalars."""

    loss_sum: tf.Tensor
    """Mean loss x rows."""

    rows: tf.Tensor
    """Rows of the global batch, float32."""

    finite: tf.Tensor
    """Whether loss and gradients were; where not, no weight was changed. Where a step updates at
    once: whether the loss was."""

    signals: tf.Tensor
    """[2] int32: how many workers were asked to end, and to save after this call."""


class StepTotals(NamedTuple):
    """What some steps did, scalars but for what is left."""

    loss_sum: tf.Tensor
    """Mean loss x rows; of no use where a step was not finite."""

    rows: tf.Tensor
    """Rows of the steps, float32; the same."""

    wait_s: tf.Tensor
    """Seconds blocked in next(iterator), float64."""

    steps: tf.Tensor
    """Steps that changed the weights, int64; fewer than asked for where it ended before."""

    finite: tf.Tensor
    """False where the step after these had a loss or a gradient that is not finite; where steps
    update at once, after one of these or that one."""

    signals: tf.Tensor
    """[2] int32: how many workers were asked to end, and to save after this call."""

    last_loss: tf.Tensor
    """Mean loss of the last step, finite or not."""

    left: Any = ()
    """What a call has taken and not used, nested; as in `StepInput`."""

    def and_then(self, later: StepTotals) -> StepTotals:
        """These steps and those that came after them."""
        return later._replace(
            loss_sum=self.loss_sum + later.loss_sum,
            rows=self.rows + later.rows,
            wait_s=self.wait_s + later.wait_s,
            steps=self.steps + later.steps,
        )


def totals_of_step(result: StepResult) -> StepTotals:
    """One step as the sums of it, its wait for input not counted."""
    return StepTotals(
        loss_sum=result.loss_sum,
        rows=result.rows,
        wait_s=tf.constant(0.0, tf.float64),
        steps=tf.cast(result.finite, tf.int64),
        finite=result.finite,
        signals=result.signals,
        last_loss=result.loss_sum / result.rows,
    )
