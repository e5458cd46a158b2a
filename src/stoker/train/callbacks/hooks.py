"""Finds the step hooks of callbacks, and adapts settings to the user's callbacks and model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import keras
import numpy as np

from stoker.core.multi_output import ONLY
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.model.keras_model import output_names, require_labels
from stoker.train.step.custom_train_step import has_custom_train_step

Callback: TypeAlias = keras.callbacks.Callback

STEP_HOOKS = {
    "on_train_batch_begin": ("on_train_batch_begin", "on_batch_begin"),
    "on_train_batch_end": ("on_train_batch_end", "on_batch_end"),
    "on_test_batch_begin": ("on_test_batch_begin",),
    "on_test_batch_end": ("on_test_batch_end",),
}
"""Hook -> methods that implement it: Keras's `on_train_batch_*` calls `on_batch_*`."""


def overrides_hook(callback: Callback, hook: str) -> bool:
    """Return whether a callback overrides a method that implements this hook, one of `STEP_HOOKS`."""
    # LambdaCallback sets its methods on the instance, not on the class.
    found = {method: getattr(callback, method) for method in STEP_HOOKS[hook]}
    return any(
        getattr(own, "__func__", own) is not getattr(keras.callbacks.Callback, method)
        for method, own in found.items()
    )


def needs_every_step(callback: Callback) -> bool:
    """Return whether a callback must be called for each step, not only for each call of several steps."""
    if type(callback) is keras.callbacks.ModelCheckpoint:
        return bool(callback.save_freq != "epoch")
    if type(callback) is keras.callbacks.TensorBoard:
        return bool(callback.update_freq != "epoch")
    # TerminateOnNaN can be called once per call: a loss that is not finite ends the call, and the mean loss
    # of the epoch stays not finite.
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


def apply_user_hooks(
    resolved: ResolvedTraining,
    config: TrainConfig,
    *,
    model: keras.Model,
    callbacks: Sequence[keras.callbacks.Callback],
) -> ResolvedTraining:
    """Adapt the `auto` settings to the user's model and callbacks.

    Args:
        resolved: Settings from the rules of `auto`, which do not depend on the model or the callbacks.
        config: The user's section.
        model: The compiled model.
        callbacks: The user's callbacks.
    """
    per_step = [c for c in callbacks if needs_every_train_step(c)]
    if config.steps_per_call == "auto" and per_step:
        name = type(per_step[0]).__name__
        why = resolved.why | {"steps_per_call": f"{name} has a hook for batches"}
        resolved = replace(resolved, steps_per_call=1, why=why)
    if (
        config.xla == "auto"
        and (resolved.xla or resolved.xla_trial)
        and has_custom_train_step(model)
    ):
        why = resolved.why | {"xla": f"{type(model).__name__} has a train_step of its own"}
        resolved = replace(resolved, xla=False, xla_trial=False, why=why)
    return resolved


def require_label_of_each_output(model: keras.Model, labels: Collection[str]) -> None:
    """Reject a model that could not be trained, or could not be evaluated after training.

    Args:
        model: The compiled model; outputs of a model that is not functional are not known yet.
        labels: The outputs that have a label; `ONLY` for a label without a name.

    Raises:
        ConfigError: An output has no label, or a label has no output.
    """
    names = output_names(model)
    if names and (len(names) > 1 or set(labels) != {ONLY}):
        require_labels(labels, names)


def needs_every_train_step(callback: keras.callbacks.Callback) -> bool:
    """Return whether a user's callback must be called for each training step."""
    hooks = [hook for hook in STEP_HOOKS if hook.startswith("on_train")]
    return any(overrides_hook(callback, hook) for hook in hooks) and needs_every_step(callback)
