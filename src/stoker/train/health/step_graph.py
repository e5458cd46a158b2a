"""The operations of a traced step, those of the functions that it calls included."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

_OWN_SCOPE = re.compile(r"stoker(_\d+)?")
"""Operations under a name scope of this name are Stoker's own, e.g. the clock of the input's wait,
and are not told of. TensorFlow numbers a scope that comes twice."""

SHOWN = 5
"""Operations that a finding names."""

_PLUMBING = re.compile(r"(while|replica|cond|StatefulPartitionedCall)(_\d+)?")
"""Parts of names that come from loops, replicas and calls, and not from the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOperation:
    """One operation and where it stands."""

    operation: tf.Operation

    compiled: bool
    """Whether XLA compiles it: it stands in a function with `jit_compile=True`."""

    @property
    def kind(self) -> str:
        """TensorFlow's type of it, e.g. `MatMul`."""
        return str(self.operation.type)

    @property
    def scope(self) -> str:
        """The layers that it belongs to, as far as names tell: `model/block/dense`."""
        parts = str(self.operation.name).split("/")[:-1]
        return "/".join(part for part in parts if not _PLUMBING.fullmatch(part))

    @property
    def is_own(self) -> bool:
        """Whether Stoker put it there."""
        return is_stoker_scope(str(self.operation.name))

    @property
    def is_gradient(self) -> bool:
        """Whether it belongs to the backward pass."""
        return "gradient_tape" in str(self.operation.name)


def is_stoker_scope(name: str) -> bool:
    """Whether an operation of this name stands under a scope of Stoker's own."""
    return any(_OWN_SCOPE.fullmatch(part) for part in name.split("/"))


def step_operations(step: Any) -> Iterator[StepOperation]:
    """All operations of a step's graph, each function once for each call of it.

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
    """`a, b and 3 more`, each once."""
    distinct = list(dict.fromkeys(operations))
    shown = ", ".join(distinct[:SHOWN])
    more = len(distinct) - SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
