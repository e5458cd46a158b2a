"""Collects facts about a Keras model after training, when the model is built; writes the graph of a step."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .places import Place
from .watch import FACTS

PADDED_CHANNELS = 4
"""cuDNN itself pads the input of a convolution that has at most this many channels, such as an image."""

MAX_LAYERS = 64
"""Maximum number of layers per kind of fact: more would not help the user."""

HALVES = ("float16", "bfloat16")


def late_facts(model: Any, made_at: Callable[[Any], Place]) -> dict[str, Any]:
    """Return facts about a model as JSON values.

    Args:
        model: A trained model.
        made_at: Returns the line that created a layer.
    """
    facts: dict[str, Callable[[], Any]] = {
        "float64": lambda: [v.path for v in model.variables if v.dtype == "float64"][:8],
        "half_outputs": lambda: _half_outputs(model, made_at),
        "kernels": lambda: _kernels(model, made_at),
        "devices": lambda: _devices(model),
        "useless_biases": lambda: _biases(model, made_at),
    }
    found = {}
    for name, fact in facts.items():
        # A model may have any form: if one fact fails, the others must still be collected.
        with FACTS.guarded():
            found[name] = fact()
    return found


def _biases(model: Any, made_at: Callable[[Any], Place]) -> dict[str, Any]:
    """Layers whose bias a BatchNormalization cancels, and the number of parameters in these biases."""
    layers = useless_biases(model)
    if not layers:
        # Return before `count_params`, which fails for a model that is not built.
        return {"layers": [], "count": 0, "parameters": 0, "of_parameters": 0}
    return {
        "layers": [{"name": layer.name, "place": made_at(layer)} for layer in layers[:MAX_LAYERS]],
        "count": len(layers),
        "parameters": sum(int(layer.bias.shape[0]) for layer in layers),
        "of_parameters": model.count_params(),
    }


def _half_outputs(model: Any, made_at: Callable[[Any], Place]) -> list[dict[str, Any]]:
    """Output layers that compute in half precision: names, dtypes and lines."""
    try:
        names = list(dict.fromkeys(model.output_names))
        layers = [model.get_layer(name) for name in names]
    except (AttributeError, ValueError):
        # The model is not a graph of layers: its last layer is probably its output.
        layers = model.layers[-1:]
    return [
        {"name": layer.name, "dtype": layer.compute_dtype, "place": made_at(layer)}
        for layer in layers
        if layer.compute_dtype in HALVES
    ]


def _kernels(model: Any, made_at: Callable[[Any], Place]) -> list[dict[str, Any]]:
    """For each layer that computes in half precision, its kernel's input (unless cuDNN pads it) and output size."""
    found: list[dict[str, Any]] = []
    for layer in _layers(model):
        shape = tuple(getattr(getattr(layer, "kernel", None), "shape", ()))
        # All other layers have several kernels, or a kernel that is not a matrix: they are left out.
        if type(layer).__name__ not in ("Dense", "Conv1D", "Conv2D", "Conv3D") or len(shape) < 2:
            continue
        if layer.compute_dtype in HALVES and len(found) < MAX_LAYERS:
            inputs, units = int(shape[-2]), int(shape[-1])
            padded = len(shape) > 2 and inputs <= PADDED_CHANNELS
            sides = [units] if padded else [inputs, units]
            found.append({"name": layer.name, "sides": sides, "place": made_at(layer)})
    return found


def _layers(model: Any) -> Iterator[Any]:
    for layer in model.layers:
        yield layer
        if getattr(layer, "layers", None):
            yield from _layers(layer)


def _devices(model: Any) -> list[str]:
    """Devices that hold the trained variables, e.g. `GPU:0`."""
    places = {str(variable.value.device) for variable in model.trainable_variables}
    return sorted(place.rpartition("device:")[2] for place in places)


WITH_BIAS = {
    "Dense",
    *(f"Conv{rank}D" for rank in (1, 2, 3)),
    *(f"Conv{rank}DTranspose" for rank in (1, 2, 3)),
    *(f"DepthwiseConv{rank}D" for rank in (1, 2)),
    *(f"SeparableConv{rank}D" for rank in (1, 2)),
}
"""Keras layers whose last operations add a bias for each channel and apply an activation."""


def useless_biases(model: Any) -> list[Any]:
    """Layers whose bias has no effect, in the order of the graph.

    A layer counts if its output goes only to a BatchNormalization, both are trained, each is used once, and the
    bias has no regularizer or constraint.

    Args:
        model: A Keras model. Only graphs of layers (functional, sequential) are examined, even inside other
            models; the `call` of a class is not examined.
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
    # Leave out a model that is used in several places: its layers are used several times too.
    for inner in _inner_models(model, nodes):
        if uses[id(inner)] <= 1:
            yield from _of(inner, seen)


def _only_readers(graph: Any, nodes: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each call whose output goes to exactly one other call, and that other call."""
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
    """The calls of a graph's layers in order; empty for a model that is not a graph."""
    by_depth = getattr(graph, "_nodes_by_depth", None) or {}
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]


def _inner_models(model: Any, nodes: Iterable[Any]) -> Iterator[Any]:
    used = [node.operation for node in nodes] or getattr(model, "layers", [])
    for layer in dict.fromkeys(used):
        if getattr(layer, "layers", None):
            yield layer


def _maker(tensor: Any) -> tuple[int, int]:
    """Identify the call that produced a tensor: ID of the layer, and number of the call."""
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
    """Whether a call is a BatchNormalization in training mode over the layer's channels; this cancels the bias."""
    norm = node.operation
    if not _is_kerass(norm, {"BatchNormalization"}) or not norm.trainable or norm.renorm:
        return False
    if False in (node.arguments.kwargs.get("training"), *node.arguments.args[1:2]):
        return False
    rank = len(node.input_tensors[0].shape)
    first = getattr(layer, "data_format", "channels_last") == "channels_first"
    return bool(norm.axis % rank == (1 if first else rank - 1))


MAX_BYTES = 256 << 20
"""Maximum size of a graph with shapes but without large constants, bytes: a larger graph takes seconds to write."""

MAX_CONSTANT_BYTES = 4096
"""Maximum size of a constant that is written with its values, bytes: shapes and bounds of loops are smaller."""


def write_graph(concrete: Any, *, given: Any = None, batch: Any = None) -> dict[str, Any]:
    """Write the graph of a step to the folder of the facts.

    Args:
        concrete: The concrete function of the step.
        given: The arguments of a call, if they contain the batch.
        batch: A batch, if the function itself reads it from an iterator or a dataset.

    Returns:
        The name of the file, and facts about the function's inputs; only `why` if nothing was written.
    """
    graph = concrete.graph.as_graph_def(add_shapes=True)
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        for node in nodes:
            if node.op == "Const":
                _shorten(node)
    if graph.ByteSize() > MAX_BYTES:
        return {"why": f"the step's graph takes more than {MAX_BYTES >> 20} MiB"}
    name = f"step-{os.getpid()}-{_count()}.pb"
    with open(os.path.join(FACTS.folder, name), "wb") as stream:  # noqa: PTH118, PTH123 - importing pathlib slows the script's start
        stream.write(graph.SerializeToString())
    inputs = concrete.inputs
    own = inputs[: len(inputs) - len(concrete.captured_inputs)]
    return {
        "graph": name,
        "outputs": [tensor.name for tensor in concrete.outputs],
        "runs": [operation.name for operation in concrete.graph.control_outputs],
        "compiled": _by_xla(concrete),
        "given": _given(own, given),
        "batch": [] if batch is None else _shapes(batch),
    }


def _by_xla(concrete: Any) -> bool:
    """Whether XLA compiles the function as a whole."""
    attributes = concrete.function_def.attr
    return "_XlaMustCompile" in attributes and bool(attributes["_XlaMustCompile"].b)


_written = [0]


def _count() -> int:
    _written[0] += 1
    return _written[0]


def _shorten(node: Any) -> None:
    """Drop the values of a large constant; keep its dtype and shape."""
    value = node.attr["value"].tensor
    if value.ByteSize() > MAX_CONSTANT_BYTES:
        value.CopyFrom(type(value)(dtype=value.dtype, tensor_shape=value.tensor_shape))


def _given(inputs: list[Any], given: Any) -> dict[str, list[int]]:
    """Name of an input -> its shape in this call; empty if inputs and arguments do not match."""
    tf: Any = sys.modules["tensorflow"]
    leaves = [leaf for leaf in tf.nest.flatten(given) if hasattr(leaf, "shape")]
    fit = len(leaves) == len(inputs) and all(
        placeholder.shape.is_compatible_with(leaf.shape) and placeholder.dtype == leaf.dtype
        for placeholder, leaf in zip(inputs, leaves, strict=True)
    )
    if not fit:
        return {}
    pairs = zip(inputs, leaves, strict=True)
    return {placeholder.op.name: [int(side) for side in leaf.shape] for placeholder, leaf in pairs}


def _shapes(batch: Any) -> list[list[Any]]:
    """Dtype and shape of each part of a batch."""
    tf: Any = sys.modules["tensorflow"]
    return [
        [part.dtype.name, [int(side) for side in part.shape]] for part in tf.nest.flatten(batch)
    ]
