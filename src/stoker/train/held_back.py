"""Assignments that count only where a step is finite, for an update that is compiled as one program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import tensorflow as tf


@contextmanager
def written_only_where(finite: tf.Tensor, variables: Sequence[Any]) -> Iterator[None]:
    """While an update is traced: each assignment leaves a variable as it is where not `finite`.

    A condition around the whole update would make XLA copy every variable, and so would old values
    put back at its end. Chosen at each assignment, the value is a part of the loop over a variable
    that the optimizer needs anyway.

    Args:
        finite: Scalar bool.
        variables: What the update assigns to, by `assign`, `assign_add` and `assign_sub`.
    """
    for variable in variables:
        variable.assign = partial(_assign, variable, finite)
        variable.assign_add = partial(_assign_sum, variable, sign=1)
        variable.assign_sub = partial(_assign_sum, variable, sign=-1)
    try:
        yield
    finally:
        for variable in variables:
            del variable.assign, variable.assign_add, variable.assign_sub


def _assign(variable: Any, finite: tf.Tensor, value: Any, *_: Any, **options: Any) -> Any:
    before = variable.read_value()
    after = tf.where(finite, tf.cast(value, before.dtype), before)
    return type(variable).assign(variable, after, **options)


def _assign_sum(variable: Any, value: Any, *_: Any, sign: int, **options: Any) -> Any:
    before = variable.read_value()
    return variable.assign(before + sign * tf.cast(value, before.dtype), **options)
