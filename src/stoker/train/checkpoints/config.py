"""How often checkpoints are written, and which are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stoker.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """The `train.checkpoint` section."""

    every_s: float | Literal["auto"] = "auto"
    """Seconds between two checkpoints. auto: from the measured cost, so that `max_overhead` holds,
    between 5 s and 30 min."""

    every_steps: int | None = None
    """Steps between two checkpoints; if set, `every_s` is ignored."""

    keep_last: int = 3
    """Number of the newest checkpoints to keep: if one is damaged, an older one is used."""

    keep_every_h: float | None = None
    """Keep one checkpoint of every this many hours of training permanently; null: none."""

    max_overhead: float = 0.035
    """Largest share of the training time that checkpoints may cost if `every_s` is auto."""

    def __post_init__(self) -> None:
        if self.every_s != "auto" and not self.every_s > 0:
            raise ConfigError("train.checkpoint.every_s must be above 0", got=self.every_s)
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(
                "train.checkpoint.every_steps must be at least 1", got=self.every_steps
            )
        if self.keep_last < 1:
            raise ConfigError(
                "train.checkpoint.keep_last must be at least 1",
                got=self.keep_last,
                fix="With 2 or more, there is an older one if the newest is damaged.",
            )
        if self.keep_every_h is not None and not self.keep_every_h > 0:
            raise ConfigError(
                "train.checkpoint.keep_every_h must be above 0", got=self.keep_every_h
            )
        if not 0 < self.max_overhead <= 1:
            raise ConfigError(
                "train.checkpoint.max_overhead must be above 0 and at most 1",
                got=self.max_overhead,
                fix="0.035 is 3.5 % of the training time.",
            )
