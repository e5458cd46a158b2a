"""Whether a model could run for ever: only what loops, or calls itself, can."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tensorflow.core.framework import function_pb2, node_def_pb2

from stoker.serve.safety import functions_of
from stoker.serve.saved_model import read_saved_model

LOOPS = frozenset(
    ("While", "StatelessWhile", "_While", "Enter", "RefEnter", "NextIteration", "RefNextIteration")
)
"""Operations that come again until a condition says no."""


def may_not_end(folder: Path) -> bool:
    """Whether any graph or function of a SavedModel has a loop, or functions that call each other in a ring.

    Raises:
        DataError: the file is damaged.
    """
    for meta_graph in read_saved_model(folder).meta_graphs:
        graph = meta_graph.graph_def
        functions = {found.signature.name: found for found in graph.library.function}
        if _loops(graph.node) or any(_loops(found.node_def) for found in functions.values()):
            return True
        if _has_ring(functions):
            return True
    return False


def _loops(nodes: Iterable[node_def_pb2.NodeDef]) -> bool:
    return any(node.op in LOOPS for node in nodes)


def _has_ring(functions: Mapping[str, function_pb2.FunctionDef]) -> bool:
    """Functions are taken away that call none that is left; a ring is what stays."""
    calls = {name: _called(found, functions) for name, found in functions.items()}
    while leaves := [name for name, called in calls.items() if not called & calls.keys()]:
        for name in leaves:
            del calls[name]
    return bool(calls)


def _called(
    function: function_pb2.FunctionDef, functions: Mapping[str, function_pb2.FunctionDef]
) -> set[str]:
    named = {node.op for node in function.node_def}
    named |= {name for node in function.node_def for name in functions_of(node)}
    return named & functions.keys()
