"""Rebuilds a graph from its definition with other input shapes, so that TensorFlow infers all other shapes.

Nothing is run, and no function is called: placeholders for a call's outputs replace the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

ANY = tf.TensorShape(None)  # type: ignore[arg-type]  # documented, and not in the stubs
"""Shape of a tensor of unknown rank."""

MAX_VALUES = 16
"""Maximum number of elements of an integer tensor whose constant value is kept: such a small tensor may be a shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What is known about a tensor: its dtype, its shape, and the values of some small tensors."""

    dtype: tf.DType
    shape: tf.TensorShape
    """The shape, as far as it is known."""

    value: Any = None
    """The value of a small tensor of whole numbers that does not depend on the inputs; None if unknown."""

    def without_value(self) -> Known:
        """The same tensor without its value, for a tensor that changes from iteration to iteration."""
        return Known(dtype=self.dtype, shape=self.shape)


def known_of(tensor: Any) -> Known:
    """What a graph knows about one of its tensors."""
    value = None
    size = tensor.shape.num_elements()
    if tensor.dtype in (tf.int32, tf.int64) and size is not None and size <= MAX_VALUES:
        value = tf.get_static_value(tensor)
    return Known(dtype=tensor.dtype, shape=tensor.shape, value=value)


def common(shapes: Sequence[tf.TensorShape]) -> tf.TensorShape:
    """The most specific shape that is compatible with all of these."""
    first, *others = shapes
    for other in others:
        first = first.most_specific_compatible_shape(other)
    return first


def name_of(reference: str) -> str:
    """The name of the referenced node."""
    return reference.removeprefix("^").partition(":")[0]


def ordered(nodes: Mapping[str, Any], results: Iterable[str]) -> list[Any]:
    """The nodes that the results depend on, in topological order.

    Args:
        nodes: Name -> node; without cycles.
        results: References to tensors or nodes.
    """
    done: dict[str, Any] = {}
    waiting = [(name_of(result), False) for result in results]
    while waiting:
        name, ready = waiting.pop()
        if name in done or name not in nodes:
            continue
        if ready:
            done[name] = nodes[name]
            continue
        waiting.append((name, True))
        waiting.extend((name_of(each), False) for each in nodes[name].input)
    return list(done.values())


def wanted_of(nodes: Iterable[Any], results: Iterable[str]) -> dict[str, set[int]]:
    """Name of a node -> indices of its outputs that are read."""
    found: dict[str, set[int]] = {}
    references = [*results, *(each for node in nodes for each in node.input)]
    for reference in references:
        if not reference.startswith("^"):
            name, *place = reference.split(":")
            found.setdefault(name, set()).add(int(place[-1]) if place else 0)
    return found


def declared(node: Any) -> list[Known]:
    """The outputs of a node that calls functions, as in the graph's definition."""
    shapes = node.attr["_output_shapes"].list.shape if "_output_shapes" in node.attr else ()
    key = _TYPES.get(node.op)
    if key is None:
        kinds = [tf.variant] * len(shapes)
    else:
        kinds = [tf.as_dtype(each) for each in node.attr[key].list.type]
    if len(shapes) != len(kinds):
        return [Known(dtype=kind, shape=ANY) for kind in kinds]
    pairs = zip(kinds, shapes, strict=True)
    return [Known(dtype=kind, shape=tf.TensorShape(shape)) for kind, shape in pairs]


_TYPES = {
    "PartitionedCall": "Tout",
    "StatefulPartitionedCall": "Tout",
    "If": "Tout",
    "StatelessIf": "Tout",
    "Case": "Tout",
    "StatelessCase": "Tout",
    "While": "T",
    "StatelessWhile": "T",
    "ReduceDataset": "output_types",
}
"""Operation that calls functions -> attribute with the dtypes of its outputs. Other such operations return
datasets."""


class SizedGraph:
    """A graph that is built node by node, so that TensorFlow infers the shapes from earlier nodes."""

    def __init__(self) -> None:
        """Start an empty graph."""
        self._graph = tf.Graph()
        self._made: dict[str, list[Any]] = {}
        self._offsets: dict[str, dict[str, int]] = {}

    def put(self, name: str, outputs: Sequence[Known]) -> None:
        """Replace a node or an argument by placeholders, or by constants for outputs of known value."""
        with self._graph.as_default():
            self._made[name] = [
                tf.compat.v1.placeholder(each.dtype, each.shape)
                if each.value is None
                else tf.constant(each.value, each.dtype)
                for each in outputs
            ]

    def make(self, node: Any) -> None:
        """Add a node that calls no function.

        Raises:
            ValueError: the shapes of its inputs do not fit together.
            RuntimeError: this TensorFlow does not have the operation.
        """
        # Attributes that begin with "_" are hints for the runtime, e.g. colocation and the old shapes.
        attributes = {name: each for name, each in node.attr.items() if not name.startswith("_")}
        operation = self._graph.create_op(
            node.op, self.inputs(node), name=node.name, attrs=attributes
        )
        outputs = list(operation.outputs)
        shapes = node.attr["_output_shapes"].list.shape if "_output_shapes" in node.attr else ()
        if len(shapes) == len(outputs):
            for tensor, shape in zip(outputs, shapes, strict=True):
                tensor.set_shape(tf.TensorShape(shape))
        self._made[node.name] = outputs
        if len(outputs) > 1:
            self._offsets[node.name] = _offsets(operation)

    def inputs(self, node: Any) -> list[Any]:
        """The input tensors of a node."""
        return [self.tensor(each) for each in node.input if not each.startswith("^")]

    def tensor(self, reference: str) -> Any:
        """The referenced tensor: `node`, `node:2`, or in a function `node:argument:2`."""
        name, *place = reference.split(":")
        outputs = self._made[name]
        if not place:
            return outputs[0]
        if len(place) == 1:
            return outputs[int(place[0])]
        # A call was replaced by placeholders, which form one list of outputs, so it has no entry in `_offsets`.
        return outputs[self._offsets.get(name, {}).get(place[0], 0) + int(place[1])]

    def definition(self) -> Any:
        """The `GraphDef`, with the inferred shapes."""
        return self._graph.as_graph_def(add_shapes=True)


def _offsets(operation: Any) -> dict[str, int]:
    """Output argument -> index of its first output."""
    found: dict[str, int] = {}
    start = 0
    for argument in operation.op_def.output_arg:
        found[argument.name] = start
        if argument.number_attr:
            start += int(operation.get_attr(argument.number_attr))
        elif argument.type_list_attr:
            start += len(operation.get_attr(argument.type_list_attr))
        else:
            start += 1
    return found
