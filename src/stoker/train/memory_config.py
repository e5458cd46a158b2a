"""The section `train.memory`."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """The `train.memory` section; without a GPU it has no effect."""

    growth: bool = True
    """Take GPU memory when needed, instead of all of it at the start."""

    limit_mb: int | None = None
    """Most memory that this process takes of each GPU, MiB; it is taken at the start, so `growth`
    has no effect. null: all of it."""

    visible_devices: tuple[int, ...] | None = None
    """GPUs that this process may use, by number. null: all."""

    def __post_init__(self) -> None:
        if self.limit_mb is not None and self.limit_mb < 1:
            raise ConfigError("train.memory.limit_mb must be at least 1", got=self.limit_mb)
        if self.visible_devices is None:
            return
        if len(set(self.visible_devices)) != len(self.visible_devices):
            raise ConfigError(
                "train.memory.visible_devices must name a GPU once", got=list(self.visible_devices)
            )
