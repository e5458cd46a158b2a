"""What rules promise and how fast they look: service levels and the scale of time."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.core.errors import ConfigError

MOST_TIME_SCALE = 60
"""Highest scale of time: the shortest window, 5 minutes, is then 5 s, five scrapes of one second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """The `slo` section: service level objectives of a served model."""

    availability: float = 99.9
    """Share of requests without an error of the server, percent."""

    p99_ms: float = 50.0
    """Time within which 99 of 100 requests are answered, milliseconds."""

    def __post_init__(self) -> None:
        if not 50.0 <= self.availability < 100.0:
            raise ConfigError(
                "slo.availability must be at least 50 and below 100, in percent",
                got=self.availability,
                fix="E.g. 99.9: one request in a thousand may fail.",
            )
        if not 0.1 <= self.p99_ms <= 600_000.0:
            raise ConfigError(
                "slo.p99_ms must be from 0.1 to 600000, in milliseconds",
                got=self.p99_ms,
                fix="E.g. 50: 99 of 100 requests are answered within 50 ms.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleSettings:
    """What the generated rules depend on."""

    slo: Slo = field(default_factory=Slo)

    time_scale: float = 1.0
    """Every window, `for` and `keep_firing_for` is divided by this: to try alerts in seconds, not for production."""

    no_checkpoint_minutes: float = 60.0
    """Age of a run's newest checkpoint that is an alert, minutes."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.time_scale <= MOST_TIME_SCALE:
            raise ConfigError(
                f"the time scale must be from 1 to {MOST_TIME_SCALE}",
                got=self.time_scale,
                fix="1 is for production; 60 makes minutes seconds, to see an alert fire.",
            )
        if not self.no_checkpoint_minutes > 0.0:
            raise ConfigError(
                "the age of a checkpoint must be above 0 minutes", got=self.no_checkpoint_minutes
            )
