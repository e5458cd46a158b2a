"""The models of an objective: those named in `slo.models`, or all others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from stoker.monitor.settings import ModelSlo, Slo


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A value, and the models to which it applies."""

    value: float

    matcher: str
    """PromQL's matcher of these models, without braces; empty: all models."""

    @property
    def braces(self) -> str:
        """The matcher in braces."""
        return f"{{{self.matcher}}}" if self.matcher else ""

    @property
    def more(self) -> str:
        """The matcher to append to another one."""
        return f",{self.matcher}" if self.matcher else ""


def availabilities(slo: Slo) -> tuple[Objective, ...]:
    """Return the objectives of availability, percent: first that of all models without their own."""
    return _objectives(slo, slo.availability, lambda model: model.availability)


def p99s_ms(slo: Slo) -> tuple[Objective, ...]:
    """Return the objectives of latency, milliseconds: first that of all models without their own."""
    return _objectives(slo, slo.p99_ms, lambda model: model.p99_ms)


def _objectives(
    slo: Slo, common: float, own: Callable[[ModelSlo], float | None]
) -> tuple[Objective, ...]:
    """Models with equal values share an objective, so that no two alerts have the same labels."""
    named: dict[float, list[str]] = {}
    for name, model in sorted(slo.models.items()):
        value = own(model)
        if value is not None and value != common:
            named.setdefault(value, []).append(name)
    others = [name for names in named.values() for name in names]
    return (
        Objective(value=common, matcher=_matcher("!~", others)),
        *(Objective(value=value, matcher=_matcher("=~", names)) for value, names in named.items()),
    )


def _matcher(operator: str, names: list[str]) -> str:
    pattern = "|".join(map(re.escape, names))
    # A string of PromQL is escaped like one of JSON.
    return f"model_name{operator}{json.dumps(pattern, ensure_ascii=False)}" if names else ""
