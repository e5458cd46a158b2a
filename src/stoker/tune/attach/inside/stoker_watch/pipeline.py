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
    waiting = [(model.output, 0)]
    while waiting and len(nodes) < _MOST_NODES:
        number, depth = waiting.pop(0)
        node = model.nodes[number]
        nodes.append(
            {
                "name": node.name,
                "depth": depth,
                "elements": int(node.num_elements),
                "cpu_ns": int(node.processing_time),
                "ratio": float(node.ratio),
                "buffered_bytes": int(node.buffered_bytes),
                "buffered": int(node.buffered_elements),
                "parameters": {
                    each.name: [float(each.value), bool(each.tunable)] for each in node.parameters
                },
            }
        )
        waiting.extend((inner, depth + 1) for inner in node.inputs)
    return nodes, [float(gap) for gap in model.gap_times]


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
