"""Makes assignments take effect only if a step is finite; the device decides, without a condition."""

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
"""Methods with which an update writes to a variable."""

_CONDITION: ContextVar[tf.Tensor | None] = ContextVar("held_back_condition", default=None)


def assign_condition() -> tf.Tensor | None:
    """Return the condition of the current `masked_assign`, a scalar bool; None outside of such a block.

    `masked_assign` does not affect a kernel that writes to a variable through its handle. Code that calls
    such a kernel must read the condition here, and must pass arguments that change nothing if it is False.
    """
    return _CONDITION.get()


@contextmanager
def masked_assign(finite: tf.Tensor, variables: Sequence[Any]) -> Iterator[None]:
    """In the `with` block, which traces an update, assignments take effect only if `finite` is True.

    A condition around the whole update would make XLA copy every variable, as would restoring the old
    values after it; without XLA, the host would have to wait for the condition. Here each assignment selects
    the old or the new value, as a part of the loop over the variable that the update needs anyway. Blocks
    may be nested: an assignment then takes effect if both conditions are True.

    Args:
        finite: Scalar bool.
        variables: The variables of the update, which the methods `_WRITERS` change.
    """
    outer = _CONDITION.get()
    holds = finite if outer is None else tf.logical_and(outer, finite)
    # A strategy with one replica passes the variable's copy on its device to the update.
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
    """Write rows of a variable by a method of its class if the step is finite; else leave them unchanged."""
    values = tf.cast(rows.values, variable.dtype)
    if method == "scatter_update":
        unchanged = tf.gather(variable.read_value(), rows.indices)
    else:
        unchanged = tf.zeros_like(values)
    masked = tf.IndexedSlices(tf.where(finite, values, unchanged), rows.indices)
    return getattr(type(variable), method)(variable, masked, **options)
