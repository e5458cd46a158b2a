"""Check that the fast decoder for evaluation agrees with the exported graph; otherwise, it is not used.

There are two checks: the pixels of some images before training, and the model's answers for the whole
split, which decide the validation metrics.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from stoker.data.feed.images.split_images import ImageSplit
from stoker.data.feed.pipeline import Feed

NEEDED_SHARE = 0.999
"""Minimum share of pixels that must differ from the graph's pixels by at most `GRAY_LEVELS`."""

GRAY_LEVELS = 1

SAMPLE_ROWS = 64
"""Number of images that are compared before training, spread over the split."""

TIE = 1e-5
"""Scores that differ by at most this share of the row's largest score count as equal. It is about the error
of float32 sums of some hundred terms on a CPU; for less precise arithmetic see `train/loop/validation.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerAgreement:
    """Comparison of a model's top-1 answers for images from the fast decoder and from the exported graph's decoder."""

    rows: int
    """Number of compared rows: the whole split."""

    differ: int
    """Number of rows whose answers differ; ties do not count."""

    tolerance: float = TIE
    """Scores that differ by at most this share of the row's largest score are a tie."""

    @property
    def holds(self) -> bool:
        """Whether validation may use the fast decoder."""
        return self.differ == 0


def pixels_agree(images: ImageSplit, reference: Callable[[list[bytes]], NDArray[np.uint8]]) -> bool:
    """Return whether both decoders agree on `SAMPLE_ROWS` images, spread over the split.

    Args:
        images: The split, read by the fast decoder.
        reference: Encoded images -> [batch, height, width, channels], decoded by the exported graph.

    Raises:
        DataError: a shard is damaged.
    """
    rows = min(SAMPLE_ROWS, images.rows)
    chosen = np.unique(np.linspace(0, images.rows - 1, rows).astype(np.int64))
    return share_within(images.pixels(chosen), reference(images.encoded(chosen))) >= NEEDED_SHARE


def share_within(found: NDArray[np.uint8], wanted: NDArray[np.uint8]) -> float:
    """Return the share of values that differ by at most `GRAY_LEVELS`."""
    away = np.abs(found.astype(np.int16) - wanted.astype(np.int16))
    return float((away <= GRAY_LEVELS).mean())


def compare_answers(
    fast: Feed,
    reference: Feed,
    *,
    answer: Callable[[Any], Any],
    thresholds: Sequence[float],
    batch_size: int,
    tolerance: float = TIE,
) -> AnswerAgreement:
    """Run a model on every row of a split with both decoders, and compare its answers.

    Args:
        fast: The split as validation reads it, with the fast decoder.
        reference: The same rows, decoded by the exported graph's decoder.
        answer: Features of a batch -> the model's scores, one tensor or several, each
            [batch, ..., classes] or, for yes or no, [batch, 1] or [batch].
        thresholds: For each tensor of scores, the score above which the answer is yes: 0.5, or 0 for
            logits. The thresholds are repeated if there are more tensors.
        batch_size: Rows per batch.
        tolerance: See `other_answers`.

    Raises:
        DataError: a shard is damaged.
    """
    rows = differ = 0
    scores = _scores_of(answer)
    fast_features, reference_features = (_features_of(feed) for feed in (fast, reference))
    with (
        fast.in_order(batch_size=batch_size) as ours,
        reference.in_order(batch_size=batch_size) as graphs,
    ):
        for one, other in zip(ours, graphs, strict=True):
            found = [
                other_answers(
                    np.asarray(a), np.asarray(b), threshold=threshold, tolerance=tolerance
                )
                for a, b, threshold in zip(
                    scores(fast_features(one)),
                    scores(reference_features(other)),
                    itertools.cycle(thresholds),
                    strict=False,
                )
            ]
            rows += len(found[0])
            differ += int(np.logical_or.reduce(found).sum())
    return AnswerAgreement(rows=rows, differ=differ, tolerance=tolerance)


def other_answers(
    scores: NDArray[Any], others: NDArray[Any], *, threshold: float, tolerance: float = TIE
) -> NDArray[np.bool_]:
    """Return for which rows the top-1 answers differ; ties do not count.

    Args:
        scores: [rows, ..., classes] or, for yes or no, [rows, 1] or [rows]; with the first decoder.
        others: The scores of the same rows with the other decoder.
        threshold: The score above which the answer is yes.
        tolerance: A difference counts only if the scores of the two answers differ, with either decoder, by
            more than this share of the row's largest score (or of 1, if that is larger).

    Returns:
        [rows] True if an answer of the row differs.
    """
    first, second = (_as_classes(each, threshold) for each in (scores, others))
    chosen, other = (each.argmax(-1)[..., np.newaxis] for each in (first, second))
    gaps = [
        np.abs(np.take_along_axis(each, chosen, -1) - np.take_along_axis(each, other, -1))
        for each in (first, second)
    ]
    largest = np.maximum(1.0, np.abs(first).max(-1, keepdims=True))
    differs = (chosen != other) & (np.maximum(*gaps) > tolerance * largest)
    return differs.reshape(len(scores), -1).any(axis=1)


def _as_classes(scores: NDArray[Any], threshold: float) -> NDArray[np.float64]:
    """Return yes or no as two classes: the score of "no" is the threshold."""
    wide = scores.astype(np.float64)
    if wide.ndim > 1 and wide.shape[-1] > 1:
        return wide
    column = wide.reshape(len(wide), -1, 1)
    return np.concatenate([np.full_like(column, threshold), column], axis=-1)


def _features_of(feed: Feed) -> Callable[[Any], Any]:
    @tf.function(reduce_retracing=True)
    def features(element: Any) -> Any:
        return feed.load(element)[0]

    return features


def _scores_of(answer: Callable[[Any], Any]) -> Callable[[Any], list[tf.Tensor]]:
    """Return a function for the model's scores, traced once for both feeds: a large model takes seconds."""

    @tf.function(reduce_retracing=True)
    def scores(features: Any) -> list[tf.Tensor]:
        return [tf.cast(each, tf.float32) for each in tf.nest.flatten(answer(features))]

    return scores
