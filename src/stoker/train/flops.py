"""What a model computes, counted from its traced graph; see `peak_flops` for what a device reaches.

Counted are products of matrices and convolutions: a multiplication and an addition are two
operations, padding counts as if it were data. All else (activations, normalisation, the optimizer's
update) is left out, as it is wherever achieved is compared with peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from stoker.core.errors import Plain, UserError
from stoker.train.flops_formulas import CONVOLUTIONS, PRODUCTS, UNCOUNTED
from stoker.train.flops_graph import Body, bodies_of
from stoker.train.flops_loops import loop_turns

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
    graph, library = bodies_of(traced)
    tally = _Walk(library).count(graph)
    forward = (tally.convolutions + tally.products) / samples
    return ModelFlops(
        forward_per_sample=forward,
        step_per_sample=(1 + BACKWARD) * forward,
        in_convolutions=tally.convolutions / samples,
        in_products=tally.products / samples,
        not_counted=tally.notes,
    )


def _has_rows(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec) and bool(spec.shape.rank)


def _traced(target: Any, inputs: Any, batch_size: int) -> Any:
    if hasattr(target, "structured_input_signature"):
        return target
    if inputs is None:
        inputs = getattr(target, "input", None)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tally:
    convolutions: int = 0
    products: int = 0
    notes: tuple[str, ...] = ()

    def plus(self, other: _Tally, *, times: int = 1) -> _Tally:
        return _Tally(
            convolutions=self.convolutions + times * other.convolutions,
            products=self.products + times * other.products,
            notes=tuple(dict.fromkeys((*self.notes, *other.notes))),
        )

    @property
    def total(self) -> int:
        return self.convolutions + self.products


class _Walk:
    """Counts bodies, each function once."""

    def __init__(self, library: dict[str, Body]) -> None:
        self._library = library
        self._counted: dict[str, _Tally] = {}

    def count(self, body: Body) -> _Tally:
        tally = _Tally()
        for node in body.needed():
            tally = tally.plus(self._node(body, node))
        return tally

    def _function(self, name: str) -> _Tally:
        if name not in self._counted:
            body = self._library.get(name)
            missing = _Tally(notes=(f"{name}: a function whose body is not in the graph",))
            self._counted[name] = self.count(body) if body is not None else missing
        return self._counted[name]

    def _node(self, body: Body, node: Any) -> _Tally:
        if node.op in ("While", "StatelessWhile"):
            return self._loop(body, node)
        called = [self._function(name) for name in _called(node)]
        if called:
            return self._branches(node, called)
        if node.op in UNCOUNTED:
            return _Tally(notes=(f"{node.name}: {node.op} is not counted",))
        formula = (CONVOLUTIONS | PRODUCTS).get(node.op)
        if formula is None:
            return _Tally()
        operations = formula(body, node)
        if operations is None:
            return _Tally(notes=(f"{node.name}: {node.op} of a size that is not known",))
        if node.op in CONVOLUTIONS:
            return _Tally(convolutions=operations)
        return _Tally(products=operations)

    def _branches(self, node: Any, called: list[_Tally]) -> _Tally:
        most = max(called, key=lambda tally: tally.total)
        if len({tally.total for tally in called}) > 1:
            note = f"{node.name}: of the branches of {node.op} the largest is counted"
            most = _Tally(notes=(note,)).plus(most)
        return most

    def _loop(self, body: Body, node: Any) -> _Tally:
        turn = self._function(node.attr["body"].func.name)
        if not turn.total:
            return turn
        turns = loop_turns(body, node, library=self._library)
        notes: tuple[str, ...] = ()
        if turns.number is None:
            notes = (f"{node.name}: a loop of unknown length, counted as one turn",)
        elif turns.at_most:
            notes = (f"{node.name}: a loop of at most {turns.number} turns, counted as that",)
        once = 1 if turns.number is None else turns.number
        return _Tally(notes=notes).plus(turn, times=once)


def _called(node: Any) -> Iterator[str]:
    # To look for an attribute by its key would write it into the definition.
    for role in ("f", "then_branch", "else_branch"):
        if role in node.attr and node.attr[role].HasField("func"):
            yield node.attr[role].func.name
    if "branches" in node.attr:
        for branch in node.attr["branches"].list.func:
            yield branch.name
