"""Which pipelines can leave their process: those of TensorFlow's own operations, without variables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.ops import script_ops  # type: ignore[attr-defined]

from stoker.core.errors import ConfigError, Plain

PYTHON_OPERATIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
"""What `tf.numpy_function`, `tf.py_function` and `Dataset.from_generator` become in a graph."""

VARIABLE_OPERATIONS = ("ReadVariableOp", "ResourceGather", "VarHandleOp")
"""What a variable's use becomes."""

_GENERATOR = ("DatasetV2._GeneratorState", "_from_generator")
"""How TensorFlow names its own functions around a user's generator."""

_IGNORE_STATE = 1
"""`tf.data.experimental.ExternalStatePolicy.IGNORE`, as the operation takes it. Vocabularies count
as state, though their contents are sent along."""


def require_sendable(dataset: tf.data.Dataset[Any]) -> None:
    """Refuse a pipeline that a worker in another process could not run.

    Raises:
        ConfigError: it calls Python (operation and function are named), or reads a variable.
    """
    found = list(dict.fromkeys(python_functions(dataset)))
    if found:
        raise ConfigError(
            "a pipeline for the tf.data service must hold no Python function: it cannot leave its "
            "process",
            got=Plain("; ".join(found)),
            fix="Write it in TensorFlow's own operations, or leave data.service out and read here.",
        )
    variables = sorted({node.op for node in _nodes(dataset) if node.op in VARIABLE_OPERATIONS})
    if variables:
        raise ConfigError(
            "a pipeline for the tf.data service must read no variable: its value stays in this "
            "process",
            got=Plain(", ".join(variables)),
            fix="Use constants in their place.",
        )


def python_functions(dataset: tf.data.Dataset[Any]) -> Iterator[str]:
    """Each Python function in a pipeline: its operation, and its name where it is still known."""
    for node in _nodes(dataset):
        if node.op in PYTHON_OPERATIONS:
            token = node.attr["token"].s.decode()
            yield f"{node.op} ({_function_name(token)})"


def _nodes(dataset: tf.data.Dataset[Any]) -> list[Any]:
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=_IGNORE_STATE,
    )
    graph = graph_pb2.GraphDef.FromString(serialized.numpy())
    return [*graph.node, *(node for f in graph.library.function for node in f.node_def)]


def _function_name(token: str) -> str:
    # TensorFlow keeps no public way from the token in the graph to the function.
    function = script_ops._py_funcs._funcs.get(token)  # noqa: SLF001
    name = getattr(getattr(function, "_func", function), "__qualname__", None)
    if name is None:
        return "its function is not known"
    return "Dataset.from_generator" if name.startswith(_GENERATOR) else str(name)
