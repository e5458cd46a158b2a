"""What `tf.data` itself has measured of an iterator's stages."""

from __future__ import annotations

import sys
from typing import Any

_MOST_NODES = 200


def read_model(iterator: Any) -> tuple[list[dict[str, Any]], list[float]]:
    """The stages that really run, last one first, and the latest gaps.

    TensorFlow may have fused, replaced or added stages; here is what it made of them.

    Args:
        iterator: Of a dataset.

    Returns:
        Stages, each with the CPU time that it has taken by now; and the time that the consumer took
        between two elements, microseconds, latest last. Both empty where TensorFlow keeps none:
        autotune is off, or the iterator is a strategy's.
    """
    tf: Any = sys.modules["tensorflow"]
    try:
        model = tf.data.experimental.get_model_proto(iterator)
    except (ValueError, AttributeError, tf.errors.OpError):
        return [], []
    nodes: list[dict[str, Any]] = []
    waiting = [(model.output, 0, 1.0)]
    while waiting and len(nodes) < _MOST_NODES:
        number, depth, per_output = waiting.pop(0)
        node = model.nodes[number]
        nodes.append(
            {
                "name": node.name,
                "depth": depth,
                "elements": int(node.num_elements),
                "cpu_ns": int(node.processing_time),
                "ratio": float(node.ratio),
                "per_output": per_output,
                "buffered_bytes": int(node.buffered_bytes),
                "buffered": int(node.buffered_elements),
                "parameters": {
                    each.name: [float(each.value), bool(each.tunable)] for each in node.parameters
                },
            }
        )
        waiting.extend(
            (inner, depth + 1, per_output * taken)
            for inner, taken in _inputs_of(node, model.nodes).items()
        )
    return nodes, [float(gap) for gap in model.gap_times]


_INTERLEAVES = (1, 2)
"""`NodeClass` of stages that take a pipeline for each element: interleave, flat_map."""


def _inputs_of(node: Any, nodes: Any) -> dict[int, float]:
    """The inputs of a node, and how many elements of each count for one that it gives.

    An interleave or flat_map takes one element of its first input for all that a pipeline gives, and
    then elements of these pipelines in turn. For other nodes `ratio` tells, or nothing does.
    """
    inputs = list(node.inputs)
    if node.node_class not in _INTERLEAVES or not inputs:
        return dict.fromkeys(inputs, 1.0)
    given = {key: int(nodes[key].num_elements) for key in inputs}
    first, in_turn = inputs[0], max(1, sum(given[key] for key in inputs[1:]))
    return {
        key: count / (max(1, int(node.num_elements)) if key == first else in_turn)
        for key, count in given.items()
    }


def size_of(element: Any) -> tuple[int, int]:
    """Rows and bytes of an element; rows are its first tensor's first dimension, 0 if unknown."""
    tf: Any = sys.modules["tensorflow"]
    rows, size = 0, 0
    for tensor in tf.nest.flatten(element, expand_composites=True):
        shape = getattr(tensor, "shape", None)
        if shape is None or getattr(shape, "rank", None) is None:
            continue
        if shape.rank and not rows:
            rows = int(shape[0] or 0)
        if shape.is_fully_defined() and tensor.dtype != tf.string:
            size += int(shape.num_elements()) * int(tensor.dtype.size)
    return rows, size
