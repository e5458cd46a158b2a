"""Runs the TensorFlow.js converter, without the packages that it imports but does not need.

tensorflowjs 4.22 imports TensorFlow Decision Forests, TensorFlow Hub and JAX. The first crashes with
TensorFlow 2.21; the second needs a setuptools release from 2024. The conversion of a SavedModel uses none of
them, so this process, which does nothing else, replaces them with empty modules.
"""

from __future__ import annotations

import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import tensorflow as tf

UNSUPPORTED = "Unsupported Ops in the model"
"""Start of the converter's message about unsupported operations; this module's own message starts the same way."""

_TABLES = {"HashTableV2", "MutableHashTableV2", "MutableDenseHashTableV2", "AnonymousHashTable"}
"""Operations that create a lookup table. The table needs a separate graph that initializes it, so the converted graph
cannot be run and compared on its own."""


def main(saved_model: str, signature: str, out: str) -> None:
    """Convert one signature of a SavedModel into the folder `out`."""
    for name in ("tensorflow_decision_forests", "tensorflow_hub"):
        sys.modules[name] = types.ModuleType(name)
    jax = types.ModuleType("tensorflowjs.converters.jax_conversion")
    # mypy does not know attributes that are set on a module.
    jax.convert_jax = None  # type: ignore[attr-defined]  # an attribute that the stubs do not know
    sys.modules[jax.__name__] = jax
    from tensorflowjs.converters import tf_saved_model_conversion_v2

    with tempfile.TemporaryDirectory() as scratch:
        write_one_signature(saved_model, signature, scratch)
        tf_saved_model_conversion_v2.convert_tf_saved_model(scratch, out, signature_def=signature)


def write_one_signature(saved_model: str, signature: str, folder: str) -> None:
    """Write a SavedModel with a single signature of another SavedModel, its variables frozen to constants.

    Given the original, the converter would also convert the tables of the other signatures, and it fails on tables
    that the chosen signature does not use.
    """
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], saved_model)
        definition = meta.signature_def[signature]
        outputs = {name: info.name for name, info in sorted(definition.outputs.items())}
        frozen = tf.compat.v1.graph_util.convert_variables_to_constants(
            session, session.graph_def, [tensor.partition(":")[0] for tensor in outputs.values()]
        )
    inputs = dict(sorted(definition.inputs.items()))
    _require_no_tables(frozen)

    def call(**inputs_by_name: tf.Tensor) -> dict[str, tf.Tensor]:
        feed = {info.name: inputs_by_name[_argument(info)] for info in inputs.values()}
        found = tf.graph_util.import_graph_def(
            frozen, input_map=feed, return_elements=list(outputs.values())
        )
        return dict(zip(outputs, found, strict=True))

    specs = {
        _argument(info): tf.TensorSpec(info.tensor_shape, info.dtype, name=_argument(info))
        for info in inputs.values()
    }
    module: Any = tf.Module()
    module.call = tf.function(call)
    tf.saved_model.save(
        module, folder, signatures={signature: module.call.get_concrete_function(**specs)}
    )


def _argument(info: Any) -> str:
    """The name of an input in the graph, which is a valid identifier."""
    return str(Path(info.name.partition(":")[0]).name)


def _require_no_tables(graph: Any) -> None:
    found = {node.op for node in _reachable(graph)} & _TABLES
    if found:
        sys.exit(f"{UNSUPPORTED} before it is converted\n{', '.join(sorted(found))}")


def _reachable(graph: Any) -> list[Any]:
    """The nodes of a graph and of the functions that it calls; other functions in its library are left out."""
    library = {function.signature.name: function for function in graph.library.function}
    found: list[Any] = []
    todo, seen = list(graph.node), set[str]()
    while todo:
        node = todo.pop()
        found.append(node)
        named = [attribute.func.name for attribute in node.attr.values()]
        named += [f.name for attribute in node.attr.values() for f in attribute.list.func]
        for name in {node.op, *named} & library.keys() - seen:
            seen.add(name)
            todo.extend(library[name].node_def)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
