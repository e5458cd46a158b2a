"""Which inputs of a graph are asked whether they hold a value: those that reach an `is_nan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensorflow.core.framework import function_pb2, node_def_pb2

_ASKS = frozenset(("IsNan", "IsFinite"))

_CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))

Functions = Mapping[str, function_pb2.FunctionDef]


def asked_for_missing(concrete: Any) -> set[str]:
    """The inputs that `tf.math.is_nan` or `is_finite` is asked about, or what is computed of them.

    Args:
        concrete: A `tf.types.experimental.ConcreteFunction` of one dictionary.

    Returns:
        Keys of the dictionary.
    """
    graph = concrete.graph.as_graph_def()
    (inputs,), _ = concrete.structured_input_signature
    keys = sorted(inputs)  # as `tf.nest` flattens them
    names = {tensor.op.name: key for tensor, key in zip(concrete.inputs, keys, strict=False)}
    functions = {function.signature.name: function for function in graph.library.function}
    asked = _Body(graph.node, list(names), functions).asked()
    return {names[name] for name in asked}


class _Body:
    """The nodes of a graph or a function."""

    def __init__(
        self, nodes: Sequence[node_def_pb2.NodeDef], inputs: Sequence[str], functions: Functions
    ) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._functions = functions
        self._origins: dict[str, set[str]] = {name: {name} for name in inputs}

    def asked(self) -> set[str]:
        """Names of its inputs."""
        found: set[str] = set()
        for node in self._nodes.values():
            for name in self._asked_of(node):
                found |= self._origin(name)
        return found

    def _asked_of(self, node: node_def_pb2.NodeDef) -> list[str]:
        given = [name for name in node.input if not name.startswith("^")]
        if node.op in _ASKS:
            return given
        if node.op in _CALLS:
            called = self._functions[node.attr["f"].func.name]
            asked = _asked_inside(called, self._functions)
            return [name for name, argument in zip(given, asked, strict=True) if argument]
        inner = [value.func.name for value in node.attr.values() if value.func.name]
        inner += [f.name for value in node.attr.values() for f in value.list.func]
        if any(any(_asked_inside(self._functions[name], self._functions)) for name in inner):
            return given  # a branch or a loop: which of them is not looked at
        return []

    def _origin(self, name: str) -> set[str]:
        """The inputs that a tensor is computed of."""
        own = name.partition(":")[0]
        if own not in self._origins:
            self._origins[own] = set()
            node = self._nodes[own]
            for given in node.input:
                if not given.startswith("^"):
                    self._origins[own] |= self._origin(given)
        return self._origins[own]


def _asked_inside(function: function_pb2.FunctionDef, functions: Functions) -> list[Any]:
    """For each argument whether it is asked about."""
    arguments = [argument.name for argument in function.signature.input_arg]
    asked = _Body(function.node_def, arguments, functions).asked()
    return [name in asked for name in arguments]
