"""Counts the prefetched elements in the buffers of an input pipeline."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def prefetched_elements(iterator: Any) -> float | None:
    """Return how many elements are in the buffers of a pipeline, counted in its output elements.

    Args:
        iterator: Iterator of a dataset. The result is None if TensorFlow keeps no model of it: the
            autotuner is off, or several replicas share it.

    StepInput: tf.data.experimental.get_model_proto; tensorflow/core/framework/model.proto.
    """
    if not isinstance(iterator, tf.data.Iterator):
        return None
    try:
        model = tf.data.experimental.get_model_proto(iterator)
    except tf.errors.NotFoundError:
        return None
    ready, per_element, number = 0.0, 1.0, model.output
    while number in model.nodes:
        node = model.nodes[number]
        ready += node.buffered_elements / per_element
        # Unknown before a stage that yields more or fewer elements than it takes, e.g. a filter.
        known = node.ratio > 0
        if not known or not node.inputs or node.name.startswith("Shuffle"):
            break
        per_element, number = per_element * node.ratio, node.inputs[0]
    return ready
