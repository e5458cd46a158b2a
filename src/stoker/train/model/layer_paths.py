"""Yields the layers of any model, nested ones too, with their paths."""

from __future__ import annotations

from collections.abc import Iterator

import keras


def layer_types(model: keras.Model) -> dict[str, str]:
    """Return the path of every layer in a model -> the name of its class."""
    return {path: type(layer).__name__ for path, layer in walk_layers(model)}


def walk_layers(model: keras.Model) -> Iterator[tuple[str, keras.Layer]]:
    """Yield every layer below a model with its path, once, outer ones before inner ones.

    Args:
        model: Functional, Sequential or subclassed; its layers may be models.

    Yields:
        `block1/attention` and the layer. A layer that is used in two places has its first path.
    """
    seen = {id(model)}
    waiting = [("", model)]
    while waiting:
        above, outer = waiting.pop()
        below = []
        for layer in outer._layers:  # noqa: SLF001 - `Model.layers` leaves out layers of layers
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            path = f"{above}{layer.name}"
            yield path, layer
            below.append((f"{path}/", layer))
        waiting.extend(reversed(below))
