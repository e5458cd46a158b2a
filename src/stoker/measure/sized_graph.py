"""A graph's definition built once more with other shapes: TensorFlow says what follows from them.

Nothing is run, and no function is called: what calls one is stood in for by what it gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

ANY = tf.TensorShape(None)  # type: ignore[arg-type]  # documented, and not in the stubs
"""Of which not even the rank is known."""

MOST_VALUES = 16
"""Whole numbers of a tensor whose value is carried into a function: it is a shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What is known of a tensor before anything runs."""

    dtype: tf.DType
    shape: tf.TensorShape
    """Or a part of it."""

    value: Any = None
    """The array, where it is a short one of whole numbers that does not depend on what is fed."""

    def without_value(self) -> Known:
        """The same of a tensor that changes from turn to turn."""
        return Known(dtype=self.dtype, shape=self.shape)


def known_of(tensor: Any) -> Known:
    """What a graph knows of one of its tensors."""
    value = None
    size = tensor.shape.num_elements()
    if tensor.dtype in (tf.int32, tf.int64) and size is not None and size <= MOST_VALUES:
        value = tf.get_static_value(tensor)
    return Known(dtype=tensor.dtype, shape=tensor.shape, value=value)


def common(shapes: Sequence[tf.TensorShape]) -> tf.TensorShape:
    """What is true of all of these shapes."""
    first, *others = shapes
    for other in others:
        first = first.most_specific_compatible_shape(other)
    return first


def name_of(reference: str) -> str:
    """The node that is referred to."""
    return reference.removeprefix("^").partition(":")[0]


def ordered(nodes: Mapping[str, Any], results: Iterable[str]) -> list[Any]:
    """The nodes that results depend on, each behind all that it depends on itself.

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
    """Node -> which of its outputs are read; of a node with several, by their number."""
    found: dict[str, set[int]] = {}
    references = [*results, *(each for node in nodes for each in node.input)]
    for reference in references:
        if not reference.startswith("^"):
            name, *place = reference.split(":")
            found.setdefault(name, set()).add(int(place[-1]) if place else 0)
    return found


def declared(node: Any) -> list[Known]:
    """What the definition itself says of the outputs of a node that calls a function."""
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
"""Operation that calls a function -> where the types of its outputs stand; others give datasets."""


class SizedGraph:
    """Nodes of a definition, made one by one, with the shapes of what was made before them."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._graph = tf.Graph()
        self._made: dict[str, list[Any]] = {}
        self._offsets: dict[str, dict[str, int]] = {}

    def put(self, name: str, outputs: Sequence[Known]) -> None:
        """Stand in for a node, or for an argument, with what is known of its outputs."""
        with self._graph.as_default():
            self._made[name] = [
                tf.compat.v1.placeholder(each.dtype, each.shape)
                if each.value is None
                else tf.constant(each.value, each.dtype)
                for each in outputs
            ]

    def make(self, node: Any) -> None:
        """Make a node that calls no function.

        Raises:
            ValueError: its shapes and what enters do not go together.
            RuntimeError: this TensorFlow has no such operation.
        """
        # Names that begin so are hints of the runtime's: colocation, and the shapes themselves.
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
        """The tensors that enter a node."""
        return [self.tensor(each) for each in node.input if not each.startswith("^")]

    def tensor(self, reference: str) -> Any:
        """The tensor behind a reference: `node`, `node:2`, or a function's `node:argument:2`."""
        name, *place = reference.split(":")
        outputs = self._made[name]
        if not place:
            return outputs[0]
        if len(place) == 1:
            return outputs[int(place[0])]
        # What stands in for a call has one list of outputs.
        return outputs[self._offsets.get(name, {}).get(place[0], 0) + int(place[1])]

    def definition(self) -> Any:
        """The graph, with the shapes that were found."""
        return self._graph.as_graph_def(add_shapes=True)


def _offsets(operation: Any) -> dict[str, int]:
    """Output argument -> the number of its first output."""
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
