"""Finds the models to which each objective applies: models with objectives of their own, or all other models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from stoker.monitor.settings import ModelSlo, Slo


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The value of an objective, and the models to which it applies."""

    value: float
    """Percent for availability, milliseconds for latency."""

    matcher: str
    """PromQL matcher that selects these models, without braces; empty: all models."""

    @property
    def braces(self) -> str:
        """The matcher in braces."""
        return f"{{{self.matcher}}}" if self.matcher else ""

    @property
    def more(self) -> str:
        """The matcher with a comma before it, to append to another matcher."""
        return f",{self.matcher}" if self.matcher else ""


def availabilities(slo: Slo) -> tuple[Objective, ...]:
    """Return the objectives of availability; the first applies to all models without an objective of their own."""
    return _objectives(slo, slo.availability, lambda model: model.availability)


def p99s_ms(slo: Slo) -> tuple[Objective, ...]:
    """Return the objectives of latency; the first applies to all models without an objective of their own."""
    return _objectives(slo, slo.p99_ms, lambda model: model.p99_ms)


def _objectives(
    slo: Slo, common: float, own: Callable[[ModelSlo], float | None]
) -> tuple[Objective, ...]:
    """Return all objectives; models with equal values share one, so that no two alerts have the same labels."""
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
    # PromQL escapes strings in the same way as JSON.
    return f"model_name{operator}{json.dumps(pattern, ensure_ascii=False)}" if names else ""
