"""Finds all parts of a SavedModel that can run.

These are the nodes and functions that its signatures, initializers and restore operation reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2
from tensorflow.core.protobuf import meta_graph_pb2

from stoker.serve.runtime.gil_yield import YieldGil, no_yield

INIT_SIGNATURE = "__saved_model_init_op"
"""Name of the signature whose output is the initializer."""

INIT_COLLECTIONS = ("saved_model_main_op", "legacy_init_op")
"""The collections that may name the initializer if no signature does; the first existing one is used."""


def roots_of(meta_graph: meta_graph_pb2.MetaGraphDef) -> list[str]:
    """Return the names of the nodes that a server feeds, fetches or runs."""
    names: list[str] = []
    for signature in meta_graph.signature_def.values():
        for info in [*signature.outputs.values(), *signature.inputs.values()]:
            names += [info.name] if info.name else _parts_of(info)
    for key in (*INIT_COLLECTIONS, INIT_SIGNATURE):
        names += (
            list(meta_graph.collection_def[key].node_list.value)
            if (key in meta_graph.collection_def)
            else []
        )
    names.append(meta_graph.saver_def.restore_op_name)
    return [node_of(name) for name in names if name]


def reached(
    nodes: Mapping[str, node_def_pb2.NodeDef], roots: list[str]
) -> Iterator[node_def_pb2.NodeDef]:
    """Yield the roots and all nodes that they need, each once."""
    seen, pending = set(roots), list(roots)
    while pending:
        node = nodes.get(pending.pop())
        if node is None:
            continue
        yield node
        for name in map(node_of, node.input):
            if name not in seen:
                seen.add(name)
                pending.append(name)


def reached_functions(
    library: function_pb2.FunctionDefLibrary,
    nodes: Iterable[node_def_pb2.NodeDef],
    *,
    yield_gil: YieldGil = no_yield,
) -> list[function_pb2.FunctionDef]:
    """Return the functions that nodes call directly or indirectly, in the library's order."""
    functions = {found.signature.name: found for found in library.function}
    gradients = {found.function_name: found.gradient_func for found in library.gradient}
    seen: set[str] = set()
    pending = [name for node in nodes for name in called_by(node)]
    while pending:
        name = pending.pop()
        if name in seen or name not in functions:
            continue
        seen.add(name)
        for node in functions[name].node_def:
            yield_gil()
            pending += called_by(node)
        pending += [gradients[name]] if name in gradients else []
    return [found for found in library.function if found.signature.name in seen]


def in_order(
    nodes: Mapping[str, node_def_pb2.NodeDef], *, yield_gil: YieldGil = no_yield
) -> list[str]:
    """Return the names of nodes in topological order; nodes of cycles, and nodes that need these, are last."""
    needs = {name: {node_of(i) for i in node.input} & nodes.keys() for name, node in nodes.items()}
    users: dict[str, list[str]] = {name: [] for name in nodes}
    for name, needed in needs.items():
        for each in needed:
            users[each].append(name)
    left = {name: len(needed) for name, needed in needs.items()}
    ready = [name for name, count in left.items() if not count]
    ordered: list[str] = []
    while ready:
        yield_gil()
        name = ready.pop()
        ordered.append(name)
        for user in users[name]:
            left[user] -= 1
            if not left[user]:
                ready.append(user)
    placed = set(ordered)
    return ordered + [name for name in nodes if name not in placed]


def called_by(node: node_def_pb2.NodeDef) -> Iterator[str]:
    """Yield the names that a node may call as functions: its operation, and the functions in its attributes."""
    yield node.op
    yield from functions_of(node)


def functions_of(node: node_def_pb2.NodeDef) -> Iterator[str]:
    """Yield the names of the functions in a node's attributes."""
    for value in node.attr.values():
        kind = value.WhichOneof("value")
        if kind == "func":
            yield value.func.name
        elif kind == "list":
            for function in value.list.func:
                yield function.name


def node_of(tensor: str) -> str:
    """Return the name of a tensor's node: `a` for `^a`, `a`, `a:0` and `a:output:0`."""
    return tensor.removeprefix("^").split(":")[0]


def nodes_by_name(graph: graph_pb2.GraphDef) -> dict[str, node_def_pb2.NodeDef]:
    """Return node name -> node, of a graph."""
    return {node.name: node for node in graph.node}


def _parts_of(info: Any) -> list[str]:
    """Return the names of the tensors that a sparse or composite tensor consists of."""
    if info.WhichOneof("encoding") == "coo_sparse":
        sparse = info.coo_sparse
        return [
            sparse.values_tensor_name,
            sparse.indices_tensor_name,
            sparse.dense_shape_tensor_name,
        ]
    return [part.name for part in info.composite_tensor.components]
