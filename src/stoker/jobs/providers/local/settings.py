"""Settings of a target that is this machine."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.core.errors import ConfigError

LONGEST_HANG_S = 7 * 86400
"""Maximum of `hang_s`; a longer time is certainly a typo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSettings:
    """Settings of a target with `provider: local`."""

    max_restarts: int = 3
    """Maximum number of restarts of all workers after a worker has failed. An error in settings, code or data causes
    no restart."""

    grace_s: float = 30.0
    """Maximum time for workers to save and end, seconds; then they are killed."""

    hang_s: float | None = None
    """Maximum time without a new line in a worker's log or in the files of the run, seconds; then all workers are
    ended and restarted, as after a failure. None: no limit."""

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigError("max_restarts must be at least 0", got=self.max_restarts)
        if self.hang_s is not None and not 1 <= self.hang_s <= LONGEST_HANG_S:
            raise ConfigError(f"hang_s must be from 1 to {LONGEST_HANG_S} seconds", got=self.hang_s)
        if not 1 <= self.grace_s <= 3600:
            raise ConfigError("grace_s must be from 1 to 3600 seconds", got=self.grace_s)
