"""Operations on gradients. A gradient is a tensor, the used rows of an Embedding, or None."""

from __future__ import annotations

from typing import Any, cast

import keras
import tensorflow as tf

Gradients = list[Any]
"""One gradient per trainable variable: a tensor, IndexedSlices, or None."""


def are_finite(model: keras.Model, gradients: Gradients, loss: tf.Tensor) -> tf.Tensor:
    """Return whether the loss and all gradients are finite.

    With a loss scale, only the loss is checked, because gradients in float16 regularly overflow.
    """
    if isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer):
        return tf.math.is_finite(loss)
    return tf.math.is_finite(loss + total(gradients))


def total(gradients: Gradients) -> tf.Tensor:
    """Return a float32 scalar that is not finite if one of the gradients is not finite."""
    sums = [_sum(gradient) for gradient in gradients if gradient is not None]
    return tf.add_n(sums) if sums else tf.constant(0.0)


def scaled(gradient: Any, factor: tf.Tensor) -> Any:
    """Return the gradient times a scalar."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            scaled(gradient.values, factor), gradient.indices, gradient.dense_shape
        )
    return gradient * tf.cast(factor, gradient.dtype)


def unique(gradient: Any) -> Any:
    """Sum up the entries of an Embedding's gradient that belong to the same row.

    Keras 3.15's Adam squares several entries of a row separately, so its update would differ from the one
    with the gradient of the whole batch.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, place = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, place, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def dense(gradient: Any) -> tf.Tensor:
    """Convert the gradient of an Embedding to a tensor with a row for each row of the variable."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = cast(tf.Tensor, gradient.dense_shape)
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape[0])


def _sum(gradient: Any) -> tf.Tensor:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    # Sum in float32, because a sum in float16 overflows at 65504.
    return tf.reduce_sum(tf.cast(values, tf.float32))


def reduced(
    gradients: Gradients,
    facts: tf.Tensor,
    statistics: list[tf.Tensor],
    *,
    sent_as: tf.DType,
    packs: tf.distribute.experimental.CommunicationOptions,
) -> tuple[Gradients, list[tf.Tensor], tf.Tensor]:
    """Sum gradients, facts and statistics over all replicas.

    Args:
        gradients: This replica's gradients, summed over its rows.
        facts: [n] other sums of this replica: of the losses, the number of rows, and others.
        statistics: This replica's statistics, each multiplied by its number of rows.
        sent_as: Dtype in which gradients are sent.
        packs: How gradients are packed for sending.
    """
    # The exchange of IndexedSlices works only for the shape of its first call, so it would fail for the
    # short last batch of an epoch.
    there = [dense(gradient) for gradient in gradients if gradient is not None]
    sent = [tf.cast(gradient, sent_as) for gradient in there]
    if sent_as == facts.dtype:
        # One exchange with everything is faster than two exchanges.
        sums = _sum_over_replicas([*sent, *statistics, facts], packs)
    else:
        sums = [*_sum_over_replicas(sent, packs), *_sum_over_replicas([*statistics, facts], packs)]
    summed = iter(sums[: len(sent)])
    return (
        [None if gradient is None else tf.cast(next(summed), tf.float32) for gradient in gradients],
        sums[len(sent) : -1],
        sums[-1],
    )


def _sum_over_replicas(
    tensors: list[tf.Tensor], packs: tf.distribute.experimental.CommunicationOptions
) -> list[tf.Tensor]:
    """Sum tensors of the same dtype over the replicas; they are packed together."""
    context = tf.distribute.get_replica_context()
    summed: list[tf.Tensor] = context.all_reduce(tf.distribute.ReduceOp.SUM, tensors, options=packs)
    return summed
