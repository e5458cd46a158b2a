"""Checks for unnoticed loss of speed; each finding says what is slow, where, and what to do.

The checks of graphs and placement were tested on graphs and on logical CPU devices, but not on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from stoker.core.errors import Finding
from stoker.train.health.step_operations import named, step_operations

RETRACES = 3
"""Usual number of traces of a step: for full batches, for the last batch of an epoch, and a first trace with
guessed shapes."""

_HOST_CALLS = ("PyFunc", "PyFuncStateless", "EagerPyFunc", "Print", "PrintV2")
"""Operations that make the device wait for Python or for the terminal."""

_COMPUTES = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv3D", "Einsum")
"""Operations that do most of a step's work: if XLA compiles none of them, it is useless."""


def check_idle_devices(variables: Sequence[Any], accelerators: Sequence[str]) -> Finding | None:
    """Warn if accelerators are visible on which no variable is placed.

    Args:
        variables: The model's Keras variables.
        accelerators: Names of the logical devices, e.g. `/device:GPU:0`.
    """
    if len(accelerators) < 2:
        return None
    homes = {_short(device) for variable in variables for device in _devices(variable.value)}
    idle = [name for name in map(_short, accelerators) if name not in homes]
    if not idle:
        return None
    return Finding.warning(
        "idle_devices",
        f"{len(accelerators)} accelerators are visible, and no variable is placed on {named(idle)}",
        fix="Set train.strategy: mirrored to use all of them, or set train.memory.visible_devices to "
        "those that are used.",
    )


def check_scope(variables: Iterable[Any], strategy: tf.distribute.Strategy) -> Finding | None:
    """Report variables that were created outside the strategy's scope, on one device.

    Args:
        variables: Keras variables of model and optimizer.
        strategy: The strategy that trains the model.
    """
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        return None
    outside = [
        variable.path
        for variable in variables
        if not strategy.extended.variable_created_in_scope(variable.value)
    ]
    if not outside:
        return None
    return Finding.error(
        "outside_scope",
        f"variables were created outside the strategy's scope: {named(outside)}",
        fix="Create model and optimizer inside build, which is called in the scope, and not when "
        "the module is imported.",
    )


def check_retraces(function: Any, *, most: int = RETRACES) -> Finding | None:
    """Warn if the step is traced again and again: each trace takes seconds.

    Args:
        function: The `tf.function` that runs steps.
        most: Maximum number of traces that is usual.
    """
    traces = function.experimental_get_tracing_count()
    if traces <= most:
        return None
    return Finding.warning(
        "retraces",
        f"the step was traced {traces} times; at most {most} times is usual",
        fix="Give every batch the same shapes and dtypes, and do not pass Python numbers that change to "
        "the model's call.",
    )


def check_host_sync(step: Any) -> Finding | None:
    """Warn if the step waits for Python or prints.

    Args:
        step: The step's concrete function.
    """
    found = [
        f"{operation.kind} in {operation.scope or 'the step itself'}"
        for operation in step_operations(step)
        if operation.kind in _HOST_CALLS and not operation.is_own
    ]
    if not found:
        return None
    return Finding.warning(
        "host_sync",
        f"the step waits for the host: {named(found)}",
        fix="Remove tf.print, tf.py_function and tf.numpy_function from model and loss.",
    )


def check_xla(step: Any) -> Finding | None:
    """Check that XLA compiles the step; call this only if XLA is used.

    Args:
        step: The step's concrete function.

    Returns:
        An error if XLA compiles none of the step's products and convolutions; a warning if it compiles
        only some of them; None if it compiles all, or if there are none.
    """
    work = [operation for operation in step_operations(step) if operation.kind in _COMPUTES]
    left_out = [operation for operation in work if not operation.compiled]
    if not left_out:
        return None
    texts = [
        operation.scope or operation.kind
        for operation in step_operations(step)
        if any(tensor.dtype == tf.string for tensor in operation.operation.inputs)
    ]
    why = f"; XLA does not support strings, which are in {named(texts)}" if texts else ""
    places = named([operation.scope or operation.kind for operation in left_out])
    count = len(work) - len(left_out)
    return Finding(
        kind="xla_unused",
        severity="warning" if count else "error",
        message=f"XLA is on, but it compiles {count or 'none'} of {len(work)} products and "
        f"convolutions; not compiled: {places}{why}",
        fix="Set train.xla: false, or remove what XLA cannot compile (strings, Python "
        "functions, run_eagerly).",
    )


def check_keras_distribution() -> Finding | None:
    """Report `keras.distribution`, which has no effect on TensorFlow."""
    if keras.distribution.distribution() is None:
        return None
    return Finding.error(
        "keras_distribution",
        "keras.distribution is set, which has no effect with TensorFlow",
        fix="Remove keras.distribution.set_distribution, and set train.strategy.",
    )


def _devices(value: Any) -> list[str]:
    parts = getattr(value, "values", None)
    return [part.device for part in parts] if parts is not None else [value.device]


def _short(device: str) -> str:
    return device.rpartition("device:")[2]
