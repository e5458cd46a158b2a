"""Counts a model's operations from its traced graph; `peak_flops` measures the device's peak rate.

Matrix products and convolutions are counted: a multiplication and an addition are two operations,
and padding counts as data. Everything else (activations, normalization, the optimizer's update) is
left out, as is usual in a comparison of achieved and peak rates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from stoker.core.errors import Plain, UserError
from stoker.measure.operation_tally import Kind, Tally
from stoker.measure.step_flops import count_graph

BACKWARD = 2
"""Products of the backward pass for each one of the forward pass: one for the gradient of the
input, one for that of the weights. Source: Kaplan et al., arXiv:2001.08361, section 2.1."""

BATCH_SIZE = 32
"""Default rows for tracing a model: operations independent of the batch are split over them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """Floating-point operations of a model, per sample."""

    forward_per_sample: float
    """Operations of the forward pass."""

    step_per_sample: float
    """Operations of a training step, forward and backward; the update is left out."""

    in_convolutions: float
    """The part of `forward_per_sample` in convolutions."""

    in_products: float
    """The part of it in matrix products."""

    not_counted: tuple[str, ...]
    """How the count differs from the real operations, in plain words; empty if it is complete."""

    unknown: tuple[str, ...] = ()
    """The part of it that could not be counted at all: each is a reason not to give a figure."""


def count_flops(target: Any, *, inputs: Any = None, batch_size: int = BATCH_SIZE) -> ModelFlops:
    """Count the operations of one forward pass in inference mode; Dropout costs nothing there.

    Args:
        target: A built `keras.Model`, a function of tensors, or a concrete function; the inputs of
            the latter must have known sizes.
        inputs: Nested `tf.TensorSpec`s that a model or function is called with; by default the
            inputs of a functional or sequential model. Pass it if a dimension other than the
            batch is unknown.
        batch_size: Used for tracing if the first dimension of an input is unknown.

    Returns:
        The count per sample.

    Raises:
        UserError: the inputs, or the number of samples, are unknown.
    """
    traced = _traced(target, inputs, batch_size)
    specs = tf.nest.flatten(traced.structured_input_signature)
    samples = next((spec.shape[0] for spec in specs if _has_rows(spec)), None)
    if not samples:
        raise UserError(
            "what is counted must be traced with a known number of samples",
            got=Plain(", ".join(str(spec) for spec in specs) or "no inputs"),
            fix="Trace it with a batch size: tf.TensorSpec([32, 10]).",
        )
    tally = count_graph(
        traced.graph.as_graph_def(add_shapes=True), [tensor.name for tensor in traced.outputs]
    )
    convolutions, products = _of(tally, "convolutions"), _of(tally, "products of matrices")
    forward = (convolutions + products) / samples
    return ModelFlops(
        forward_per_sample=forward,
        step_per_sample=(1 + BACKWARD) * forward,
        in_convolutions=convolutions / samples,
        in_products=products / samples,
        not_counted=(*tally.unknown, *tally.notes),
        unknown=tally.unknown,
    )


def _of(tally: Tally, kind: Kind) -> int:
    return sum(operations for (counted, _), operations in tally.work.items() if counted == kind)


def _has_rows(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec) and bool(spec.shape.rank)


def _inputs_of(target: Any) -> Any:
    """The inputs that a model was built for; None if unknown."""
    inputs = getattr(target, "input", None)
    if inputs is None:
        # A Sequential model that was never called has a list with its single input.
        several = getattr(target, "inputs", None) or [None]
        inputs = several[0] if len(several) == 1 else several
    return inputs


def _traced(target: Any, inputs: Any, batch_size: int) -> Any:
    if hasattr(target, "structured_input_signature"):
        return target
    if inputs is None:
        inputs = _inputs_of(target)
    if inputs is None:
        raise UserError(
            "a function, or a model without declared inputs, can only be counted for given inputs",
            got=Plain(type(target).__name__),
            fix="Say what it is called with: count_flops(model, inputs=tf.TensorSpec([None, 10])).",
        )

    def sized(spec: Any) -> tf.TensorSpec:
        first, *rest = spec.shape if len(spec.shape) else (None,)
        shape = [] if not len(spec.shape) else [batch_size if first is None else first, *rest]
        return tf.TensorSpec(shape, spec.dtype)

    specs = tf.nest.map_structure(sized, inputs)
    if isinstance(target, keras.Model):
        return tf.function(lambda given: target(given, training=False)).get_concrete_function(specs)
    return tf.function(target).get_concrete_function(specs)
