"""Check that the fast evaluation decoder agrees with the exported graph; else it is not used.

Checked twice: the pixels of some images before training, and the model's answers over the whole split,
which decide the validation metrics.
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
"""Least share of pixels that differ by at most `GRAY_LEVELS` from the graph's."""

GRAY_LEVELS = 1

SAMPLE_ROWS = 64
"""Number of images that are compared before training, spread over the split."""

TIE = 1e-5
"""Scores that differ by at most this share of the row's largest are equal: about the error of float32
sums of some hundred terms on a CPU. For less precise arithmetic see `train/loop/validation.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerAgreement:
    """Comparison of a model's top-1 answers by the fast decoder and by the exported graph's."""

    rows: int
    """Number of compared rows: the whole split."""

    differ: int
    """Number of rows whose answers differ; ties do not count."""

    tolerance: float = TIE
    """Largest difference of tied scores, as a share of the row's largest score."""

    @property
    def holds(self) -> bool:
        """Whether validation may use the fast decoder."""
        return self.differ == 0


def pixels_agree(images: ImageSplit, reference: Callable[[list[bytes]], NDArray[np.uint8]]) -> bool:
    """Compare both decoders on `SAMPLE_ROWS` images, spread over the split.

    Args:
        images: The fast path.
        reference: Encoded images -> [batch, height, width, channels], by the exported graph.

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
    """Ask a model about every row of a split, by both paths.

    Args:
        fast: The split as validation reads it.
        reference: The same rows by the exported graph's decoder.
        answer: Features of a batch -> the model's scores, one tensor or several, each
            [batch, ..., classes] or, of a yes or no, [batch, 1] or [batch].
        thresholds: Threshold of a yes for each score: 0.5, or 0 for logits; repeated if there are
            more scores.
        batch_size: Rows per batch.
        tolerance: As in `other_answers`.

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
    """Return which rows' top-1 answers differ, without ties.

    Args:
        scores: [rows, ..., classes], or [rows, 1] or [rows] of a yes or no.
        others: The same by the other decoder.
        threshold: Threshold of a yes.
        tolerance: A difference counts only if one of the decoders separates the two answers by more
            than this, as a share of the row's largest score or of 1.

    Returns:
        [rows] True where an answer of the row differs.
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
    """Return a yes or no as two classes; the score of the first is the threshold."""
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
    """The model's scores; traced once for both feeds, since a large model takes seconds."""

    @tf.function(reduce_retracing=True)
    def scores(features: Any) -> list[tf.Tensor]:
        return [tf.cast(each, tf.float32) for each in tf.nest.flatten(answer(features))]

    return scores
