"""Rebuilds a graph's definition with other shapes, so that TensorFlow infers the resulting shapes.

Nothing is run, and no function is called: a placeholder with its outputs replaces each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

ANY = tf.TensorShape(None)  # type: ignore[arg-type]  # documented, and not in the stubs
"""Shape of a tensor of unknown rank."""

MAX_VALUES = 16
"""Most whole numbers of a tensor whose value is passed into a function: it is a shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """The known value of a tensor, or None."""

    dtype: tf.DType
    shape: tf.TensorShape
    """Or of a part of it."""

    value: Any = None
    """The value of a short array of whole numbers that does not depend on fed values."""

    def without_value(self) -> Known:
        """The same tensor without its value, because it changes from turn to turn."""
        return Known(dtype=self.dtype, shape=self.shape)


def known_of(tensor: Any) -> Known:
    """What a graph knows about one of its tensors."""
    value = None
    size = tensor.shape.num_elements()
    if tensor.dtype in (tf.int32, tf.int64) and size is not None and size <= MAX_VALUES:
        value = tf.get_static_value(tensor)
    return Known(dtype=tensor.dtype, shape=tensor.shape, value=value)


def common(shapes: Sequence[tf.TensorShape]) -> tf.TensorShape:
    """The most specific shape that covers all of these."""
    first, *others = shapes
    for other in others:
        first = first.most_specific_compatible_shape(other)
    return first


def name_of(reference: str) -> str:
    """The name of the referenced node."""
    return reference.removeprefix("^").partition(":")[0]


def ordered(nodes: Mapping[str, Any], results: Iterable[str]) -> list[Any]:
    """The nodes that results depend on, in topological order.

    Args:
        nodes: By name, without cycles.
        results: References.
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
    """Node -> its outputs that are read, by number."""
    found: dict[str, set[int]] = {}
    references = [*results, *(each for node in nodes for each in node.input)]
    for reference in references:
        if not reference.startswith("^"):
            name, *place = reference.split(":")
            found.setdefault(name, set()).add(int(place[-1]) if place else 0)
    return found


def declared(node: Any) -> list[Known]:
    """The outputs of a node that calls a function, according to the definition."""
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
"""Operation that calls a function -> attribute with the types of its outputs; other ones return datasets."""


class SizedGraph:
    """Builds the nodes of a definition one by one, with the shapes of earlier ones."""

    def __init__(self) -> None:
        """Start an empty graph."""
        self._graph = tf.Graph()
        self._made: dict[str, list[Any]] = {}
        self._offsets: dict[str, dict[str, int]] = {}

    def put(self, name: str, outputs: Sequence[Known]) -> None:
        """Add a placeholder for a node, or for an argument, with what is known about its outputs."""
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
            ValueError: its inputs do not have compatible shapes.
            RuntimeError: this TensorFlow does not have the operation.
        """
        # Attributes with this prefix are hints for the runtime: colocation, and the shapes themselves.
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
        """The tensor of a reference: `node`, `node:2`, or a function's `node:argument:2`."""
        name, *place = reference.split(":")
        outputs = self._made[name]
        if not place:
            return outputs[0]
        if len(place) == 1:
            return outputs[int(place[0])]
        # The placeholder of a call has one list of outputs.
        return outputs[self._offsets.get(name, {}).get(place[0], 0) + int(place[1])]

    def definition(self) -> Any:
        """The graph, with the inferred shapes."""
        return self._graph.as_graph_def(add_shapes=True)


def _offsets(operation: Any) -> dict[str, int]:
    """Output argument -> number of its first output."""
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
