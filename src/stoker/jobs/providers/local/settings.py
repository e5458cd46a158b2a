"""Settings of a target that is this machine."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSettings:
    """A target with `provider: local`."""

    max_restarts: int = 3
    """How often all workers start again after one has failed. An error in settings, code or data causes no restart."""

    grace_s: float = 30.0
    """Longest time that workers may take to save and end, seconds; then they are killed."""

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigError("max_restarts must be at least 0", got=self.max_restarts)
        if not 1 <= self.grace_s <= 3600:
            raise ConfigError("grace_s must be from 1 to 3600 seconds", got=self.grace_s)
