"""The TensorFlow.js converter, without the packages that it imports and does not need.

tensorflowjs 4.22 imports decision forests, TensorFlow Hub and JAX at its start. The first crashes
under TensorFlow 2.21, the second wants a setuptools of 2024. None of them has a part in converting a
SavedModel; in this process, which does nothing else, empty modules stand for them.
"""

from __future__ import annotations

import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import tensorflow as tf

UNSUPPORTED = "Unsupported Ops in the model"
"""How the converter begins its list of what it cannot carry, and so how ours begins."""

_TABLES = {"HashTableV2", "MutableHashTableV2", "MutableDenseHashTableV2", "AnonymousHashTable"}
"""What must be filled before it is asked, by a graph of its own that nothing here could check."""


def main(saved_model: str, signature: str, out: str) -> None:
    """Convert one signature of a SavedModel into the folder `out`."""
    for name in ("tensorflow_decision_forests", "tensorflow_hub"):
        sys.modules[name] = types.ModuleType(name)
    jax = types.ModuleType("tensorflowjs.converters.jax_conversion")
    # A module has no such attribute until it is given one, which mypy cannot know.
    jax.convert_jax = None  # type: ignore[attr-defined]
    sys.modules[jax.__name__] = jax
    from tensorflowjs.converters import tf_saved_model_conversion_v2

    with tempfile.TemporaryDirectory() as scratch:
        write_alone(saved_model, signature, scratch)
        tf_saved_model_conversion_v2.convert_tf_saved_model(scratch, out, signature_def=signature)


def write_alone(saved_model: str, signature: str, folder: str) -> None:
    """Write a SavedModel that has one signature of another, its variables as constants.

    The converter takes the tables of all signatures along, and fails on those that its own does not
    use.
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

    def call(**fed: tf.Tensor) -> dict[str, tf.Tensor]:
        given = {info.name: fed[_argument(info)] for info in inputs.values()}
        found = tf.graph_util.import_graph_def(
            frozen, input_map=given, return_elements=list(outputs.values())
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
    """An input's name in the graph, which is an identifier."""
    return str(Path(info.name.partition(":")[0]).name)


def _require_no_tables(graph: Any) -> None:
    found = {node.op for node in _reachable(graph)} & _TABLES
    if found:
        sys.exit(f"{UNSUPPORTED} before it is converted\n{', '.join(sorted(found))}")


def _reachable(graph: Any) -> list[Any]:
    """The nodes of a graph and of the functions that it calls; the library holds others, too."""
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
