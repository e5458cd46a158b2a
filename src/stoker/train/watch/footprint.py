"""Estimates the memory that a model needs for training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

_NOT_ACTIVATIONS = ("ReadVariableOp", "Const", "Placeholder")
"""Operations whose output needs no additional memory: it is a weight, a constant, or the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """The memory that training needs on each device with a replica."""

    parameters: int
    """Number of parameters."""

    trainable: int
    """Number of trainable parameters."""

    weights_bytes: int
    """Size of the weights, bytes."""

    gradients_bytes: int
    """Size of the gradients of all trainable weights, bytes."""

    optimizer_bytes: int
    """Size of the optimizer's variables, for example its moments, bytes."""

    activations_bytes: int
    """Size of the outputs of the forward pass that the backward pass reads, for a batch of a replica, bytes. It is
    an estimate: XLA keeps less, temporary results are not included, and loops are not examined."""

    largest: tuple[tuple[str, int], ...]
    """Name in the graph and size in bytes of the largest activations."""

    @property
    def total_bytes(self) -> int:
        """Sum of all parts, bytes."""
        return (
            self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        ) + self.activations_bytes


def measure_footprint(
    model: keras.Model, loss_of: Callable[[Any], tf.Tensor], batch: Any, *, shown: int = 5
) -> Footprint:
    """Trace a pass and add up the memory that it needs; nothing is run or changed.

    Args:
        model: The built and compiled model.
        loss_of: Computes the loss of a batch with a forward pass as in training.
        batch: Tensors for `loss_of`; only their shapes and dtypes are used.
        shown: Number of the largest activations to name.
    """
    kept = _kept_for_backward(model, loss_of, batch)
    sizes = sorted(((_bytes(tensor), tensor.op.name) for tensor in kept), reverse=True)
    trainable = model.trainable_variables
    return Footprint(
        parameters=_count(model.weights),
        trainable=_count(trainable),
        weights_bytes=sum(map(_bytes, model.variables)),
        gradients_bytes=sum(map(_bytes, trainable)),
        optimizer_bytes=sum(map(_bytes, model.optimizer.variables)),
        activations_bytes=sum(size for size, _ in sizes),
        largest=tuple((name, size) for size, name in sizes[:shown] if size),
    )


def _kept_for_backward(
    model: keras.Model, loss_of: Callable[[Any], tf.Tensor], batch: Any
) -> list[tf.Tensor]:
    """Return the outputs of the forward pass that operations of the backward pass read."""
    kept: dict[str, tf.Tensor] = {}

    def trace(batch: Any) -> tf.Tensor:
        weights = [variable.value for variable in model.trainable_variables]
        # The scope drops all writes to variables.
        with keras.StatelessScope(), tf.GradientTape() as tape:
            loss = loss_of(batch)
        graph = tf.compat.v1.get_default_graph()
        forward = {id(operation) for operation in graph.get_operations()}
        tape.gradient(loss, weights)
        for operation in graph.get_operations():
            if id(operation) in forward:
                continue
            for tensor in operation.inputs:
                if id(tensor.op) in forward and tensor.op.type not in _NOT_ACTIVATIONS:
                    kept[tensor.name] = tensor
        return loss

    tf.function(trace).get_concrete_function(
        tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), batch)
    )
    return list(kept.values())


def _count(variables: Sequence[Any]) -> int:
    return sum(math.prod(variable.shape) for variable in variables)


def _bytes(tensor: Any) -> int:
    dtype, shape = tf.as_dtype(tensor.dtype), tf.TensorShape(tensor.shape)
    if shape.rank is None or not dtype.is_numpy_compatible or dtype == tf.string:
        return 0
    return math.prod(size or 1 for size in shape.as_list()) * dtype.size
