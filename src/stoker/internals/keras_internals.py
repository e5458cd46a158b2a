"""The only module that uses private names of Keras, with a list of them.

If an upgrade of Keras removes some of these names, a test fails and lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import keras
from keras.src.backend import (
    AutocastScope,
    get_autocast_scope,
    get_keras_mask,
    set_keras_mask,
)
from keras.src.backend.common import global_state
from keras.src.losses import loss as losses_module
from keras.src.random import seed_generator
from keras.src.random.seed_generator import SeedGenerator, global_seed_generator

__all__ = [
    "AutocastScope",
    "SeedGenerator",
    "get_autocast_scope",
    "get_keras_mask",
    "global_seed_generator",
    "losses_module",
    "set_keras_mask",
]

USED_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Model": ("_compile_metrics", "_compute_loss", "_layers", "_symbolic_build"),
        "CompileMetrics": ("_user_metrics", "_user_weighted_metrics"),
        "Layer": ("_get_call_context", "_inbound_nodes", "_seed_generators"),
        "Node": ("input_tensors",),
        "KerasTensor": ("_keras_history",),
        "KerasHistory": ("operation", "node_index"),
        "Adam": (
            *("_all_reduce_sum_gradients", "_backend_update_step", "_get_variable_index"),
            *("_learning_rate", "_momentums", "_velocities"),
        ),
        "MeanMetricWrapper": ("_fn",),
        "SeedGenerator": ("next", "state", "get_config"),
        "global_state": ("get_global_attribute", "set_global_attribute"),
        "losses_module": ("scale_loss_for_distribution", "unscale_loss_for_distribution"),
        "seed_generator": ("GLOBAL_SEED_GENERATOR", "global_seed_generator"),
    }
)
"""Name of a Keras class or module -> its attributes that Stoker reads, replaces or calls."""

MODULES = {
    "global_state": global_state,
    "losses_module": losses_module,
    "seed_generator": seed_generator,
}
"""The modules among `USED_NAMES`."""


def compiled_metrics(model: keras.Model) -> Any:
    """Return the metric that contains the metrics given to `compile`; None if none were given."""
    return model._compile_metrics


def user_metrics(metrics: Any) -> tuple[Any, Any]:
    """Return `metrics` and `weighted_metrics` as `compile` received them.

    Args:
        metrics: The result of `compiled_metrics`.
    """
    return metrics._user_metrics, metrics._user_weighted_metrics


def compute_loss(model: keras.Model, parts: Mapping[str, Any], *, training: bool) -> Any:
    """Compute the loss as Keras's own steps do, even if the model's `compute_loss` has no argument `training`."""
    return model._compute_loss(**parts, training=training)


def build_for_own_step(model: keras.Model, batch: Any) -> None:
    """Build a model that has a user-defined `train_step`, as `fit` builds it."""
    model._symbolic_build(data_batch=batch)


def sublayers(layer: keras.Layer) -> list[Any]:
    """Return the layers that a layer tracks, including layers that `Model.layers` does not list."""
    return list(layer._layers)


def seed_generators(layer: keras.Layer) -> list[SeedGenerator]:
    """Return the random number generators that a layer tracks."""
    return list(layer._seed_generators)


def layer_of(tensor: Any) -> Any:
    """Return the layer or operation that makes a symbolic tensor."""
    return tensor._keras_history.operation


def inputs_of_layer(tensor: Any) -> list[Any]:
    """Return the symbolic tensors from which a layer makes a symbolic tensor."""
    history = tensor._keras_history
    return list(history.operation._inbound_nodes[history.node_index].input_tensors)


def call_context(layer: keras.Layer) -> Any:
    """Return the context of the call in progress. It has `training`, which not every layer gets as an argument."""
    return layer._get_call_context()


@contextmanager
def called_in(context: Any) -> Iterator[None]:
    """In the `with` block, layers are called as part of another call, whose `call_context` is given."""
    name = "current_call_ctx"
    kept = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, context)
    try:
        yield
    finally:
        global_state.set_global_attribute(name, kept)


def use_global_seeds(generator: SeedGenerator) -> None:
    """In this thread, let random operations without a seed of their own use this generator."""
    global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, generator)


def learning_rate_of(optimizer: Any) -> Any:
    """Return the learning rate as it was set: a schedule, a function or a variable."""
    return optimizer._learning_rate


def disable_gradient_reduction(optimizer: Any) -> None:
    """Let `apply` take gradients as they are, instead of summing them over replicas first."""
    optimizer._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars


UPDATE_ALL = "_backend_update_step"
"""Name of an optimizer's method that calls `update_step` for each weight."""


def update_all(optimizer: Any) -> Callable[..., None]:
    """Return the method `UPDATE_ALL` of the optimizer's class; its first argument is the optimizer."""
    found: Callable[..., None] = type(optimizer)._backend_update_step
    return found


def adam_slots(optimizer: Any, variable: Any) -> tuple[Any, Any]:
    """Return Adam's momentum and velocity of a weight."""
    index = optimizer._get_variable_index(variable)
    return optimizer._momentums[index].value, optimizer._velocities[index].value


def metric_function(metric: Any) -> Any:
    """Return the function that a metric wraps; the metric itself if it does not wrap a function."""
    return getattr(metric, "_fn", metric)


def is_kerass_loss(kind: Any) -> bool:
    """Return whether a class or function is one of Keras's losses."""
    return str(kind.__module__).startswith("keras.src.losses")
