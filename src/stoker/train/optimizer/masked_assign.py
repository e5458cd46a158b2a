"""Assignments that count only if a step is finite, decided on the device without a condition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import tensorflow as tf

_WRITERS = (
    "assign",
    "assign_add",
    "assign_sub",
    "scatter_update",
    "scatter_add",
    "scatter_sub",
)
"""Methods of a variable that write to it in an update."""

_CONDITION: ContextVar[tf.Tensor | None] = ContextVar("held_back_condition", default=None)


def assign_condition() -> tf.Tensor | None:
    """The condition of the `masked_assign` being traced, a scalar bool; None outside of one.

    `masked_assign` does not affect a kernel that writes to a variable through its handle. Code
    that calls such a kernel reads the condition here, and passes arguments that change nothing.
    """
    return _CONDITION.get()


@contextmanager
def masked_assign(finite: tf.Tensor, variables: Sequence[Any]) -> Iterator[None]:
    """While an update is traced: each assignment keeps the old value of a variable if not `finite`.

    A condition around the whole update would make XLA copy every variable, and so would old values
    restored at its end; without XLA the host would wait for it. If each assignment selects the
    value, this is part of the loop over a variable that the optimizer needs anyway. Contexts may be
    nested: an assignment then counts if both conditions hold.

    Args:
        finite: Scalar bool.
        variables: The targets of the update, written by the methods `_WRITERS`.
    """
    outer = _CONDITION.get()
    holds = finite if outer is None else tf.logical_and(outer, finite)
    # A strategy with one replica passes the update the copy on its device.
    parts = [part for each in variables for part in (each, *getattr(each, "values", ()))]
    before = [{name: vars(part)[name] for name in _WRITERS if name in vars(part)} for part in parts]
    token = _CONDITION.set(holds)
    for part in parts:
        part.assign = partial(_assign, part, holds)
        part.assign_add = partial(_assign_sum, part, sign=1)
        part.assign_sub = partial(_assign_sum, part, sign=-1)
        for name in ("scatter_update", "scatter_add", "scatter_sub"):
            setattr(part, name, partial(_scatter, part, holds, name))
    try:
        yield
    finally:
        _CONDITION.reset(token)
        for part, kept in zip(reversed(parts), reversed(before), strict=True):
            for name in _WRITERS:
                vars(part).pop(name, None)
            vars(part).update(kept)


def _assign(variable: Any, finite: tf.Tensor, value: Any, *_: Any, **options: Any) -> Any:
    before = variable.read_value()
    after = tf.where(finite, tf.cast(value, before.dtype), before)
    return type(variable).assign(variable, after, **options)


def _assign_sum(variable: Any, value: Any, *_: Any, sign: int, **options: Any) -> Any:
    before = variable.read_value()
    return variable.assign(before + sign * tf.cast(value, before.dtype), **options)


def _scatter(
    variable: Any, finite: tf.Tensor, method: str, rows: Any, *_: Any, **options: Any
) -> Any:
    """Write rows of a table by a method of the variable's class, or leave them unchanged."""
    values = tf.cast(rows.values, variable.dtype)
    if method == "scatter_update":
        unchanged = tf.gather(variable.read_value(), rows.indices)
    else:
        unchanged = tf.zeros_like(values)
    masked = tf.IndexedSlices(tf.where(finite, values, unchanged), rows.indices)
    return getattr(type(variable), method)(variable, masked, **options)
