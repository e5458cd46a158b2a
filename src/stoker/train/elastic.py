"""The `train.elastic` section, for a training that can continue with another number of workers.

The global batch is divided into `max` slices, one for each virtual worker. Each replica runs the passes of several
virtual workers one after another, so only the order of sums depends on the number of replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.cluster.sizes import allowed_sizes
from stoker.core.errors import ConfigError, Plain

MAX_WORKERS = 1024
"""Maximum number of virtual workers: a step has as many passes, and a larger setting is probably a typo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticConfig:
    """The `train.elastic` section; with it, a training can continue with another number of workers."""

    max: int
    """Number of virtual workers, and maximum number of workers. Every global batch is divided into this many slices,
    so a run cannot continue with another value."""

    min: int = 1
    """Minimum number of workers. Allowed numbers of workers are the divisors of `max` that are at least `min`."""

    def __post_init__(self) -> None:
        if not 2 <= self.max <= MAX_WORKERS:
            raise ConfigError(
                f"train.elastic.max must be from 2 to {MAX_WORKERS:,}",
                got=self.max,
                fix="Remove train.elastic to always train with the same number of workers.",
            )
        if not 1 <= self.min <= self.max:
            raise ConfigError(
                f"train.elastic.min must be from 1 to train.elastic.max ({self.max})", got=self.min
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Allowed numbers of workers."""
        return allowed_sizes(fewest=self.min, most=self.max)


def require_size(elastic: ElasticConfig, workers: int, *, what: str = "workers") -> None:
    """Refuse a number of workers over which the virtual workers cannot be distributed evenly.

    Args:
        elastic: The setting.
        workers: Number of workers, or of replicas if a worker has several.
        what: `workers` or `replicas`.

    Raises:
        ConfigError: The number is not allowed; the error names the allowed numbers.
    """
    if workers in elastic.sizes:
        return
    sizes = ", ".join(map(str, elastic.sizes))
    raise ConfigError(
        f"an elastic training of {elastic.max} virtual workers must have {sizes} {what}: "
        f"divisors of {elastic.max} that are at least train.elastic.min ({elastic.min})",
        got=Plain(f"{workers}"),
        fix="`stoker train --workers N` sets the number.",
    )


def require_elastic_settings(conflicts: Mapping[str, bool]) -> None:
    """Refuse settings with which the result would depend on the number of workers.

    Args:
        conflicts: Setting as the user writes it -> whether it is set.

    Raises:
        ConfigError: At least one of them is set; the error names them.
    """
    found = [setting for setting, is_set in conflicts.items() if is_set]
    if found:
        raise ConfigError(
            "with train.elastic a step must not depend on the number of workers",
            got=Plain(" and ".join(found)),
            fix="Remove it, or remove train.elastic.",
        )
