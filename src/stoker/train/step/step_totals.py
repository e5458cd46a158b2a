"""What becomes of a step, and of several."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class Outcome(NamedTuple):
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


class Sums(NamedTuple):
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
    """What a call has taken and not used, nested; as in `Source`."""

    def and_then(self, later: Sums) -> Sums:
        """These steps and those that came after them."""
        return later._replace(
            loss_sum=self.loss_sum + later.loss_sum,
            rows=self.rows + later.rows,
            wait_s=self.wait_s + later.wait_s,
            steps=self.steps + later.steps,
        )


def sums_of(outcome: Outcome) -> Sums:
    """One step as the sums of it, its wait for input not counted."""
    return Sums(
        loss_sum=outcome.loss_sum,
        rows=outcome.rows,
        wait_s=tf.constant(0.0, tf.float64),
        steps=tf.cast(outcome.finite, tf.int64),
        finite=outcome.finite,
        signals=outcome.signals,
        last_loss=outcome.loss_sum / outcome.rows,
    )
