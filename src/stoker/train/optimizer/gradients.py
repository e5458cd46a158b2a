"""Operations on gradients, which are tensors, the rows of an Embedding, or None."""

from __future__ import annotations

from typing import Any, cast

import keras
import tensorflow as tf

Gradients = list[Any]
"""One gradient per trainable variable: a tensor, IndexedSlices, or None."""


def are_finite(model: keras.Model, gradients: Gradients, loss: tf.Tensor) -> tf.Tensor:
    """Return whether loss and gradients are finite; float16 gradients overflow regularly."""
    if isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer):
        return tf.math.is_finite(loss)
    return tf.math.is_finite(loss + total(gradients))


def total(gradients: Gradients) -> tf.Tensor:
    """Scalar float32 that is not finite if a gradient is not finite."""
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
    """Merge the rows of an Embedding's gradient that occur several times.

    Keras 3.15's Adam squares the parts of such a row separately, and so makes another step than
    with the gradient of the batch.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, place = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, place, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def dense(gradient: Any) -> tf.Tensor:
    """Return the gradient with a row for each row of the variable."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = cast(tf.Tensor, gradient.dense_shape)
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, shape[0])


def _sum(gradient: Any) -> tf.Tensor:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    # A sum in float16 overflows at 65504.
    return tf.reduce_sum(tf.cast(values, tf.float32))


def reduced(
    gradients: Gradients,
    facts: tf.Tensor,
    statistics: list[tf.Tensor],
    *,
    sent_as: tf.DType,
    packs: tf.distribute.experimental.CommunicationOptions,
) -> tuple[Gradients, list[tf.Tensor], tf.Tensor]:
    """Sum gradients and statistics over all replicas.

    Args:
        gradients: A replica's sums over its rows.
        facts: [n], summed too: the sum of the losses, the rows, and others.
        statistics: A replica's statistics, each times its rows.
        sent_as: Dtype in which gradients are sent.
        packs: How many gradients are sent at a time.
    """
    # The exchange of IndexedSlices keeps the shape of its first time: the short last batch of an
    # epoch would fail.
    there = [dense(gradient) for gradient in gradients if gradient is not None]
    sent = [tf.cast(gradient, sent_as) for gradient in there]
    if sent_as == facts.dtype:
        # One exchange of everything is faster than two.
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
    """Sum tensors of one dtype over the replicas, packed together."""
    context = tf.distribute.get_replica_context()
    summed: list[tf.Tensor] = context.all_reduce(tf.distribute.ReduceOp.SUM, tensors, options=packs)
    return summed
