"""Reads nodes, shapes, functions and the length of loops from a traced graph, to count operations.

TensorFlow writes the shapes into the graph's definition. Nothing is run but the arithmetic that
computes a loop's bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

Shape = tuple[int | None, ...]
"""The size of each dimension; None if it is unknown."""

_BOUND_OPS = frozenset(
    [
        "Const",
        "Identity",
        "Cast",
        "Range",
        "Rank",
        "Size",
        "Add",
        "AddV2",
        "Sub",
        "Mul",
        "FloorDiv",
        "FloorMod",
        "Neg",
        "Maximum",
        "Minimum",
        "Max",
        "Min",
        "Prod",
        "Sum",
        "Pack",
        "Squeeze",
        "Reshape",
        "StridedSlice",
        "NotEqual",
        "Equal",
        "Less",
        "Greater",
        "SelectV2",
        "ZerosLike",
        "OnesLike",
        "Fill",
    ]
)
"""Operations that are run to compute a loop's bound: they are pure and cheap, and have one output."""

_LISTS = frozenset(
    [
        "Split",
        "SplitV",
        "Unpack",
        "IdentityN",
        "ShapeN",
        "While",
        "StatelessWhile",
        "If",
        "StatelessIf",
        "Case",
        "StatelessCase",
        "PartitionedCall",
        "StatefulPartitionedCall",
    ]
)
"""Operations whose outputs all belong to one argument: `node:argument:3` in a function's body is output 3."""

_FIRST = {"FusedBatchNormV3": "y", "FusedBatchNormV2": "y", "FusedBatchNorm": "y"}
"""Operation with several output arguments -> name of the first one; other arguments are not supported."""


class Body:
    """The nodes of a graph, or of a function that it calls."""

    def __init__(
        self,
        nodes: Sequence[Any],
        *,
        arguments: Sequence[str] = (),
        argument_shapes: Sequence[Shape | None] = (),
        results: Sequence[str] = (),
    ) -> None:
        """Index the nodes of a definition.

        Args:
            nodes: `NodeDef`s, with `_output_shapes`.
            arguments: Names of the function's arguments.
            argument_shapes: Shapes of the arguments; empty if unknown.
            results: References to the results, and `^node` for other nodes that must run.
        """
        self.nodes = {node.name: node for node in nodes}
        self.arguments = {name: number for number, name in enumerate(arguments)}
        self.results = tuple(results)
        self._argument_shapes = tuple(argument_shapes)

    def inputs(self, node: Any) -> list[str]:
        """References to a node's inputs, without control inputs."""
        return [reference for reference in node.input if not reference.startswith("^")]

    def source(self, reference: str) -> tuple[Any | None, int]:
        """The referenced node and the index of its output; for an argument, None and the argument's index.

        The index is -1 if it is unknown.
        """
        name, *place = reference.split(":")
        node = self.nodes.get(name)
        if node is None:
            return None, self.arguments.get(name, -1)
        if len(place) < 2:
            return node, int(place[0]) if place else 0
        several = len(node.attr["_output_shapes"].list.shape) > 1
        if several and node.op not in _LISTS and _FIRST.get(node.op) != place[0]:
            return node, -1
        return node, int(place[1])

    def shape(self, reference: str) -> Shape | None:
        """Shape of the referenced tensor; None if even its rank is unknown."""
        node, output = self.source(reference)
        if node is None:
            known = 0 <= output < len(self._argument_shapes)
            return self._argument_shapes[output] if known else None
        shapes = node.attr["_output_shapes"].list.shape
        return _shape(shapes[output]) if 0 <= output < len(shapes) else None

    def argument(self, reference: str) -> int | None:
        """Index of the argument that the referenced tensor passes on unchanged; None if it is not an argument."""
        node, output = self.source(reference)
        while node is not None and node.op == "Identity":
            node, output = self.source(self.inputs(node)[0])
        return output if node is None and output >= 0 else None

    def number(self, reference: str) -> int | None:
        """The value of a whole number; None if it depends on the inputs, or cannot be computed.

        Args:
            reference: Reference to the tensor of the number.
        """
        node, output = self.source(reference)
        if node is None or output != 0:
            return None
        needed = self._closure(node)
        if needed is None:
            return None
        graph = tf.compat.v1.GraphDef(node=needed)
        with tf.device("CPU:0"):
            value = tf.compat.v1.wrap_function(
                lambda: tf.graph_util.import_graph_def(graph, return_elements=[f"{node.name}:0"]),
                [],
            )()[0].numpy()
        return int(value) if value.size == 1 else None

    def _closure(self, node: Any) -> list[Any] | None:
        found: dict[str, Any] = {}
        waiting = [node]
        while waiting:
            current = waiting.pop()
            if current.op not in _BOUND_OPS:
                return None
            plain = type(current)()
            plain.CopyFrom(current)
            del plain.input[:]
            for reference in self.inputs(current):
                before, output = self.source(reference)
                if before is None or output != 0:
                    return None
                plain.input.append(before.name)
                if before.name not in found:
                    waiting.append(before)
            for hint in [name for name in plain.attr if name.startswith("_")]:
                del plain.attr[hint]
            found[plain.name] = plain
        return list(found.values())


def body_of(function: Any) -> Body:
    """The nodes that a function of a graph's library runs."""
    signature = function.signature
    shapes = function.attr["_input_shapes"].list.shape if "_input_shapes" in function.attr else ()
    return Body(
        function.node_def,
        arguments=[argument.name for argument in signature.input_arg],
        argument_shapes=[_shape(shape) for shape in shapes],
        results=[
            *(function.ret[result.name] for result in signature.output_arg),
            *(f"^{name}" for name in function.control_ret.values()),
        ],
    )


def _shape(shape: Any) -> Shape | None:
    if shape.unknown_rank:
        return None
    return tuple(None if dimension.size < 0 else dimension.size for dimension in shape.dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class Iterations:
    """The number of iterations of a loop."""

    number: int | None
    """The number; None if it is known only at run time."""

    at_most: bool
    """Whether another condition may end the loop after fewer iterations."""


def loop_iterations(outer: Body, loop: Any, *, library: dict[str, Body]) -> Iterations:
    """The number of iterations of a `While`.

    The loop's condition is `Less(counter, bound)`, or several comparisons that must all hold. Keras's
    recurrent layers, `tf.map_fn`, `tf.scan` and a Python `for` over `tf.range` write it this way. With
    a `break`, AutoGraph writes `Less(...) and not broken`.

    Args:
        outer: The graph that contains the loop.
        loop: The loop's node.
        library: The graph's functions.
    """
    condition = library[loop.attr["cond"].func.name]
    leaves = list(_conjunction(condition, condition.results[0], library=library))
    counted = [_iterations_of(outer, loop, leaf, library=library) for leaf in leaves]
    known = [number for number in counted if number is not None]
    return Iterations(number=min(known) if known else None, at_most=len(known) < len(counted))


def _conjunction(
    condition: Body, reference: str, *, library: dict[str, Body]
) -> Iterator[Any | None]:
    """The nodes that must all be true for a loop to continue; None in place of an unknown one."""
    node, _ = condition.source(reference)
    if node is None:
        yield None
    elif node.op in ("Identity", "LogicalAnd"):
        for before in condition.inputs(node):
            yield from _conjunction(condition, before, library=library)
    elif node.op in ("If", "StatelessIf") and _is_false(
        library[node.attr["else_branch"].func.name]
    ):
        yield from _conjunction(condition, condition.inputs(node)[0], library=library)
        yield None
    else:
        yield node


def _is_false(branch: Body) -> bool:
    """Whether a branch always returns False: the conditional with this branch is then Python's `and`."""
    node, _ = branch.source(branch.results[0])
    while node is not None and node.op == "Identity":
        node, _ = branch.source(branch.inputs(node)[0])
    return (
        node is not None and node.op == "Const" and not tf.make_ndarray(node.attr["value"].tensor)
    )


def _iterations_of(
    outer: Body, loop: Any, comparison: Any | None, *, library: dict[str, Body]
) -> int | None:
    if comparison is None or comparison.op not in ("Less", "LessEqual"):
        return None
    condition, body = (library[loop.attr[role].func.name] for role in ("cond", "body"))
    left, right = condition.inputs(comparison)
    counter = condition.argument(left)
    bound = _entering(outer, loop, condition, body, right)
    if counter is None or bound is None:
        return None
    first = outer.number(outer.inputs(loop)[counter])
    step = _step(outer, loop, body, counter)
    if first is None or not step:
        return None
    last = bound + (comparison.op == "LessEqual")
    return max(0, math.ceil((last - first) / step))


def _entering(outer: Body, loop: Any, condition: Body, body: Body, reference: str) -> int | None:
    """A number in the loop's condition, if it is a constant or an input that the loop never changes; else None."""
    place = condition.argument(reference)
    if place is None:
        return condition.number(reference)
    if body.argument(body.results[place]) != place:
        return None
    return outer.number(outer.inputs(loop)[place])


def _step(outer: Body, loop: Any, body: Body, counter: int) -> int | None:
    """The increment of the counter per iteration; None if it is unknown or not above 0."""
    node, _ = body.source(body.results[counter])
    while node is not None and node.op == "Identity":
        node, _ = body.source(body.inputs(node)[0])
    if node is None or node.op not in ("Add", "AddV2"):
        return None
    parts = body.inputs(node)
    others = [part for part in parts if body.argument(part) != counter]
    if len(others) != 1:
        return None
    step = _entering(outer, loop, body, body, others[0])
    return step if step is not None and step > 0 else None
