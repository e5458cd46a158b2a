"""All rules, in the order in which Prometheus evaluates them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from stoker.monitor.rules import gpu, serving, slo, targets, training
from stoker.monitor.rules.rule import Alert, Recording
from stoker.monitor.settings import RuleSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rules about one subject; recording rules come before the rules that use them."""

    name: str
    recordings: tuple[Recording, ...]
    alerts: tuple[Alert, ...]


def all_groups(settings: RuleSettings) -> tuple[Group, ...]:
    """Return all groups."""
    return (
        Group(name="stoker-targets", recordings=(), alerts=targets.ALERTS),
        Group(name="stoker-gpu", recordings=gpu.RECORDINGS, alerts=gpu.ALERTS),
        Group(
            name="stoker-training",
            recordings=training.RECORDINGS,
            alerts=training.alerts(settings),
        ),
        Group(
            name="stoker-serving",
            recordings=(*slo.recordings(settings.slo), *serving.RECORDINGS),
            alerts=(*slo.alerts(settings.slo), *serving.alerts(settings)),
        ),
    )


def all_alerts(settings: RuleSettings) -> tuple[Alert, ...]:
    """Return all alerts."""
    return tuple(alert for group in all_groups(settings) for alert in group.alerts)


def rules_spec(settings: RuleSettings) -> dict[str, Any]:
    """Return all rules in the form of a rules file, which is also the `spec` of a PrometheusRule."""
    scale = settings.time_scale
    return {
        "groups": [
            {
                "name": group.name,
                "rules": [
                    *(rule.as_dict(scale) for rule in group.recordings),
                    *(rule.as_dict(scale) for rule in group.alerts),
                ],
            }
            for group in all_groups(settings)
        ]
    }


def rules_text(settings: RuleSettings) -> str:
    """Return the text of Prometheus's rules file; it depends only on the settings."""
    return yaml.safe_dump(rules_spec(settings), sort_keys=False, width=10_000)
