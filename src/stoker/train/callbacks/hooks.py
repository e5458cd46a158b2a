"""The step hooks of callbacks, and their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import keras
import numpy as np

Callback: TypeAlias = keras.callbacks.Callback

STEP_HOOKS = {
    "on_train_batch_begin": ("on_train_batch_begin", "on_batch_begin"),
    "on_train_batch_end": ("on_train_batch_end", "on_batch_end"),
    "on_test_batch_begin": ("on_test_batch_begin",),
    "on_test_batch_end": ("on_test_batch_end",),
}
"""Hook -> methods that implement it: Keras's `on_train_batch_*` calls `on_batch_*`."""


def overrides_hook(callback: Callback, hook: str) -> bool:
    """Return whether a callback overrides a method for one of `STEP_HOOKS`."""
    # LambdaCallback sets its methods on the instance.
    found = {method: getattr(callback, method) for method in STEP_HOOKS[hook]}
    return any(
        getattr(own, "__func__", own) is not getattr(keras.callbacks.Callback, method)
        for method, own in found.items()
    )


def needs_every_step(callback: Callback) -> bool:
    """Return whether a callback with step hooks needs each step, not only each call."""
    if type(callback) is keras.callbacks.ModelCheckpoint:
        return bool(callback.save_freq != "epoch")
    if type(callback) is keras.callbacks.TensorBoard:
        return bool(callback.update_freq != "epoch")
    # A loss that is not finite ends the call, and stays in the mean of the epoch.
    return type(callback) not in (keras.callbacks.TerminateOnNaN, keras.callbacks.ProgbarLogger)


def plain_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Convert logs for callbacks: flat, sorted by name, every scalar a Python float."""
    plain: dict[str, Any] = {}
    for name, value in sorted(logs.items()):
        if isinstance(value, Mapping):
            plain |= plain_logs(value)
        else:
            plain[name] = float(value) if np.ndim(value) == 0 else value
    return plain
