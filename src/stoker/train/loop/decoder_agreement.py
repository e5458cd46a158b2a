"""Checks that the model answers alike with the fast decoder and the exported graph's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import tensorflow as tf

from stoker.data.feed.agreement import TIE
from stoker.data.user_dataset.feed import AnyFeed
from stoker.export.saved_model import named_outputs
from stoker.train.setup.build_model import BuiltModel
from stoker.train.setup.feeds import compare_with_reference

ROUNDING_ERRORS = 4.0
"""Rounding errors by which two scores may differ, from the largest product to the output."""

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "tensor_float_32": 2.0**-11}
"""Compute dtype of a layer -> its relative rounding error."""

GPU_FLOAT32 = 1e-4
"""Tolerance of float32 on a GPU: its order of summation depends on the batch, unlike a CPU's."""

LOGIT_THRESHOLD, PROBABILITY_THRESHOLD = 0.0, 0.5
"""Scores above the threshold count as a yes."""


def tolerance_of(compute_dtype: str, *, on_gpu: bool, tensor_float_32: bool) -> float:
    """Largest difference of two scores, relative to the row's largest, that counts as equal.

    Arithmetic on a GPU differs between two batches, and 16-bit dtypes round coarsely. A smaller
    change of an answer says nothing about the decoder.

    Args:
        compute_dtype: The compute dtype of the model's layers.
        on_gpu: Whether it runs on a GPU.
        tensor_float_32: Whether a GPU rounds float32 products to TensorFloat-32.
    """
    if compute_dtype in UNIT:
        return ROUNDING_ERRORS * UNIT[compute_dtype]
    if not on_gpu:
        return TIE
    return ROUNDING_ERRORS * UNIT["tensor_float_32"] if tensor_float_32 else GPU_FLOAT32


def _tolerance(built: BuiltModel) -> float:
    return tolerance_of(
        str(built.model.dtype_policy.compute_dtype),
        on_gpu=bool(tf.config.list_logical_devices("GPU")),
        tensor_float_32=bool(tf.config.experimental.tensor_float_32_execution_enabled()),
    )


def agreed_metrics(
    built: BuiltModel,
    held_out: AnyFeed,
    metrics: Mapping[str, float],
    *,
    batch_size: int,
    validate: Callable[[AnyFeed], dict[str, float]],
) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Check the metrics of the current weights against the exported graph's decoder.

    Args:
        built: The compiled model with the best weights.
        held_out: Feed of the eval split, used for `metrics`.
        metrics: Metrics of these weights; those with `val_` are computed again if an answer
            differs.
        batch_size: Rows of a validation batch.
        validate: Computes the metrics with `val_` for another feed of the same rows.

    Returns:
        The corrected metrics, and what to record: `rows`, `differ` and `path` (quick or reference);
        None if there was nothing to compare: no images, no faster decoder, or no classes.

    Raises:
        DataError: A shard is damaged.
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
    feed, found = compare_with_reference(
        held_out,
        answer,
        thresholds=[LOGIT_THRESHOLD if each else PROBABILITY_THRESHOLD for each in logits],
        batch_size=batch_size,
        tolerance=_tolerance(built),
    )
    if found is None:
        return dict(metrics), None
    facts = asdict(found) | {"path": "quick" if found.holds else "reference"}
    if found.holds:
        return dict(metrics), facts
    return {**metrics, **validate(feed)}, facts
