"""Rematerialization: computes a layer's activations again for its gradient instead of keeping them.

Keras's own (`keras.RematScope`) is not used: it runs a layer twice with all side effects, so that
Dropout drops other units in the second run (a wrong gradient, silently) and BatchNorm updates its
averages twice. Here both runs see the same state, which changes once.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import (
    AutocastScope,
    get_autocast_scope,
    get_keras_mask,
    set_keras_mask,
)
from keras.src.backend.common import global_state

from stoker.core.config import nearest
from stoker.core.errors import ConfigError
from stoker.train.model.layer_paths import walk_layers

_PLAIN = "computed_once"
"""Name of the attribute of a new `call` that keeps the old one."""


def rematerialize(model: keras.Model, patterns: Sequence[str]) -> tuple[str, ...]:
    """Make some layers keep only their inputs between forward and backward pass.

    It saves memory for layers with many activations: a block that is a layer or a model, an
    attention. The gradient is the same, and their forward pass runs twice.

    Args:
        model: A built model; it is changed once, before its step is traced. Inference and export do
            not change.
        patterns: Shell patterns of layer paths or names: `block*`, `encoder/*/attention`. A layer
            inside a matching one belongs to it.

    Returns:
        The paths of the layers whose activations are computed again.

    Raises:
        ConfigError: A pattern matches no layer.
    """
    by_path = dict(walk_layers(model))
    for pattern in patterns:
        if not any(_matches(path, pattern) for path in by_path):
            raise ConfigError(
                "train.remat must name layers of the model",
                got=pattern,
                fix=_near(pattern, list(by_path)),
            )
    chosen: list[str] = []
    for path, layer in by_path.items():
        inside = any(path.startswith(f"{outer}/") for outer in chosen)
        if not inside and any(_matches(path, pattern) for pattern in patterns):
            layer.call = _recomputed(layer)
            chosen.append(path)
    return tuple(chosen)


def plain_call(layer: Any) -> Callable[..., Any]:
    """Return the `call` of a layer as it was before `rematerialize`."""
    call: Callable[..., Any] = layer.call
    return getattr(call, _PLAIN, call)


def _matches(path: str, pattern: str) -> bool:
    name = path.rpartition("/")[2]
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(name, pattern)


def _near(pattern: str, paths: Sequence[str]) -> str:
    # Suggest layers that contain others, if there are any.
    holding = [path for path in paths if any(p.startswith(f"{path}/") for p in paths)]
    return nearest(pattern.strip("*/"), holding or paths)


def _recomputed(layer: keras.Layer) -> Callable[..., Any]:
    plain = layer.call

    def call(*args: Any, **kwargs: Any) -> Any:
        context = layer._get_call_context()  # noqa: SLF001 - a layer may have no `training` itself
        if not context.get_value("training"):
            return plain(*args, **kwargs)
        given = tf.nest.flatten((args, kwargs))
        places = [index for index, value in enumerate(given) if _has_gradient(value)]
        weights = list(layer.trainable_variables)
        state = list(layer.non_trainable_variables)
        cast = get_autocast_scope()
        before = [(variable, tf.convert_to_tensor(variable.value)) for variable in state]
        scopes: list[Any] = []

        def pure(*values: tf.Tensor) -> Any:
            inputs = list(given)
            for place, value in zip(places, values, strict=False):
                inputs[place] = _with_mask_of(given[place], value)
            own_args, own_kwargs = tf.nest.pack_sequence_as((args, kwargs), inputs)
            mapping = [*before, *zip(weights, values[len(places) :], strict=True)]
            with (
                _called_in(context),
                AutocastScope(cast.dtype if cast else None),
                keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope,
            ):
                scopes.append(scope)
                return plain(*own_args, **own_kwargs), [tf.identity(loss) for loss in scope.losses]

        values = [given[place] for place in places]
        values += [tf.convert_to_tensor(weight.value) for weight in weights]
        outputs, losses = tf.recompute_grad(pure)(*values)
        # The first run's changes belong to the layer; those of the second are equal, and dropped.
        for variable in state:
            variable.assign(scopes[0].get_current_value(variable))
        for loss in losses:
            layer.add_loss(loss)
        return outputs

    setattr(call, _PLAIN, plain)
    return call


@contextmanager
def _called_in(context: Any) -> Iterator[None]:
    # Without Keras's call context, Dropout and BatchNorm inside the second run would take it for
    # inference.
    name = "current_call_ctx"
    kept = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, context)
    try:
        yield
    finally:
        global_state.set_global_attribute(name, kept)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def _with_mask_of(original: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    mask = get_keras_mask(original)
    if mask is not None:
        set_keras_mask(value, mask)
    return value
