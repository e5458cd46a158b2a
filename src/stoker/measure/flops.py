"""Counts what a model computes from its traced graph; `peak_flops` measures what a device reaches.

Products of matrices and convolutions are counted: a multiplication and an addition are two
operations, and padding counts as data. Everything else (activations, normalization, the optimizer's
update) is left out, as is usual where achieved is compared with peak.
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
"""Products of the backward pass for one of the forward pass: one for the gradient of what went in,
one for that of the weights. Source: Kaplan et al., arXiv:2001.08361, section 2.1."""

BATCH_SIZE = 32
"""Rows that a model is traced with where nobody says: what does not depend on them is shared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """Floating-point operations of a model, one sample at a time."""

    forward_per_sample: float
    """Of the forward pass."""

    step_per_sample: float
    """Of a training step: forward and backward; the update is left out."""

    in_convolutions: float
    """The part of `forward_per_sample` in convolutions."""

    in_products: float
    """The part of it in products of matrices."""

    not_counted: tuple[str, ...]
    """What is more than the count says, or less, in plain words; empty: all is in it."""


def count_flops(target: Any, *, inputs: Any = None, batch_size: int = BATCH_SIZE) -> ModelFlops:
    """Count what one forward pass computes, as inference runs it: Dropout costs nothing here.

    Args:
        target: A built `keras.Model`, a function of tensors, or a concrete function, whose inputs
            must then have sizes.
        inputs: What a model or function is called with, nested `tf.TensorSpec`s; by default what a
            functional or sequential model was built for. Give it where a dimension other than the
            batch is open.
        batch_size: Rows that the first dimension of every input is traced with, where it is open.

    Returns:
        The count by sample.

    Raises:
        UserError: nothing says what it is called with, or how many samples that is.
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
    )


def _of(tally: Tally, kind: Kind) -> int:
    return sum(operations for (counted, _), operations in tally.work.items() if counted == kind)


def _has_rows(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec) and bool(spec.shape.rank)


def _inputs_of(target: Any) -> Any:
    """What a model was built for; None where nothing says it."""
    inputs = getattr(target, "input", None)
    if inputs is None:
        # A Sequential model that was never called has a list of its one input alone.
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
            "a function, or a model without inputs of its own, is counted for given inputs",
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
