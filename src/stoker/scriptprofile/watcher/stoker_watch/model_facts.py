"""What is known of a Keras model once it has been built by its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .biases import useless_biases
from .facts import FACTS
from .places import Place

PADDED_CHANNELS = 4
"""cuDNN pads so few input channels (an image's) by itself."""

MOST_LAYERS = 64
"""Of a model: more tell nothing more."""

HALVES = ("float16", "bfloat16")


def late_facts(model: Any, made_at: Callable[[Any], Place]) -> dict[str, Any]:
    """Facts, JSON values.

    Args:
        model: It has been trained.
        made_at: The line that made a layer.
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
        # A model may be anything: what cannot be said of it costs no other fact.
        with FACTS.guarded():
            found[name] = fact()
    return found


def _biases(model: Any, made_at: Callable[[Any], Place]) -> dict[str, Any]:
    """Layers whose bias a BatchNormalization cancels, and the share of parameters in them."""
    layers = useless_biases(model)
    if not layers:
        # A model that is not built has no count of parameters.
        return {"layers": [], "count": 0, "parameters": 0, "of_parameters": 0}
    return {
        "layers": [{"name": layer.name, "place": made_at(layer)} for layer in layers[:MOST_LAYERS]],
        "count": len(layers),
        "parameters": sum(int(layer.bias.shape[0]) for layer in layers),
        "of_parameters": model.count_params(),
    }


def _half_outputs(model: Any, made_at: Callable[[Any], Place]) -> list[dict[str, Any]]:
    """Output layers that compute in half precision, and the lines that made them."""
    try:
        names = list(dict.fromkeys(model.output_names))
        layers = [model.get_layer(name) for name in names]
    except (AttributeError, ValueError):
        # A model that is no graph of layers: its last layer is likely its output.
        layers = model.layers[-1:]
    return [
        {"name": layer.name, "dtype": layer.compute_dtype, "place": made_at(layer)}
        for layer in layers
        if layer.compute_dtype in HALVES
    ]


def _kernels(model: Any, made_at: Callable[[Any], Place]) -> list[dict[str, Any]]:
    """Sides of the products of matrices and convolutions in half precision, layer by layer."""
    found: list[dict[str, Any]] = []
    for layer in _layers(model):
        shape = tuple(getattr(getattr(layer, "kernel", None), "shape", ()))
        # Others have kernels that are no matrix, or several: nothing is said of them.
        if type(layer).__name__ not in ("Dense", "Conv1D", "Conv2D", "Conv3D") or len(shape) < 2:
            continue
        if layer.compute_dtype in HALVES and len(found) < MOST_LAYERS:
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
    """Where the variables that are trained lie: `GPU:0`."""
    places = {str(variable.value.device) for variable in model.trainable_variables}
    return sorted(place.rpartition("device:")[2] for place in places)
