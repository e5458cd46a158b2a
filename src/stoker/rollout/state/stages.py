"""The stages of a rollout: how much of the traffic a candidate takes, and for how long."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from stoker.core.durations import DURATION, seconds_of
from stoker.core.errors import ConfigError

_NUMBER = r"\d+(?:\.\d+)?"
_STAGE = re.compile(
    rf"(?:(?P<share>{_NUMBER})%?|(?P<shadow>shadow)(?:=(?P<copied>{_NUMBER})%?)?"
    rf"|header=(?P<header>[A-Za-z0-9!#$&'*+.^_`|~-]+))(?::(?P<time>{DURATION}))?",
    re.ASCII,
)
SMALLEST_SHARE = 1e-4
"""Smallest share of the traffic: 26 of the 262,144 buckets of keys. With a smaller share, a version might get no
bucket."""

_FIX = (
    "Write percentages that rise to 100, such as 1,10:20m,50,100; before the first one shadow, shadow=PERCENT or "
    "header=NAME may stand, and pause anywhere before 100."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage of a rollout."""

    share: float = 0.0
    """Share of the traffic that the candidate takes, in [0, 1]."""

    header: str = ""
    """Requests that have this header or metadata key, with any value, go to the candidate; empty: no header."""

    shadow: float = 0.0
    """Share of the requests that are copied to the candidate, in [0, 1]; its answers are only compared."""

    waits: bool = False
    """Whether the stage lasts until an operator ends it (`stoker rollout resume`)."""

    time_s: float | None = None
    """Minimum time of the stage, seconds; None: the rollout's `step_time_s`."""

    def __str__(self) -> str:
        """The stage as the user writes it, without its time."""
        if self.waits:
            return "pause"
        if self.shadow:
            return f"shadow of {self.shadow * 100:g} %"
        return f"header={self.header}" if self.header else f"{self.share * 100:g} %"


def parse_stages(text: str) -> tuple[Stage, ...]:
    """Parse stages such as `shadow:10m,header=x-canary,1,10:20m,pause,50,100`.

    Raises:
        ConfigError: an item has no valid form, or the percentages do not rise to 100.
    """
    stages: list[Stage] = []
    for item in text.replace(" ", "").split(","):
        share = stages[-1].share if stages else 0.0
        found = _STAGE.fullmatch(item)
        if item == "pause":
            stages.append(Stage(share=share, waits=True))
        elif found is None:
            raise ConfigError(f"{item!r} is not a stage of a rollout", got=text, fix=_FIX)
        else:
            stage = Stage(
                share=float(found["share"] or 0) / 100.0,
                header=found["header"] or "",
                shadow=float(found["copied"] or 100) / 100.0 if found["shadow"] else 0.0,
                time_s=seconds_of(found["time"], name="The time of a stage")
                if found["time"]
                else None,
            )
            stages.append(stage)
    _check_order(stages, text)
    return tuple(stages)


def _check_order(stages: list[Stage], text: str) -> None:
    shares = [stage.share for stage in stages if not stage.waits]
    if any(0.0 < share < SMALLEST_SHARE for share in shares):
        raise ConfigError("A stage must have at least 0.01 % of the traffic", got=text, fix=_FIX)
    rises = all(low < high or low == high == 0.0 for low, high in itertools.pairwise(shares))
    named = all(
        stage.share > 0.0 or stage.header or stage.waits or 0.0 < stage.shadow <= 1.0
        for stage in stages
    )
    if not rises or not named or stages[-1].waits or shares[-1] != 1.0:
        raise ConfigError("The stages of a rollout must rise to 100 %", got=text, fix=_FIX)
