"""Finds out whether a model could run forever. Only models with loops or recursive calls can."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tensorflow.core.framework import function_pb2, node_def_pb2
from tensorflow.core.protobuf import saved_model_pb2

from stoker.serve.loading.graph_reachability import called_by
from stoker.serve.runtime.gil_yield import YieldGil, no_yield

LOOPS = frozenset(
    ("While", "StatelessWhile", "_While", "Enter", "RefEnter", "NextIteration", "RefNextIteration")
)
"""Operations that repeat until a condition is false."""


def may_not_end(saved: saved_model_pb2.SavedModel, *, yield_gil: YieldGil = no_yield) -> bool:
    """Whether any graph or function has a loop, or functions that call each other in a cycle."""
    for meta_graph in saved.meta_graphs:
        graph = meta_graph.graph_def
        functions = {found.signature.name: found for found in graph.library.function}
        bodies = (graph.node, *(found.node_def for found in functions.values()))
        if any(_loops(body, yield_gil) for body in bodies) or _has_ring(functions, yield_gil):
            return True
    return False


def _loops(nodes: Iterable[node_def_pb2.NodeDef], yield_gil: YieldGil) -> bool:
    for node in nodes:
        yield_gil()
        if node.op in LOOPS:
            return True
    return False


def _has_ring(functions: Mapping[str, function_pb2.FunctionDef], yield_gil: YieldGil) -> bool:
    """Return whether functions call each other in a cycle.

    Functions that call no remaining function are removed, until only cycles remain.
    """
    calls = {name: _called(found, functions, yield_gil) for name, found in functions.items()}
    while leaves := [name for name, called in calls.items() if not called & calls.keys()]:
        for name in leaves:
            del calls[name]
    return bool(calls)


def _called(
    function: function_pb2.FunctionDef,
    functions: Mapping[str, function_pb2.FunctionDef],
    yield_gil: YieldGil,
) -> set[str]:
    named: set[str] = set()
    for node in function.node_def:
        yield_gil()
        named.update(called_by(node))
    return named & functions.keys()
