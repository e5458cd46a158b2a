"""The graph of a compiled step, written down once: its operations are counted after the script's end.

It is written where U is measured, in the time that is booked apart, and never within a step. Nothing
is traced for it: it is the graph of the very function that was called.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from .facts import FACTS

MOST_BYTES = 256 << 20
"""Of a graph with its shapes, the constants left out: a larger one takes seconds to write."""

MOST_CONSTANT_BYTES = 4096
"""Of a constant that is written with its values: shapes and bounds of loops are shorter."""


def written(concrete: Any, *, given: Any = None, batch: Any = None) -> dict[str, Any]:
    """Write the graph of a step beside the facts.

    Args:
        concrete: The concrete function that was called.
        given: Tensors that it was called with, where it takes them as arguments.
        batch: A batch, where the function takes it from an input by itself.

    Returns:
        The file, and what is known of what enters, as facts; `why` alone where nothing was written.
    """
    graph = concrete.graph.as_graph_def(add_shapes=True)
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        for node in nodes:
            if node.op == "Const":
                _shorten(node)
    if graph.ByteSize() > MOST_BYTES:
        return {"why": f"the step's graph takes more than {MOST_BYTES >> 20} MiB"}
    name = f"step-{os.getpid()}-{_count()}.pb"
    with open(os.path.join(FACTS.folder, name), "wb") as stream:  # noqa: PTH118, PTH123 - as in facts
        stream.write(graph.SerializeToString())
    inputs = concrete.inputs
    own = inputs[: len(inputs) - len(concrete.captured_inputs)]
    return {
        "graph": name,
        "outputs": [tensor.name for tensor in concrete.outputs],
        "runs": [operation.name for operation in concrete.graph.control_outputs],
        "compiled": _by_xla(concrete),
        "given": _given(own, given),
        "batch": [] if batch is None else _shapes(batch),
    }


def _by_xla(concrete: Any) -> bool:
    """Whether XLA compiles the function as a whole."""
    attributes = concrete.function_def.attr
    return "_XlaMustCompile" in attributes and bool(attributes["_XlaMustCompile"].b)


_written = [0]


def _count() -> int:
    _written[0] += 1
    return _written[0]


def _shorten(node: Any) -> None:
    """Leave type and shape of a large constant, and drop its values."""
    value = node.attr["value"].tensor
    if value.ByteSize() > MOST_CONSTANT_BYTES:
        value.CopyFrom(type(value)(dtype=value.dtype, tensor_shape=value.tensor_shape))


def _given(inputs: list[Any], given: Any) -> dict[str, list[int]]:
    """Name of an input -> the shape that it was given; empty where they cannot be told apart."""
    tf: Any = sys.modules["tensorflow"]
    leaves = [leaf for leaf in tf.nest.flatten(given) if hasattr(leaf, "shape")]
    fit = len(leaves) == len(inputs) and all(
        placeholder.shape.is_compatible_with(leaf.shape) and placeholder.dtype == leaf.dtype
        for placeholder, leaf in zip(inputs, leaves, strict=True)
    )
    if not fit:
        return {}
    pairs = zip(inputs, leaves, strict=True)
    return {placeholder.op.name: [int(side) for side in leaf.shape] for placeholder, leaf in pairs}


def _shapes(batch: Any) -> list[list[Any]]:
    """Type and shape of each part of a batch."""
    tf: Any = sys.modules["tensorflow"]
    return [
        [part.dtype.name, [int(side) for side in part.shape]] for part in tf.nest.flatten(batch)
    ]
