"""The settings from which the rules are generated: service level objectives and the time scale."""

from __future__ import annotations

from dataclasses import dataclass, field

from stoker.core.errors import ConfigError
from stoker.registry.repository import checked_name

MAX_TIME_SCALE = 60
"""Maximum time scale: the shortest window, 5 minutes, is then 5 s, which covers five scrapes at intervals of 1 s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSlo:
    """An entry of `slo.models`: the objectives of one model."""

    availability: float | None = None
    """Share of requests without an error of the server, percent. null: `slo.availability`."""

    p99_ms: float | None = None
    """Time within which 99 of 100 requests are answered, milliseconds. null: `slo.p99_ms`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """The `slo` section: service level objectives of served models."""

    availability: float = 99.9
    """Share of requests without an error of the server, percent."""

    p99_ms: float = 50.0
    """Time within which 99 of 100 requests are answered, milliseconds."""

    models: dict[str, ModelSlo] = field(default_factory=dict)
    """Model -> objectives of its own."""

    def __post_init__(self) -> None:
        _require_objectives(self.availability, self.p99_ms, where="slo")
        for name, model in self.models.items():
            checked_name(name, what="the name of a model in slo.models")
            _require_objectives(
                self.availability if model.availability is None else model.availability,
                self.p99_ms if model.p99_ms is None else model.p99_ms,
                where=f"slo.models.{name}",
            )


def _require_objectives(availability: float, p99_ms: float, *, where: str) -> None:
    if not 50.0 <= availability < 100.0:
        raise ConfigError(
            f"{where}.availability must be at least 50 and below 100, in percent",
            got=availability,
            fix="E.g. 99.9: one request in a thousand may fail.",
        )
    if not 0.1 <= p99_ms <= 600_000.0:
        raise ConfigError(
            f"{where}.p99_ms must be from 0.1 to 600000, in milliseconds",
            got=p99_ms,
            fix="E.g. 50: 99 of 100 requests are answered within 50 ms.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleSettings:
    """Settings of the generated rules."""

    slo: Slo = field(default_factory=Slo)

    time_scale: float = 1.0
    """Number by which every window, `for` and `keep_firing_for` is divided, to try out alerts in seconds; 1 in
    production."""

    no_checkpoint_minutes: float = 60.0
    """Age of a run's newest checkpoint above which an alert fires, minutes."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.time_scale <= MAX_TIME_SCALE:
            raise ConfigError(
                f"the time scale must be from 1 to {MAX_TIME_SCALE}",
                got=self.time_scale,
                fix="Use 1 in production; 60 turns minutes into seconds, to try out alerts.",
            )
        if not self.no_checkpoint_minutes > 0.0:
            raise ConfigError(
                "the age of a checkpoint must be above 0 minutes", got=self.no_checkpoint_minutes
            )
