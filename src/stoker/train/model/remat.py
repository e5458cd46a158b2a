"""Rematerialization: computes a layer's activations again for its gradient, instead of keeping them.

Keras's own rematerialization (`keras.RematScope`) is not used. It runs a layer twice with all side effects,
so Dropout drops other units in the second run, which silently makes the gradient wrong, and BatchNorm
updates its averages twice. Here both runs use the same state, which changes once.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from stoker.core.config import nearest
from stoker.core.errors import ConfigError
from stoker.internals.keras_internals import (
    AutocastScope,
    call_context,
    called_in,
    get_autocast_scope,
    get_keras_mask,
    set_keras_mask,
)
from stoker.train.model.keras_model import walk_layers

_PLAIN = "computed_once"
"""Name of the attribute of a layer's new `call` that stores the old `call`."""


def rematerialize(model: keras.Model, patterns: Sequence[str]) -> tuple[str, ...]:
    """Make some layers keep only their inputs between forward and backward pass.

    This saves memory for layers with many activations, such as an attention, or a block of layers. The
    gradient stays the same, and the forward pass of these layers runs twice.

    Args:
        model: A built model, whose step has not been traced yet; it is changed. Inference and export do
            not change.
        patterns: Shell patterns of layer paths or names: `block*`, `encoder/*/attention`. Layers inside a
            matching layer are part of it.

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
    # Suggest only layers that contain layers, if there are any.
    holding = [path for path in paths if any(p.startswith(f"{path}/") for p in paths)]
    return nearest(pattern.strip("*/"), holding or paths)


def _recomputed(layer: keras.Layer) -> Callable[..., Any]:
    plain = layer.call

    def call(*args: Any, **kwargs: Any) -> Any:
        context = call_context(layer)
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
                # Otherwise, Dropout and BatchNorm inside the layer would treat the second run as inference.
                called_in(context),
                AutocastScope(cast.dtype if cast else None),
                keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope,
            ):
                scopes.append(scope)
                return plain(*own_args, **own_kwargs), [tf.identity(loss) for loss in scope.losses]

        values = [given[place] for place in places]
        values += [tf.convert_to_tensor(weight.value) for weight in weights]
        outputs, losses = tf.recompute_grad(pure)(*values)
        # Assign the changes of the first run. The second run makes the same changes, which are dropped.
        for variable in state:
            variable.assign(scopes[0].get_current_value(variable))
        for loss in losses:
            layer.add_loss(loss)
        return outputs

    setattr(call, _PLAIN, plain)
    return call


def _has_gradient(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype.is_floating


def _with_mask_of(original: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    mask = get_keras_mask(original)
    if mask is not None:
        set_keras_mask(value, mask)
    return value
