"""Finds biases that a following BatchNormalization cancels.

The layer subtracts the mean of the batch, channel by channel, and with it any constant that was
added to that channel: in training such a bias has no effect and a gradient of zero, up to rounding.
It costs an addition over the whole output, and a sum over it for the gradient. This applies to no
other normalization: the mean of LayerNormalization and GroupNormalization spans channels with
different biases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

WITH_BIAS = {
    "Dense",
    *(f"Conv{rank}D" for rank in (1, 2, 3)),
    *(f"Conv{rank}DTranspose" for rank in (1, 2, 3)),
    *(f"DepthwiseConv{rank}D" for rank in (1, 2)),
    *(f"SeparableConv{rank}D" for rank in (1, 2)),
}
"""Keras layers that end with a bias for each channel and an activation."""


def useless_biases(model: Any) -> list[Any]:
    """Layers whose bias has no effect, in the order of the graph.

    A layer counts if it and the BatchNormalization are each used once, its output goes only to the
    BatchNormalization, both are trained, and the bias has no regularizer or constraint.

    Args:
        model: A Keras model. Only graphs of layers (functional, sequential) are examined, also when
            nested; the `call` of a class is not.
    """
    return list(_of(model, set()))


def _of(model: Any, seen: set[int]) -> Iterator[Any]:
    if id(model) in seen:
        return
    seen.add(id(model))
    # A built Sequential contains the graph of its layers.
    graph = getattr(model, "_functional", None) or model
    nodes = _in_order(graph)
    uses = Counter(id(node.operation) for node in nodes)
    for node, reader in _only_readers(graph, nodes):
        once = uses[id(node.operation)] == uses[id(reader.operation)] == 1
        if once and _has_plain_bias(node.operation) and _takes_it_out(reader, node.operation):
            yield node.operation
    # A model used in several places shares its layers.
    for inner in _inner_models(model, nodes):
        if uses[id(inner)] <= 1:
            yield from _of(inner, seen)


def _only_readers(graph: Any, nodes: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Calls whose output goes to exactly one other call, with that call."""
    readers: dict[tuple[int, int], list[Any]] = {}
    for node in nodes:
        for tensor in node.input_tensors:
            readers.setdefault(_maker(tensor), []).append(node)
    given = {_maker(tensor) for tensor in getattr(graph, "outputs", ())}
    for node in nodes:
        makers = {_maker(tensor) for tensor in node.output_tensors}
        behind = [reader for maker in makers for reader in readers.get(maker, ())]
        if len(behind) == 1 and not given & makers:
            yield node, behind[0]


def _in_order(graph: Any) -> list[Any]:
    """The calls of a graph's layers; empty for a model that is not a graph."""
    by_depth = getattr(graph, "_nodes_by_depth", None) or {}
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]


def _inner_models(model: Any, nodes: Iterable[Any]) -> Iterator[Any]:
    used = [node.operation for node in nodes] or getattr(model, "layers", [])
    for layer in dict.fromkeys(used):
        if getattr(layer, "layers", None):
            yield layer


def _maker(tensor: Any) -> tuple[int, int]:
    """The call that produced a tensor."""
    history = getattr(tensor, "_keras_history", None)
    return (0, 0) if history is None else (id(history.operation), history.node_index)


def _is_kerass(layer: Any, names: set[str]) -> bool:
    kind = type(layer)
    return kind.__module__.partition(".")[0] == "keras" and kind.__name__ in names


def _has_plain_bias(layer: Any) -> bool:
    return (
        _is_kerass(layer, WITH_BIAS)
        and bool(layer.use_bias)
        and layer.trainable
        and getattr(layer.activation, "__name__", "") == "linear"
        and all(
            getattr(layer, f"bias_{name}", None) is None for name in ("regularizer", "constraint")
        )
        and getattr(layer, "activity_regularizer", None) is None
    )


def _takes_it_out(node: Any, layer: Any) -> bool:
    """Whether a call is a BatchNormalization over the layer's channels, in training."""
    norm = node.operation
    if not _is_kerass(norm, {"BatchNormalization"}) or not norm.trainable or norm.renorm:
        return False
    if False in (node.arguments.kwargs.get("training"), *node.arguments.args[1:2]):
        return False
    rank = len(node.input_tensors[0].shape)
    first = getattr(layer, "data_format", "channels_last") == "channels_first"
    return bool(norm.axis % rank == (1 if first else rank - 1))
