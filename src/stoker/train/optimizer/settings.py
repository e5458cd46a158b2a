"""Applies settings to the compiled optimizer: loss scale, learning rate, clipping, moving average."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from stoker.core.errors import ConfigError, Plain
from stoker.internals.keras_internals import learning_rate_of
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.optimizer.ema import WeightAverage
from stoker.train.optimizer.loss_scaling import prepare_loss_scale


def prepare_optimizer(
    model: keras.Model, config: TrainConfig, resolved: ResolvedTraining
) -> WeightAverage | None:
    """Set loss scale, learning rate, clipping and moving average; call this in the strategy's scope.

    If the user's optimizer has `use_ema=True`, Stoker keeps this average, too, because Keras's own average
    fails under MirroredStrategy.

    Returns:
        The moving average; None if the settings request none.

    Raises:
        ConfigError: Two settings exclude each other.
    """
    prepare_loss_scale(model, config)
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    _refuse_accumulation(inner)
    _clip(inner, config)
    if resolved.lr_factor != 1.0:
        _scale(inner, resolved.lr_factor)
    momentum = _momentum(inner, config)
    if momentum is None:
        return None
    return WeightAverage(model.trainable_variables, momentum=momentum)


def _refuse_accumulation(optimizer: Any) -> None:
    if optimizer.gradient_accumulation_steps:
        raise ConfigError(
            "gradients must be accumulated with train.accumulate",
            got=Plain(f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}"),
            fix="Set train.accumulate and remove the argument from the optimizer: Keras's own "
            "accumulation fails under MirroredStrategy.",
        )


def _clip(optimizer: Any, config: TrainConfig) -> None:
    if config.clip_norm is None:
        return
    for name in ("clipnorm", "clipvalue", "global_clipnorm"):
        if getattr(optimizer, name) is not None:
            raise ConfigError(
                "gradients must be clipped in only one way",
                got=Plain(f"train.clip_norm and the optimizer's {name}"),
                fix="Remove one of them.",
            )
    optimizer.global_clipnorm = config.clip_norm


@keras.saving.register_keras_serializable(package="stoker")
class _Scaled(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]  # Keras has no types
    """A learning rate schedule whose result is multiplied by a factor."""

    def __init__(self, schedule: Any, factor: float) -> None:
        self.schedule, self.factor = schedule, factor

    def __call__(self, step: Any) -> Any:
        """Return the learning rate of a step."""
        return self.schedule(step) * self.factor

    def get_config(self) -> dict[str, Any]:
        """Return the configuration, as Keras requires of a schedule."""
        return {"schedule": self.schedule, "factor": self.factor}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _Scaled:
        """Create the schedule from its configuration, e.g. for a model that a callback saved."""
        schedule = keras.saving.deserialize_keras_object(config["schedule"])
        return cls(schedule, config["factor"])


def _scale(optimizer: Any, factor: float) -> None:
    rate = learning_rate_of(optimizer)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        optimizer.learning_rate = _Scaled(rate, factor)
    elif callable(rate):
        optimizer.learning_rate = lambda: rate() * factor
    else:
        optimizer.learning_rate = float(tf.convert_to_tensor(rate.value).numpy()) * factor


def _momentum(optimizer: Any, config: TrainConfig) -> float | None:
    if not optimizer.use_ema:
        return config.ema
    if config.ema is not None:
        raise ConfigError(
            "only one moving average of the weights can be computed",
            got=Plain("train.ema and the optimizer's use_ema"),
            fix="Remove one of them.",
        )
    if optimizer.ema_overwrite_frequency:
        raise ConfigError(
            "the moving average must not overwrite the weights while they are trained",
            got=Plain(f"ema_overwrite_frequency={optimizer.ema_overwrite_frequency}"),
            fix="Remove this argument: Stoker validates and exports the average.",
        )
    optimizer.use_ema = False
    return float(optimizer.ema_momentum)
