"""Whether a model could run for ever: only what loops, or calls itself, can."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tensorflow.core.framework import function_pb2, node_def_pb2
from tensorflow.core.protobuf import saved_model_pb2

from stoker.serve.loading.graph_reachability import called_by
from stoker.serve.runtime.gil_yield import Breathe, hurry

LOOPS = frozenset(
    ("While", "StatelessWhile", "_While", "Enter", "RefEnter", "NextIteration", "RefNextIteration")
)
"""Operations that come again until a condition says no."""


def may_not_end(saved: saved_model_pb2.SavedModel, *, breathe: Breathe = hurry) -> bool:
    """Whether any graph or function has a loop, or functions that call each other in a ring."""
    for meta_graph in saved.meta_graphs:
        graph = meta_graph.graph_def
        functions = {found.signature.name: found for found in graph.library.function}
        bodies = (graph.node, *(found.node_def for found in functions.values()))
        if any(_loops(body, breathe) for body in bodies) or _has_ring(functions, breathe):
            return True
    return False


def _loops(nodes: Iterable[node_def_pb2.NodeDef], breathe: Breathe) -> bool:
    for node in nodes:
        breathe()
        if node.op in LOOPS:
            return True
    return False


def _has_ring(functions: Mapping[str, function_pb2.FunctionDef], breathe: Breathe) -> bool:
    """Functions are taken away that call none that is left; a ring is what stays."""
    calls = {name: _called(found, functions, breathe) for name, found in functions.items()}
    while leaves := [name for name, called in calls.items() if not called & calls.keys()]:
        for name in leaves:
            del calls[name]
    return bool(calls)


def _called(
    function: function_pb2.FunctionDef,
    functions: Mapping[str, function_pb2.FunctionDef],
    breathe: Breathe,
) -> set[str]:
    named: set[str] = set()
    for node in function.node_def:
        breathe()
        named.update(called_by(node))
    return named & functions.keys()
