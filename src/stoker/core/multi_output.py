"""What a model has once for each of its outputs: a label, a loss, classes, a task.

Inside it is a mapping by the output's name. The output of a model that has one is `ONLY` there, and
a name that nobody sees: in settings, batches, files and names of metrics its value stands alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

ONLY = ""
"""The output of a model that has one."""

Value = TypeVar("Value")


def by_output(value: Value | Mapping[str, Value]) -> dict[str, Value]:
    """The mapping that is meant where a value that stands alone is the only output's."""
    return dict(value) if isinstance(value, Mapping) else {ONLY: value}


def alone(values: Mapping[str, Value]) -> Value | dict[str, Value]:
    """The only output's value without its name; of several outputs the mapping."""
    return values[ONLY] if set(values) == {ONLY} else dict(values)


def of_output(output: str, name: str) -> str:
    """A name of something that belongs to an output, as Keras makes them."""
    return f"{output}_{name}" if output else name
