"""How training runs, and the fixed rules behind each `auto`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stoker.cluster.devices import Devices
from stoker.core.errors import ConfigError
from stoker.data.feed.augment import AugmentConfig

Auto = Literal["auto"]
Precision = Literal["float32", "mixed_bfloat16", "mixed_float16"]

MOST = 10_000_000
"""Most epochs, rows a batch or steps a call: beyond it a setting is a slip of the keyboard."""

BFLOAT16_CAPABILITY = (8, 0)
"""First NVIDIA compute capability whose tensor cores take bfloat16 (Ampere)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The `train` section."""

    epochs: int = 10
    """Passes over the training split."""

    batch_size: int | Auto = "auto"
    """Samples a step. auto: the power of two next below rows / 64, between 16 and 512."""

    steps_per_call: int | Auto = "auto"
    """Steps run by one Python call. auto: an epoch's steps, at most 50."""

    precision: Precision | Auto = "auto"
    """Keras dtype policy. auto: mixed_bfloat16 on GPUs from Ampere on, else float32."""

    xla: bool | Auto = "auto"
    """Compile forward and backward pass by XLA. auto: on a GPU, unless a feature is a string."""

    strategy: Literal["one_device"] | Auto = "auto"
    """How the step is spread over devices. auto: one device."""

    deterministic: bool = False
    """Same seed, same data: bit-identical weights, at some cost of speed."""

    seed: int = 0
    """Seed of weights, dropout and the order of samples."""

    augment: AugmentConfig | None = None
    """What is done to training images; validation, evaluation and serving never see it."""

    monitor: str = "val_loss"
    """The metric that names the best epoch: `val_loss` or `val_` + one of the model's metrics."""

    monitor_mode: Literal["min", "max", "auto"] = "auto"
    """Whether less or more of it is better. auto: less for losses and errors, else more."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "steps_per_call"):
            value = getattr(self, name)
            if value != "auto" and value < 1:
                raise ConfigError(f"train.{name} must be at least 1", got=value)
            if value != "auto" and value > MOST:
                raise ConfigError(f"train.{name} must be at most {MOST:,}", got=value)
        if not 0 <= self.seed < 2**31:
            raise ConfigError("train.seed must be from 0 to 2**31 - 1", got=self.seed)
        if not self.monitor.startswith("val_"):
            raise ConfigError(
                "train.monitor must begin with val_", got=self.monitor, fix="E.g. val_loss."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedTraining:
    """What every `auto` became on this machine; written to the run and used again on resume."""

    batch_size: int
    steps_per_call: int
    precision: Precision
    xla: bool
    strategy: Literal["one_device"]


def resolve(
    config: TrainConfig, *, devices: Devices, rows: int, string_features: bool
) -> ResolvedTraining:
    """Apply the fixed rules of each `auto`; nothing is measured.

    Args:
        config: The user's section.
        devices: What this machine has.
        rows: Samples in the training split.
        string_features: Whether a feature that the model takes is a string.

    Raises:
        ConfigError: XLA was asked for by name, and a feature is a string.
    """
    if config.xla is True and string_features:
        raise ConfigError(
            "train.xla: true needs numeric features only, XLA has no strings",
            got=True,
            fix="Turn strings into ids in preprocessing_fn, or set train.xla: auto.",
        )
    batch_size = config.batch_size if config.batch_size != "auto" else _auto_batch_size(rows)
    steps = -(-rows // batch_size)
    gpu = bool(devices.gpus)
    return ResolvedTraining(
        batch_size=batch_size,
        steps_per_call=min(config.steps_per_call, steps)
        if config.steps_per_call != "auto"
        else min(steps, 50),
        precision=config.precision if config.precision != "auto" else _auto_precision(devices),
        xla=config.xla if config.xla != "auto" else gpu and not string_features,
        strategy="one_device",
    )


def _auto_batch_size(rows: int) -> int:
    return min(512, max(16, 1 << max(0, (rows // 64).bit_length() - 1)))


def _auto_precision(devices: Devices) -> Precision:
    capable = [gpu.compute_capability >= BFLOAT16_CAPABILITY for gpu in devices.gpus]
    return "mixed_bfloat16" if capable and all(capable) else "float32"
