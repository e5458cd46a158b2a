"""Adapts `auto` settings to the user's callbacks and model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import keras

from stoker.core.multi_output import ONLY
from stoker.train.callbacks.hooks import STEP_HOOKS, needs_every_step, overrides_hook
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.model.keras_model import output_names, require_labels
from stoker.train.step.custom_train_step import has_custom_train_step


def apply_user_hooks(
    resolved: ResolvedTraining,
    config: TrainConfig,
    *,
    model: keras.Model,
    callbacks: Sequence[keras.callbacks.Callback],
) -> ResolvedTraining:
    """Adapt the `auto` settings to the user's model and callbacks.

    Args:
        resolved: Settings by the rules of `auto`, which know neither model nor callbacks.
        config: The user's section.
        model: The compiled model.
        callbacks: The user's callbacks.
    """
    listen_for_preemption = [c for c in callbacks if needs_every_train_step(c)]
    if config.steps_per_call == "auto" and listen_for_preemption:
        name = type(listen_for_preemption[0]).__name__
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
    """Reject a model that could not be trained, or not be evaluated after training.

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
