"""The operations of a traced step, including those of the functions that it calls."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

_OWN_SCOPE = re.compile(r"stoker(_\d+)?")
"""Operations in a name scope with this name are Stoker's own, e.g. the clock of the input wait, and
are not reported. TensorFlow numbers a scope name that occurs twice."""

SHOWN = 5
"""Most operations that a finding names."""

_PLUMBING = re.compile(r"(while|replica|cond|StatefulPartitionedCall)(_\d+)?")
"""Parts of names that come from loops, replicas and calls, not from the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOperation:
    """An operation and its place."""

    operation: tf.Operation

    compiled: bool
    """Whether XLA compiles it: it is in a function with `jit_compile=True`."""

    @property
    def kind(self) -> str:
        """Its TensorFlow type, e.g. `MatMul`."""
        return str(self.operation.type)

    @property
    def scope(self) -> str:
        """The layers that it belongs to, according to its name: `model/block/dense`."""
        parts = str(self.operation.name).split("/")[:-1]
        return "/".join(part for part in parts if not _PLUMBING.fullmatch(part))

    @property
    def is_own(self) -> bool:
        """Whether it belongs to Stoker."""
        return is_stoker_scope(str(self.operation.name))

    @property
    def is_gradient(self) -> bool:
        """Whether it belongs to the backward pass."""
        return "gradient_tape" in str(self.operation.name)


def is_stoker_scope(name: str) -> bool:
    """Return whether an operation with this name is in a scope of Stoker."""
    return any(_OWN_SCOPE.fullmatch(part) for part in name.split("/"))


def step_operations(step: Any) -> Iterator[StepOperation]:
    """Yield all operations of a step's graph; a function once per call of it.

    Args:
        step: A concrete function: `run.get_concrete_function(...)`.
    """
    yield from _walk(step.graph, compiled=False)


def _walk(graph: Any, *, compiled: bool) -> Iterator[StepOperation]:
    for operation in graph.get_operations():
        yield StepOperation(operation=operation, compiled=compiled)
        for name in _functions_of(operation.node_def):
            function = graph._get_function(name)  # noqa: SLF001 - the graph of a called function
            if function is not None:
                must = operation.node_def.attr["_XlaMustCompile"].b
                yield from _walk(function.graph, compiled=compiled or must)


def _functions_of(node: Any) -> list[str]:
    names: list[str] = []
    for value in node.attr.values():
        kind = value.WhichOneof("value")
        if kind == "func":
            names.append(value.func.name)
        elif kind == "list":
            names += [function.name for function in value.list.func]
    return names


def named(operations: Sequence[str]) -> str:
    """Join names without duplicates: `a, b and 3 more`."""
    distinct = list(dict.fromkeys(operations))
    shown = ", ".join(distinct[:SHOWN])
    more = len(distinct) - SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
