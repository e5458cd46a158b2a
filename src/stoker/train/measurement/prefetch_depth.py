"""What lies ready in the buffers of an input."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def prefetched_elements(iterator: Any) -> float | None:
    """How many elements lie ready in the buffers of a pipeline, counted in those that leave it.

    Args:
        iterator: Of a dataset; None where TensorFlow keeps no model of it: its autotuner is off, or
            it is handed out to several replicas.

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
        # Behind a stage that gives more or fewer than it takes, e.g. a filter, it is not known.
        known = node.ratio > 0
        if not known or not node.inputs or node.name.startswith("Shuffle"):
            break
        per_element, number = per_element * node.ratio, node.inputs[0]
    return ready
