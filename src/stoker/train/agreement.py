"""Validation goes by the quick decoder only as long as the model answers as to the graph's pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import tensorflow as tf

from stoker.data.own.feed import AnyFeed
from stoker.export.saved_model import named_outputs
from stoker.train.feeds import held_to_reference
from stoker.train.model import BuiltModel

LOGIT_THRESHOLD, PROBABILITY_THRESHOLD = 0.0, 0.5
"""From where on a yes or no is a yes."""


def agreed_metrics(
    built: BuiltModel,
    held_out: AnyFeed,
    metrics: Mapping[str, float],
    *,
    batch_size: int,
    validate: Callable[[AnyFeed], dict[str, float]],
) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Hold the metrics of the weights that the model has now against the exported graph's decoder.

    Args:
        built: The compiled model, the best weights in it.
        held_out: The eval split's feed, by which `metrics` were made.
        metrics: Of these weights; those with `val_` are made again where an answer differs.
        batch_size: Rows of a validation batch.
        validate: Makes the metrics with `val_` of another feed of the same rows.

    Returns:
        The metrics that hold, and what to record: `rows`, `differ` and `path` (quick or reference);
        None where there was nothing to compare: no images, no quicker path, or no classes.

    Raises:
        DataError: a shard is damaged.
    """
    outputs = built.outputs_of_classes
    if not outputs:
        return dict(metrics), None

    @tf.autograph.experimental.do_not_convert
    def answer(features: Any) -> list[Any]:
        answered = built.model(built.adapt(features), training=False)
        scores = named_outputs(built.model, answered)
        return [scores[output] for output in outputs if output in scores] or [*scores.values()]

    logits = [built.from_logits(output) for output in outputs]
    feed, found = held_to_reference(
        held_out,
        answer,
        thresholds=[LOGIT_THRESHOLD if each else PROBABILITY_THRESHOLD for each in logits],
        batch_size=batch_size,
    )
    if found is None:
        return dict(metrics), None
    facts = asdict(found) | {"path": "quick" if found.holds else "reference"}
    if found.holds:
        return dict(metrics), facts
    return {**metrics, **validate(feed)}, facts
