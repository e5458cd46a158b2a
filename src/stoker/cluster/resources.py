"""The `resources` section: what a run requests from other machines."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from stoker.core.errors import ConfigError

_ACCELERATORS = re.compile(r"[A-Za-z][A-Za-z0-9-]*(:[1-9][0-9]*)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """The `resources` section. A run on this machine uses what the machine has, and logs that."""

    accelerators: str | None = None
    """Type and number of accelerators per machine, e.g. `H100:4`; none by default."""

    nodes: int = 1
    """Number of machines."""

    spot: bool = False
    """Accept machines that the provider may take back (spot instances)."""

    budget_usd: float | None = None
    """Maximum cost of the run, US dollars."""

    usd_per_hour: float | None = None
    """Price of one machine per hour, US dollars, from which the cost of an epoch is computed. For a run
    on the local machine, set the price of the local machine."""

    def __post_init__(self) -> None:
        if self.accelerators is not None and not _ACCELERATORS.fullmatch(self.accelerators):
            raise ConfigError(
                "resources.accelerators must be KIND or KIND:NUMBER",
                got=self.accelerators,
                fix='E.g. "H100:4".',
            )
        if self.nodes < 1:
            raise ConfigError("resources.nodes must be at least 1", got=self.nodes)
        if self.budget_usd is not None and not self.budget_usd > 0:
            raise ConfigError("resources.budget_usd must be above 0", got=self.budget_usd)
        if self.usd_per_hour is not None and not 0 <= self.usd_per_hour < math.inf:
            raise ConfigError(
                "resources.usd_per_hour must be a price of 0 or more",
                got=self.usd_per_hour,
                fix="Leave it out if the price is not known.",
            )
