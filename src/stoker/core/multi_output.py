"""Values that a model has for each of its outputs: a label, a loss, classes, a task.

Inside Stoker they are a mapping by the output's name. A model with a single output uses the name
`ONLY`, which is never shown: settings, batches, files and metric names hold the value without a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

ONLY = ""
"""Name of the output of a model with a single output."""

Value = TypeVar("Value")


def by_output(value: Value | Mapping[str, Value]) -> dict[str, Value]:
    """Return a mapping by output; a value that is not a mapping belongs to the only output."""
    return dict(value) if isinstance(value, Mapping) else {ONLY: value}


def alone(values: Mapping[str, Value]) -> Value | dict[str, Value]:
    """Return the value of the only output without its name; for several outputs, the mapping."""
    return values[ONLY] if set(values) == {ONLY} else dict(values)


def of_output(output: str, name: str) -> str:
    """Return the name of something that belongs to an output, as Keras forms it."""
    return f"{output}_{name}" if output else name
