"""The devices on which variables are placed and operations run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from stoker.train.health.placement import collected_placements


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlacement:
    """Variables and operations on one device."""

    device: str
    """Its short name, e.g. `GPU:0`."""

    variables: int = 0
    """Number of variables."""

    variables_bytes: int = 0
    """Their size."""

    operations: int = 0
    """Operations of the compiled step."""

    kinds: tuple[str, ...] = ()
    """Kinds of operations, the most frequent first."""


def traced_operations(run: Callable[[], Any]) -> dict[str, Counter[str]]:
    """Call a function that compiles something, and return the placement of its operations.

    Args:
        run: It must trace and compile: if everything is compiled already, nothing is seen.

    Returns:
        Device -> how often each kind of operation runs there, after TensorFlow's own optimization.
        What XLA compiles is one operation.
    """
    found: dict[str, Counter[str]] = {}
    with collected_placements() as nodes:
        run()
    for node in nodes:
        if node.device and node.op not in ("_Arg", "_Retval", "NoOp"):
            found.setdefault(_short(node.device), Counter())[node.op] += 1
    return found


def placements(
    variables: Iterable[Any], operations: dict[str, Counter[str]], *, shown: int = 6
) -> list[DevicePlacement]:
    """Return one entry per device that holds a variable or runs an operation.

    Args:
        variables: Keras variables; one on several replicas counts on each.
        operations: From `traced_operations`.
        shown: Number of kinds of operations to name.
    """
    held: dict[str, list[int]] = {}
    for variable in variables:
        size = math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
        for part in getattr(variable.value, "values", [variable.value]):
            held.setdefault(_short(part.device), []).append(size)
    return [
        DevicePlacement(
            device=device,
            variables=len(held.get(device, [])),
            variables_bytes=sum(held.get(device, [])),
            operations=sum(operations.get(device, Counter()).values()),
            kinds=tuple(kind for kind, _ in operations.get(device, Counter()).most_common(shown)),
        )
        for device in sorted({*held, *operations})
    ]


def _short(device: str) -> str:
    return device.rpartition("device:")[2] or device
