"""Loads SavedModels through their object graph if a session would not restore their variables.

For a `tf.Module` that has a Keras 3 model, `tf.saved_model.save` writes each variable twice: the signatures read one
copy, and the restore operation sets the other. TensorFlow Serving loads such a model, but every answer is an error
(tensorflow/serving#2250). `tf.saved_model.load` restores both.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from stoker.registry.exported_model import LoadedModel
from stoker.serve.loading.graph_reachability import (
    INIT_COLLECTIONS,
    INIT_SIGNATURE,
    functions_of,
    node_of,
    nodes_by_name,
    reached,
    roots_of,
)

_log = logging.getLogger(__name__)

Run = Callable[..., list[np.ndarray[Any, Any]]]


def unrestored_variables(meta_graph: meta_graph_pb2.MetaGraphDef) -> set[str]:
    """Return the variables that signatures read, but that neither the restore operation nor the initializer sets.

    The result is empty for a SavedModel without an object graph, because TensorFlow 1 names restored variables
    differently.
    """
    if not meta_graph.HasField("saver_def") or not meta_graph.HasField("object_graph_def"):
        return set()
    nodes = nodes_by_name(meta_graph.graph_def)

    def variables(roots: list[str]) -> set[str]:
        return {node.name for node in reached(nodes, roots) if node.op == "VarHandleOp"}

    filling = [node_of(meta_graph.saver_def.restore_op_name)]
    if INIT_SIGNATURE in meta_graph.signature_def:
        filling += [
            node_of(info.name) for info in meta_graph.signature_def[INIT_SIGNATURE].outputs.values()
        ]
    for key in INIT_COLLECTIONS:
        if key in meta_graph.collection_def:
            filling += map(node_of, meta_graph.collection_def[key].node_list.value)
    return variables(roots_of(meta_graph)) - variables(filling)


def load_object_graph(
    meta_graph: meta_graph_pb2.MetaGraphDef, definitions: Mapping[str, Any], folder: Path
) -> LoadedModel:
    """Load a model whose variables a session would leave empty.

    Args:
        meta_graph: The model's graph; all its functions were checked.
        definitions: The model's signatures.
        folder: The folder with the model's variables and assets.

    Raises:
        ValueError: a signature has no function in the object graph.
    """
    with _only(meta_graph, folder) as checked:
        loaded = tf.saved_model.load(str(checked), tags=list(meta_graph.meta_info_def.tags))
    callable_ = {
        name: definition
        for name, definition in definitions.items()
        if definition.inputs and definition.outputs
    }
    missing = callable_.keys() - loaded.signatures.keys()
    if missing:
        raise ValueError(f"its object graph has no signature {min(missing)!r}")
    runs = {
        name: _run_of(loaded, loaded.signatures[name], definition)
        for name, definition in callable_.items()
    }
    _log.warning(
        "%s is served through its object graph, which is slower: a session does not restore its variables. "
        "Export it with Keras's ExportArchive or model.export()",
        folder,
    )
    return LoadedModel(None, definitions, folder, runs=runs)


@contextmanager
def _only(meta_graph: meta_graph_pb2.MetaGraphDef, folder: Path) -> Iterator[Path]:
    """Create a private folder with a file of only this graph, and links to the variables and assets.

    TensorFlow loads an object graph only from a file, and the file in `folder` may have changed since the check.
    """
    saved = saved_model_pb2.SavedModel(saved_model_schema_version=1, meta_graphs=[meta_graph])
    with tempfile.TemporaryDirectory(prefix="stoker-checked-") as name:
        checked = Path(name)
        (checked / "saved_model.pb").write_bytes(saved.SerializeToString())
        for part in (tf.saved_model.VARIABLES_DIRECTORY, tf.saved_model.ASSETS_DIRECTORY):
            (checked / part).symlink_to((folder / part).absolute())
        yield checked


def _run_of(loaded: Any, function: Any, definition: meta_graph_pb2.SignatureDef) -> Run:
    inputs = sorted(definition.inputs.items())
    outputs = sorted(definition.outputs)

    def run(*arrays: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        _ = loaded  # keeps the variables: a function has only weak references to them
        fed = {
            name: tf.constant(array, tf.dtypes.as_dtype(info.dtype))
            for (name, info), array in zip(inputs, arrays, strict=True)
        }
        try:
            found = function(**fed)
        except (TypeError, ValueError) as error:
            raise tf.errors.InvalidArgumentError(None, None, str(error)) from error
        return [_array(found[name]) for name in outputs]

    return run


def _array(tensor: tf.Tensor) -> np.ndarray[Any, Any]:
    value = tensor.numpy()
    if tensor.dtype != tf.string:
        return np.asarray(value)
    array = np.empty(tensor.shape, dtype=object)
    array[...] = value
    return array


def checked_functions(meta_graph: meta_graph_pb2.MetaGraphDef) -> Sequence[str]:
    """Return the functions that loading the object graph may run: all except those that only save and restore.

    The model's author chooses the functions that `saver_def` names. They are left out only if no object names them.
    """
    nodes = nodes_by_name(meta_graph.graph_def)
    saver = meta_graph.saver_def
    own = {
        function
        for name in (saver.save_tensor_name, saver.restore_op_name)
        if node_of(name) in nodes
        for function in functions_of(nodes[node_of(name)])
    } - _functions_of_objects(meta_graph)
    library = meta_graph.graph_def.library.function
    return [found.signature.name for found in library if found.signature.name not in own]


def _functions_of_objects(meta_graph: meta_graph_pb2.MetaGraphDef) -> set[str]:
    """Return the functions that the object graph names, in its list or in a node."""
    objects = meta_graph.object_graph_def
    found = set(objects.concrete_functions)
    for node in objects.nodes:
        found.update(node.function.concrete_functions)
        found.add(node.bare_concrete_function.concrete_function_name)
        found.add(node.captured_tensor.concrete_function)
    return found
