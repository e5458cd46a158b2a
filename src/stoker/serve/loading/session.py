"""Loads a checked SavedModel into a session, in pieces that release the GIL in between.

TensorFlow's own loader (`tf.compat.v1.saved_model.load`) parses the file once more, and imports the graph in one call
that holds the GIL all the time. Most of this time, it infers the shapes within every function, which serving does not
need. This module imports only reachable nodes, function by function and a few nodes at a time, without shape inference.
Restoring, initializing and optimizing do not hold the GIL.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from stoker.core.errors import Plain, UserError
from stoker.registry.exported_model import (
    SERVE_TAG,
    LoadedModel,
    first_line,
    not_loadable,
    session_config,
)
from stoker.serve.loading.graph_reachability import (
    INIT_COLLECTIONS,
    INIT_SIGNATURE,
    in_order,
    node_of,
    nodes_by_name,
    reached,
    reached_functions,
    roots_of,
)
from stoker.serve.loading.object_graph import load_object_graph, unrestored_variables
from stoker.serve.loading.saved_model import assets_of
from stoker.serve.runtime.gil_yield import YieldGil, no_yield

_log = logging.getLogger(__name__)

_NODES = 20
"""Minimum number of nodes per piece. A node takes about 50 us, partly in C++ code that holds the GIL."""

_Fill = Callable[
    [tf.compat.v1.Session, meta_graph_pb2.MetaGraphDef, Path, YieldGil],
    None,
]

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_COLOCATED = b"loc:@"

_FAILURES = (OSError, RuntimeError, ValueError, TypeError, KeyError, DecodeError, tf.errors.OpError)
"""Exceptions that TensorFlow raises for an invalid graph or checkpoint."""


def load_checked(
    folder: Path,
    saved: saved_model_pb2.SavedModel,
    *,
    yield_gil: YieldGil = no_yield,
    session: tf.compat.v1.ConfigProto | None = None,
    tags: Sequence[str] = (SERVE_TAG,),
) -> LoadedModel:
    """Load the SavedModel that `check_model` returned.

    Args:
        folder: The folder with the model's variables and assets.
        saved: The checked SavedModel.
        yield_gil: Called between two pieces.
        session: Configuration of the session; None: the default.
        tags: The tags of the graph to load.

    Raises:
        UserError: the SavedModel is damaged, has no callable signature, or does not fit in memory.
    """
    meta_graph = _to_be_served(saved, tags)
    if meta_graph is None:
        raise not_loadable(folder, _tags(saved), tags=",".join(tags))
    unrestored = unrestored_variables(meta_graph)
    if unrestored:
        try:
            return load_object_graph(meta_graph, _definitions(meta_graph), folder)
        except tf.errors.ResourceExhaustedError as error:
            raise too_large(folder, error) from error
        except _FAILURES as error:
            variable = min(unrestored)
            raise not_loadable(
                folder, f"its variable {variable!r} is not restored: {first_line(error)}"
            ) from error
    how = _How(yield_gil=yield_gil, session=session or session_config())
    try:
        try:
            if _names_its_restore(meta_graph):
                return _loaded(meta_graph, folder, _fill_in_pieces, how)
        except tf.errors.ResourceExhaustedError:
            raise  # a second attempt would need as much memory
        except _FAILURES as error:
            _log.info(
                "%s cannot be loaded in pieces, so it is loaded in one call: %s",
                folder,
                first_line(error),
            )
        return _loaded(meta_graph, folder, _fill, how)
    except tf.errors.ResourceExhaustedError as error:
        raise too_large(folder, error) from error
    except _FAILURES as error:
        raise not_loadable(folder, first_line(error)) from error


def too_large(folder: Path, error: tf.errors.ResourceExhaustedError) -> UserError:
    """Return the error for a model that does not fit in memory."""
    return UserError(
        f"{folder} must fit in the memory of its device",
        got=Plain(first_line(error)),
        fix="Serve fewer models or use fewer --workers, raise --per_process_gpu_memory_fraction or "
        "--max-memory-mb if they are set, or add --unload-first to unload the old version before loading the new one.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _How:
    """Options of loading."""

    yield_gil: YieldGil
    session: tf.compat.v1.ConfigProto


def _loaded(
    meta_graph: meta_graph_pb2.MetaGraphDef,
    folder: Path,
    fill: _Fill,
    how: _How,
) -> LoadedModel:
    """Return a model, ready to be called, whose graph `fill` has imported and restored."""
    graph = tf.Graph()
    session = tf.compat.v1.Session(graph=graph, config=how.session)
    try:
        with graph.as_default():
            fill(session, meta_graph, folder, how.yield_gil)
            how.yield_gil()
            _initialize(session, meta_graph, folder)
            _require_variables(session, meta_graph)
        how.yield_gil()
        return _bound(LoadedModel(session, _definitions(meta_graph), folder))
    except _FAILURES:
        session.close()
        raise


def _fill_in_pieces(
    session: tf.compat.v1.Session,
    meta_graph: meta_graph_pb2.MetaGraphDef,
    folder: Path,
    yield_gil: YieldGil,
) -> None:
    for piece in _pieces(meta_graph, yield_gil):
        _import(session.graph, piece, meta_graph)
        yield_gil()
    _restore(session, meta_graph, folder)


def _fill(
    session: tf.compat.v1.Session,
    meta_graph: meta_graph_pb2.MetaGraphDef,
    folder: Path,
    yield_gil: YieldGil,
) -> None:
    """Load with TensorFlow's own loader, which knows older formats, and whose errors give the reason of a failure."""
    whole = meta_graph_pb2.MetaGraphDef()
    whole.CopyFrom(meta_graph)
    for function in whole.graph_def.library.function:
        # With this attribute, TensorFlow could run another function of the library, which was not checked.
        function.attr.pop("api_implements", None)
    saver = tf.compat.v1.train.import_meta_graph(whole)
    yield_gil()
    if saver is not None:
        saver.restore(session, str(folder / "variables" / "variables"))


def _to_be_served(
    saved: saved_model_pb2.SavedModel, tags: Sequence[str]
) -> meta_graph_pb2.MetaGraphDef | None:
    tagged = (found for found in saved.meta_graphs if set(found.meta_info_def.tags) == set(tags))
    return next(tagged, None)


def _tags(saved: saved_model_pb2.SavedModel) -> str:
    found = ", ".join(str(sorted(each.meta_info_def.tags)) for each in saved.meta_graphs)
    return f"graphs with the tags {found}" if found else "no graph"


def _names_its_restore(meta_graph: meta_graph_pb2.MetaGraphDef) -> bool:
    keys = (tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS)
    return meta_graph.HasField("saver_def") or not any(k in meta_graph.collection_def for k in keys)


def _definitions(
    meta_graph: meta_graph_pb2.MetaGraphDef,
) -> dict[str, meta_graph_pb2.SignatureDef]:
    """Return copies of the signatures.

    A part of a message would keep the whole message, with frozen weights, in memory.
    """
    found = {name: meta_graph_pb2.SignatureDef() for name in meta_graph.signature_def}
    for name, copy in found.items():
        copy.CopyFrom(meta_graph.signature_def[name])
    return found


def _bound(model: LoadedModel) -> LoadedModel:
    if not model.signatures:
        raise ValueError("it has no signature with inputs and outputs")
    return model


def _pieces(
    meta_graph: meta_graph_pb2.MetaGraphDef, yield_gil: YieldGil
) -> Iterator[graph_pb2.GraphDef]:
    """Split the graph into pieces, each of which needs only earlier pieces."""
    whole = meta_graph.graph_def
    roots = [*roots_of(meta_graph), node_of(meta_graph.saver_def.filename_tensor_name)]
    kept = {node.name: node for node in reached(nodes_by_name(whole), roots)}
    functions = reached_functions(whole.library, kept.values(), yield_gil=yield_gil)
    if whole.library.gradient:
        piece = _empty(whole)
        piece.library.function.extend(functions)
        names = {found.signature.name for found in functions}
        piece.library.gradient.extend(g for g in whole.library.gradient if g.function_name in names)
        yield piece
    else:
        for function in functions:
            piece = _empty(whole)
            piece.library.function.append(function)
            yield piece
    names = {found.signature.name for found in functions} | set(_CALLS)
    for run in _runs(in_order(kept, yield_gil=yield_gil), kept):
        piece = _empty(whole)
        for name in run:
            node = piece.node.add()
            node.CopyFrom(kept[name])
            if node.op in names:  # otherwise TensorFlow infers the shapes within the function now
                node.attr["_disable_call_shape_inference"].b = True
        yield piece


def _empty(whole: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    return graph_pb2.GraphDef(versions=whole.versions)


def _runs(
    names: Sequence[str], nodes: Mapping[str, node_def_pb2.NodeDef]
) -> Iterator[Sequence[str]]:
    """Split names, in order, into pieces. Names that must be imported together are in the same piece."""
    place = {name: number for number, name in enumerate(names)}
    ends = list(range(len(names)))  # index -> the last index that must be in the same piece
    for name in names:
        for tied in _tied_to(nodes[name]):
            if tied in place:
                first, last = sorted((place[name], place[tied]))
                ends[first] = max(ends[first], last)
    for name in names:
        for needed in map(node_of, nodes[name].input):
            if place.get(needed, -1) > place[name]:  # a cycle
                ends[place[name]] = max(ends[place[name]], place[needed])
    start, reach = 0, -1
    for number in range(len(names)):
        reach = max(reach, ends[number])
        if reach <= number and number + 1 - start >= _NODES:
            yield names[start : number + 1]
            start = number + 1
    if start < len(names):
        yield names[start:]


def _tied_to(node: node_def_pb2.NodeDef) -> Iterator[str]:
    """Yield the names of nodes that must be in the same piece as this node, because pieces can share only tensors."""
    for name in node.input:
        if name.startswith("^"):
            yield node_of(name)
    if "_class" in node.attr:
        for place in node.attr["_class"].list.s:
            yield place.removeprefix(_COLOCATED).decode(errors="replace")


def _import(
    graph: tf.Graph, piece: graph_pb2.GraphDef, meta_graph: meta_graph_pb2.MetaGraphDef
) -> None:
    own = {node.name for node in piece.node}
    before = {
        name: graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
        for name in itertools.chain.from_iterable(node.input for node in piece.node)
        if node_of(name) not in own
    }
    info = meta_graph.meta_info_def
    tf.graph_util.import_graph_def(
        piece,
        input_map=before,
        name="",
        producer_op_list=info.stripped_op_list if info.HasField("stripped_op_list") else None,
    )


def _restore(
    session: tf.compat.v1.Session, meta_graph: meta_graph_pb2.MetaGraphDef, folder: Path
) -> None:
    """Restore the variables, like `tf.compat.v1.train.Saver.restore`."""
    saver = meta_graph.saver_def
    if not meta_graph.HasField("saver_def"):
        return
    path = str(folder / "variables" / "variables")
    if not tf.compat.v1.train.checkpoint_exists(path):
        raise ValueError(f"The passed save_path is not a valid checkpoint: {path}")
    session.run(saver.restore_op_name, {saver.filename_tensor_name: path})


def _initialize(
    session: tf.compat.v1.Session, meta_graph: meta_graph_pb2.MetaGraphDef, folder: Path
) -> None:
    """Run the model's initializer, which fills the tables."""
    name = _initializer(meta_graph)
    if name is None:
        return
    present = {operation.name for operation in session.graph.get_operations()}
    assets = {
        found.tensor_info.name: str(folder / "assets" / found.filename)
        for found in assets_of(folder, meta_graph)
        if node_of(found.tensor_info.name) in present  # unused assets were not imported
    }
    session.run(session.graph.get_operation_by_name(name), assets)


def _require_variables(
    session: tf.compat.v1.Session, meta_graph: meta_graph_pb2.MetaGraphDef
) -> None:
    """Raise if the model reads a variable without a value, because every request would fail.

    In a model with an object graph, `unrestored_variables` has found such variables already, without running anything.
    """
    if meta_graph.HasField("object_graph_def"):
        return
    nodes = reached(nodes_by_name(meta_graph.graph_def), roots_of(meta_graph))
    handles = {node.name: f"{node.name}:0" for node in nodes if node.op == "VarHandleOp"}
    has_value = session.run(
        {
            name: tf.raw_ops.VarIsInitializedOp(resource=session.graph.get_tensor_by_name(handle))
            for name, handle in handles.items()
        }
    )
    missing = sorted(name for name, value in has_value.items() if not value)
    if missing:
        raise ValueError(f"its variable {missing[0]!r} is not restored")


def _initializer(meta_graph: meta_graph_pb2.MetaGraphDef) -> str | None:
    if INIT_SIGNATURE in meta_graph.signature_def:
        (info,) = meta_graph.signature_def[INIT_SIGNATURE].outputs.values()
        return node_of(info.name)
    for key in INIT_COLLECTIONS:
        if key in meta_graph.collection_def:
            (name,) = meta_graph.collection_def[key].node_list.value
            return node_of(name)
    return None
