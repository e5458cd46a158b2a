"""Chooses the sizes that batches are padded to, for models on which each new size costs more than the padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tensorflow.core.framework import node_def_pb2
from tensorflow.core.protobuf import saved_model_pb2

from stoker.serve.batching.config import BatchingConfig, WarmSizes

_COMPILED = ("_XlaMustCompile", "_XlaCompile")
"""Attributes that mark functions and calls that TensorFlow compiles with XLA (`jit_compile=True`)."""


def with_sizes(
    config: BatchingConfig, requested: WarmSizes, *, compiled: bool, gpu: bool
) -> BatchingConfig:
    """Return a configuration that has the sizes to which a model's batches are padded.

    Args:
        config: The configuration, maybe without sizes.
        requested: The user's choice.
        compiled: Whether XLA compiles the model, once for each new size.
        gpu: Whether the model runs on a GPU, where cuDNN chooses kernels for each new size.

    Returns:
        The configuration. If it had no sizes and padding is chosen, it has powers of two up to the maximum size.
    """
    needs_sizes = requested == "on" or (requested == "auto" and (compiled or gpu))
    if not config.enabled or not needs_sizes:
        return config
    sizes = config.allowed_batch_sizes or _doubling(config.max_batch_size)
    return dataclasses.replace(config, allowed_batch_sizes=sizes, only_allowed_sizes=compiled)


def is_compiled(saved: saved_model_pb2.SavedModel) -> bool:
    """Whether a SavedModel has a function or a call that XLA must compile."""
    for meta_graph in saved.meta_graphs:
        library = meta_graph.graph_def.library.function
        if any(found.attr[name].b for found in library for name in _COMPILED if name in found.attr):
            return True
        bodies = (meta_graph.graph_def.node, *(found.node_def for found in library))
        if any(_calls_compiled(body) for body in bodies):
            return True
    return False


def _calls_compiled(nodes: Iterable[node_def_pb2.NodeDef]) -> bool:
    return any(node.attr[name].b for node in nodes for name in _COMPILED if name in node.attr)


def _doubling(max_size: int) -> tuple[int, ...]:
    """Return the powers of two below a size, and the size itself."""
    sizes = [1 << power for power in range(max_size.bit_length()) if 1 << power < max_size]
    return (*sizes, max_size)
