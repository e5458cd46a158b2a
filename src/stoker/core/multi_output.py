"""Values that a model has for each of its outputs: a label, a loss, classes, a task.

Stoker's code holds them in a mapping: name of the output -> value. If a model has a single output, the key is `ONLY`.
Users never see this key: settings, batches, files and metric names then hold the value itself.
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
    """Return only the value if the model has one output; for several outputs, return the mapping."""
    return values[ONLY] if set(values) == {ONLY} else dict(values)


def of_output(output: str, name: str) -> str:
    """Return a name with the output's name as its prefix, in Keras's form; the only output has no prefix."""
    return f"{output}_{name}" if output else name
