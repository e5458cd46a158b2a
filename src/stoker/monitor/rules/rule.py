"""Alerts and recording rules as data, and their conversion to rules of Prometheus.

The PromQL in this package has the windows for production. The conversion divides all durations by the time scale:
`[5m]`, `[1h:1m]`, `offset 1h`, and `duration(30m)`, which becomes a number of seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

RUNBOOKS = "https://github.com/stoker/stoker/blob/main/docs/how-to/runbooks.md"
"""Address of the page that has a section about each alert."""

_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = r"\d+(?:ms|s|m|h|d)"
_WINDOW = re.compile(rf"\[({_DURATION})(?::({_DURATION})?)?\]|offset ({_DURATION})")
_SECONDS = re.compile(rf"duration\(({_DURATION})\)")


class Severity(StrEnum):
    """How soon a person has to act. Source: Google, Site Reliability Workbook, chapter 5."""

    PAGE = "page"
    """A person must act now."""

    TICKET = "ticket"
    """A person must act within days."""

    NONE = "none"
    """No action is needed: the alert only shows that alerts arrive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """One recording rule."""

    record: str
    """Name of the new series, by Prometheus's convention level:metric:operations."""

    expr: str

    labels: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self, time_scale: float) -> dict[str, Any]:
        """Return the rule in the form that Prometheus reads."""
        found: dict[str, Any] = {"record": self.record, "expr": scaled(self.expr, time_scale)}
        return found | ({"labels": dict(self.labels)} if self.labels else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One alerting rule."""

    name: str

    expr: str

    severity: Severity

    summary: str
    """One line that contains labels of the alert."""

    description: str
    """One sentence: what the alert means, and what to check first."""

    lasts: str = ""
    """How long the expression must hold before the alert fires (`for`); empty: it fires immediately."""

    min_lasts: str = ""
    """Minimum of `for`, which is not divided by the time scale."""

    keep: str = "5m"
    """How long the alert still fires after the expression no longer holds (`keep_firing_for`); empty: not at all."""

    labels: Mapping[str, str] = field(default_factory=dict)
    """Additional labels, e.g. the windows of a burn rate."""

    @property
    def runbook(self) -> str:
        """Address of the section about this alert in the runbooks."""
        return f"{RUNBOOKS}#{self.name.lower()}"

    def as_dict(self, time_scale: float) -> dict[str, Any]:
        """Return the rule in the form that Prometheus reads."""
        found: dict[str, Any] = {"alert": self.name, "expr": scaled(self.expr, time_scale)}
        for key, duration, minimum in (
            ("for", self.lasts, self.min_lasts),
            ("keep_firing_for", self.keep, ""),
        ):
            if duration:
                found[key] = scaled_duration(duration, time_scale, minimum=minimum)
        return found | {
            "labels": {"severity": self.severity.value, **self.labels},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": self.runbook,
            },
        }


def scaled(expr: str, time_scale: float) -> str:
    """Return PromQL with every duration divided by the time scale."""

    def window(found: re.Match[str]) -> str:
        length, step, offset = found.groups()
        if offset:
            return f"offset {scaled_duration(offset, time_scale)}"
        inner = scaled_duration(length, time_scale)
        if ":" in found[0]:
            inner += ":" + (scaled_duration(step, time_scale) if step else "")
        return f"[{inner}]"

    def seconds(found: re.Match[str]) -> str:
        return f"{_milliseconds(found[1]) / time_scale / 1e3:g}"

    return _SECONDS.sub(seconds, _WINDOW.sub(window, " ".join(expr.split())))


def scaled_duration(duration: str, time_scale: float, *, minimum: str = "") -> str:
    """Return a duration divided by the time scale, e.g. `1m30s`; it is at least `minimum` (default: 1 ms)."""
    left = max(_milliseconds(minimum or "1ms"), round(_milliseconds(duration) / time_scale))
    parts = []
    for unit, size in sorted(_UNIT_MS.items(), key=lambda item: -item[1]):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def _milliseconds(duration: str) -> int:
    unit = duration.lstrip("0123456789")
    return int(duration.removesuffix(unit)) * _UNIT_MS[unit]
