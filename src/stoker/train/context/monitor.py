"""Selects the best epoch by the monitored metric."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import keras
import numpy as np

from stoker.core.config import nearest
from stoker.core.errors import ConfigError, Finding, Plain, UserError
from stoker.core.multi_output import of_output
from stoker.train.config import TrainConfig
from stoker.train.context.position import Position
from stoker.train.model.keras_model import overrides


def require_monitored(monitor: str, names: Iterable[str]) -> None:
    """Check that the monitored metric exists.

    Raises:
        ConfigError: The model has no such metric; the error suggests the most similar name.
    """
    known = [name for name in names if name.startswith("val_")]
    if monitor not in known:
        raise ConfigError(
            "train.monitor must be a metric of the compiled model",
            got=monitor,
            fix=nearest(monitor, known),
        )


def is_better(
    metrics: Mapping[str, float], position: Position, *, epoch: int, config: TrainConfig
) -> bool:
    """Return whether this epoch is the best one so far by the monitored metric."""
    monitor = config.monitor
    require_monitored(monitor, metrics)
    if not math.isfinite(metrics[monitor]):
        raise UserError(
            f"{monitor} of epoch {epoch} must be a finite number",
            got=Plain(str(metrics[monitor])),
            fix="Look for NaN in the features of the eval split (`stoker analyze`).",
        )
    if not position.best_epoch:
        return True
    sign = 1.0 if better_mode(monitor, config.monitor_mode) == "max" else -1.0
    return sign * metrics[monitor] > sign * position.best_metrics[monitor]


def validation_class_weights(model: keras.Model, config: TrainConfig) -> Mapping[int, float] | None:
    """Return the class weights for validation: the same as in training; None with a user's `test_step`.

    As in `fit`, a user-defined `test_step` gets only weights that are in the data, because it may accept
    only features and labels.
    """
    return None if "test_step" in overrides(model) else config.class_weight


def check_unweighted_monitor(model: keras.Model, config: TrainConfig) -> Finding | None:
    """Return a warning if the best epoch is selected by a loss that ignores the class weights."""
    unweighted = config.class_weight and validation_class_weights(model, config) is None
    if not unweighted or config.monitor != "val_loss":
        return None
    return Finding.warning(
        "unweighted_choice",
        f"train.class_weight applies to training, but {type(model).__name__}.test_step computes "
        "val_loss, the monitored metric, without it; at the best epoch, rare classes may not have been "
        "learned yet",
        fix="Set train.monitor to a metric of the rare classes (val_auc, val_recall), or weight "
        "the loss inside train_step and test_step and remove train.class_weight.",
    )


_LESS_IS_BETTER = ("loss", "error", "mae", "mse", "rmse", "crossentropy", "divergence")
"""If the name of a metric contains one of these words, lower is better."""


def better_mode(monitor: str, mode: Literal["min", "max", "auto"]) -> Literal["min", "max"]:
    """Return whether a metric should be minimized or maximized; `auto` decides by its name."""
    if mode != "auto":
        return mode
    return "min" if any(part in monitor.lower() for part in _LESS_IS_BETTER) else "max"


def resolve_monitor_mode(config: TrainConfig, outputs: Collection[str]) -> TrainConfig:
    """Return the settings with `min` or `max` in place of `monitor_mode: auto`.

    Args:
        config: The user's settings.
        outputs: Names of the model's outputs. They are removed from the metric's name before it decides,
            because an output that is called `loss` also has an accuracy.
    """
    metric = config.monitor.removeprefix("val_")
    begins = [of_output(output, "") for output in outputs if output]
    owner = max((begin for begin in begins if metric.startswith(begin)), key=len, default="")
    mode = better_mode(metric.removeprefix(owner), config.monitor_mode)
    return dataclasses.replace(config, monitor_mode=mode)


def finite_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are finite numbers."""
    return {name: float(v) for name, v in metrics.items() if np.ndim(v) == 0 and math.isfinite(v)}
