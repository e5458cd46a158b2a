"""Loads only graphs that compute: no operation may read a file, run Python or print.

A SavedModel is a program. TensorFlow does not treat operations such as `ReadFile` or `ImmutableConst` specially, and
runs all operations that the signatures and initializers reach. So each of these operations must be on a list
(`allowed_ops.txt`). Models need two kinds of operations that read files. Each may read only certain files: a table's
text file must be one of the model's assets, and variables must be restored from the model's own checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path

from tensorflow.core.framework import node_def_pb2
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from stoker.core.errors import DataError, Plain
from stoker.serve.loading.graph_reachability import (
    called_by,
    node_of,
    nodes_by_name,
    reached,
    roots_of,
)
from stoker.serve.loading.object_graph import checked_functions, unrestored_variables
from stoker.serve.loading.saved_model import assets_of, check_assets, check_files, read_saved_model
from stoker.serve.runtime.gil_yield import YieldGil, no_yield

_FROM_ASSET = {
    "InitializeTableFromTextFile": 1,
    "InitializeTableFromTextFileV2": 1,
}
"""Operation -> index of the input that must be an asset's name."""

_FROM_CHECKPOINT = {"Restore": 0, "RestoreV2": 0, "RestoreSlice": 0}
"""Operation -> index of the input that must be the name of the model's own checkpoint."""

_SAME_VALUE = ("Identity", "StopGradient")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")

_ASSET, _CHECKPOINT, _OTHER = "asset", "checkpoint", "other"

Origins = tuple[str, ...]
"""The origin of each argument of a function: asset, checkpoint or other."""


@cache
def allowed_operations() -> frozenset[str]:
    """Return the operations that every model may have."""
    text = resources.files("stoker.serve.loading").joinpath("allowed_ops.txt").read_text()
    return frozenset(text.split())


def check_model(
    folder: Path, *, allow: frozenset[str] = frozenset(), yield_gil: YieldGil = no_yield
) -> saved_model_pb2.SavedModel:
    """Refuse a SavedModel that could do more than compute, before any part of it runs.

    Args:
        folder: The version's folder.
        allow: Names of operations that the model may have in addition to those on the list.
        yield_gil: Called often.

    Returns:
        The checked content. Load this and not the file, which may have changed.

    Raises:
        DataError: a signature or an initializer reaches an operation that is not allowed, or a file outside of the
            folder; the message names it.
    """
    check_files(folder)
    saved = read_saved_model(folder)
    for meta_graph in saved.meta_graphs:
        yield_gil()
        check_assets(folder, meta_graph)
        _Walk(folder, meta_graph, allow, yield_gil).check()
    return saved


@dataclass(frozen=True)
class _Scope:
    """The nodes of a graph or of a function, and the origins of the function's arguments."""

    nodes: Mapping[str, node_def_pb2.NodeDef]
    arguments: Mapping[str, str]
    outer: bool


@dataclass
class _Walk:
    """Checks all nodes that the roots of a graph reach."""

    folder: Path
    meta_graph: meta_graph_pb2.MetaGraphDef
    allow: frozenset[str]
    yield_gil: YieldGil
    seen: set[tuple[str, Origins]] = field(default_factory=set)
    pending: list[tuple[str, Origins]] = field(default_factory=list)

    def __post_init__(self) -> None:
        graph = self.meta_graph.graph_def
        self.functions = {found.signature.name: found for found in graph.library.function}
        # `SymbolicGradient` names a function, but runs the function that the library lists as its gradient.
        self.gradients = {g.function_name: g.gradient_func for g in graph.library.gradient}
        self.allowed = allowed_operations() | self.allow
        self.known = {
            node_of(a.tensor_info.name): _ASSET for a in assets_of(self.folder, self.meta_graph)
        }
        self.known[node_of(self.meta_graph.saver_def.filename_tensor_name)] = _CHECKPOINT
        for signature in self.meta_graph.signature_def.values():  # clients may feed these
            self.known |= {node_of(info.name): _OTHER for info in signature.inputs.values()}

    def check(self) -> None:
        if unrestored_variables(self.meta_graph):
            # loading runs functions that no signature reaches
            for name in checked_functions(self.meta_graph):
                self._enter(name, ())
        outer = _Scope(nodes_by_name(self.meta_graph.graph_def), {}, outer=True)
        for node in reached(outer.nodes, roots_of(self.meta_graph)):
            self._check_node(node, outer, place="its graph")
        while self.pending:
            name, origins = self.pending.pop()
            function = self.functions[name]
            arguments = [argument.name for argument in function.signature.input_arg]
            known = {
                argument: origins[number] if number < len(origins) else _OTHER
                for number, argument in enumerate(arguments)
            }
            inner = _Scope({node.name: node for node in function.node_def}, known, outer=False)
            for node in function.node_def:
                self._check_node(node, inner, place=f"its function {name[:80]!r}")

    def _check_node(self, node: node_def_pb2.NodeDef, scope: _Scope, *, place: str) -> None:
        self.yield_gil()
        self._follow(node, scope)
        if node.op in self.functions or node.op in self.allowed:
            return
        for special, wanted in ((_FROM_ASSET, _ASSET), (_FROM_CHECKPOINT, _CHECKPOINT)):
            if node.op in special:
                origin = self._origin(_input(node, special[node.op]), scope)
                if origin == wanted:
                    return
                raise _refused(
                    self.folder,
                    f"{node.op} in {place}, as {node.name[:80]!r}, on a file that is not its own",
                )
        raise _refused(
            self.folder,
            f"{node.op[:80]} in {place}, as {node.name[:80]!r}",
            f"If you trust the model, add --allow-ops {node.op[:80]}.",
        )

    def _follow(self, node: node_def_pb2.NodeDef, scope: _Scope) -> None:
        """Queue the functions that a node calls, so that they are checked, too."""
        origins: Origins = ()
        if node.op in _CALLS or node.op in self.functions:
            data = [name for name in node.input if not name.startswith("^")]
            origins = tuple(self._origin(name, scope) for name in data)
        for name in called_by(node):
            self._enter(name, origins)
            self._enter(self.gradients.get(name, ""), ())

    def _enter(self, name: str, origins: Origins) -> None:
        if name in self.functions and (name, origins) not in self.seen:
            self.seen.add((name, origins))
            self.pending.append((name, origins))

    def _origin(self, name: str, scope: _Scope) -> str:
        """Return the origin of a tensor, followed back through operations that do not change values."""
        for _ in range(len(scope.nodes) + 1):
            node_name = node_of(name)
            if node_name in scope.arguments:
                return scope.arguments[node_name]
            if scope.outer and node_name in self.known:
                return self.known[node_name]
            node = scope.nodes.get(node_name)
            if scope.outer and node is not None and node.op == "ReadVariableOp":
                return self._kept(node_of(node.input[0]), scope)
            if node is None or node.op not in _SAME_VALUE or not node.input:
                return _OTHER
            name = node.input[0]
        return _OTHER

    def _kept(self, handle: str, scope: _Scope) -> str:
        """Return the origin of a variable's value. Some models keep an asset's name in a variable between two runs.

        The origin is the asset only if the handle is used only by reads and by assignments of an asset, and no other
        node is a handle of the same variable.
        """
        variable = scope.nodes.get(handle)
        if variable is None or variable.op != "VarHandleOp" or self._has_twin(variable):
            return _OTHER
        found = _OTHER
        for node in scope.nodes.values():
            if handle not in map(node_of, node.input) or node.op in _READS:
                continue
            first = node.op == "AssignVariableOp" and node_of(_input(node, 0)) == handle
            if not first or self._origin(_input(node, 1), scope) != _ASSET:
                return _OTHER
            found = _ASSET
        return found

    def _has_twin(self, variable: node_def_pb2.NodeDef) -> bool:
        graph = self.meta_graph.graph_def
        inner = (node for function in graph.library.function for node in function.node_def)
        others = [n for n in (*graph.node, *inner) if n.op == "VarHandleOp" and n != variable]
        return any(_shared_name(node) == _shared_name(variable) for node in others)


_READS = ("ReadVariableOp", "VarIsInitializedOp")


def _shared_name(node: node_def_pb2.NodeDef) -> str:
    return node.attr["shared_name"].s.decode(errors="replace") or node.name


def _input(node: node_def_pb2.NodeDef, number: int) -> str:
    return node.input[number] if number < len(node.input) else ""


def _refused(folder: Path, got: str, fix: str = "") -> DataError:
    return DataError(f"{folder}: a served model must only compute", got=Plain(got), fix=fix)
