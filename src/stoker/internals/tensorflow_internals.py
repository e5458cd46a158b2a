"""The only module that uses private names of TensorFlow, with a list of them.

If an upgrade of TensorFlow removes some of these names, a test fails and lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.impl.api import StagingError
from tensorflow.python.eager import context  # type: ignore[attr-defined]  # not in the stubs
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import auto_control_deps_utils, config, kernels, ops
from tensorflow.python.ops import (  # type: ignore[attr-defined]  # TensorFlow has no types here
    gen_stateless_random_ops_v2,
    random_ops_util,
    script_ops,
)

__all__ = [
    "StagingError",
    "call_flat",
    "called_function",
    "collected_nodes",
    "config_of_session",
    "gen_stateless_random_ops_v2",
    "has_autotuned_buffer",
    "is_op_determinism_enabled",
    "is_prefetch",
    "ops",
    "python_function",
    "random_ops_util",
    "registered_devices",
    "session_callable",
    "source_of",
    "without_options",
    "written_resources",
]

USED_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ConcreteFunction": ("_call_flat", "captured_inputs"),
        "FuncGraph": ("_get_function",),
        "Session": ("_config", "_make_callable_from_options"),
        "_PrefetchDataset": ("_buffer_size", "_input_dataset"),
        "_OptionsDataset": ("_input_dataset",),
        "Context": ("enable_graph_collection", "disable_graph_collection", "export_run_metadata"),
        "FuncRegistry": ("_funcs",),
        "ops": ("uid",),
        "auto_control_deps_utils": ("get_read_only_resource_input_indices_graph",),
        "concrete_function": ("_inference_name",),
        "config": ("is_op_determinism_enabled",),
        "kernels": ("get_registered_kernels_for_op",),
        "script_ops": ("_py_funcs",),
        "random_ops_util": ("get_key_counter_alg", "convert_alg_to_int", "Algorithm"),
        "gen_stateless_random_ops_v2": (
            "stateless_random_uniform_v2",
            "stateless_random_uniform_full_int_v2",
        ),
    }
)
"""Name of a TensorFlow class or module -> its attributes that Stoker reads, replaces or calls."""

MODULES = (
    *(ops, concrete_function, config, kernels, script_ops, random_ops_util),
    auto_control_deps_utils,
    gen_stateless_random_ops_v2,
)
"""The modules among `USED_NAMES`."""


def call_flat(function: Any, tensors: Sequence[Any], captures: Sequence[Any]) -> Any:
    """Call a concrete function with flat tensors and the given captured inputs.

    The public way cannot replace captured inputs, and it takes a quarter of a millisecond to find the function by the
    structure of its arguments.
    """
    return function._call_flat(tensors, captures)


def called_function(graph: Any, name: str) -> Any:
    """Return the function of this name that an operation of the graph calls; None if the graph does not contain it."""
    return graph._get_function(name)


def written_resources(graph: Any) -> list[Any]:
    """Return the captured resources that a function, or a function that it calls, may write.

    Args:
        graph: The graph of a concrete function that was not traced inside another function.

    Returns:
        The handles of variables, tables and other resources.
    """
    indices = auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph)  # type: ignore[no-untyped-call]  # TensorFlow has no types here
    read_only = {id(graph.inputs[index]) for index in indices}
    return [
        outer
        for outer, inner in graph.captures
        if inner.dtype == tf.resource and id(inner) not in read_only
    ]


@contextmanager
def collected_nodes() -> Iterator[list[Any]]:
    """Collect the placed nodes of functions whose first call is in the `with` block.

    Yields:
        A list that is filled at the end of the block; nodes have `op`, `name`, `device` and `attr`.
    """
    # The only way in TensorFlow 2 to see on which devices a function's nodes were placed.
    eager = context.context()
    nodes: list[Any] = []
    eager.enable_graph_collection()
    try:
        yield nodes
        for function in eager.export_run_metadata().function_graphs:
            for part in function.partition_graphs:
                nodes.extend(part.node)
    finally:
        eager.disable_graph_collection()


def is_op_determinism_enabled() -> bool:
    """Return whether TensorFlow must use deterministic operations only."""
    return bool(config.is_op_determinism_enabled())  # type: ignore[no-untyped-call]  # TensorFlow has no types here


def registered_devices(operation: str) -> frozenset[str]:
    """Return the device types that have a kernel for an operation."""
    registered = kernels.get_registered_kernels_for_op(operation)  # type: ignore[no-untyped-call]  # TensorFlow has no types here
    return frozenset(kernel.device_type for kernel in registered.kernel)


def python_function(token: str) -> Any:
    """Return the Python function that a `PyFunc` operation calls; None if this process does not have it."""
    return script_ops._py_funcs._funcs.get(token)


def config_of_session(session: tf.compat.v1.Session) -> Any:
    """Return the configuration that a session was created with."""
    return session._config


def session_callable(session: tf.compat.v1.Session, options: Any) -> Callable[..., Any]:
    """Return a function that runs the session with the feeds and fetches of `CallableOptions`."""
    made: Callable[..., Any] = session._make_callable_from_options(options)
    return made


def is_prefetch(dataset: Any) -> bool:
    """Return whether the last stage of a dataset is a prefetch."""
    return type(dataset).__name__ == "_PrefetchDataset"


def has_autotuned_buffer(dataset: Any) -> bool:
    """Return whether TensorFlow chooses the buffer size of a prefetch."""
    return bool(dataset._buffer_size == tf.data.AUTOTUNE)


def source_of(dataset: Any) -> Any:
    """Return the dataset that a prefetch or options stage reads."""
    return dataset._input_dataset


def without_options(dataset: Any) -> Any:
    """Return a dataset without the options at its end."""
    while type(dataset).__name__ == "_OptionsDataset":
        dataset = source_of(dataset)
    return dataset
