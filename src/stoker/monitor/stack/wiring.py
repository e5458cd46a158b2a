"""What Prometheus scrapes, and where alerts are sent: the settings of both programs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from stoker.core.errors import ConfigError
from stoker.monitor.discovery import SERVER_PATH, require_address
from stoker.monitor.rules.rule import scaled_duration
from stoker.monitor.settings import RuleSettings
from stoker.telemetry.targets import FOLDER

_GLOB = re.compile(r"[\\\[?]")
"""Characters with a meaning in a pattern of file_sd; it has no way to name a folder with `*`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receiver:
    """Receivers of alerts. Empty: only Prometheus and Alertmanager show them."""

    webhook: str = ""
    """Address that receives Alertmanager's JSON by POST."""

    slack_file: Path | None = None
    """File with the address of a Slack webhook, which is a secret."""

    def __post_init__(self) -> None:
        if self.webhook and not self.webhook.startswith(("http://", "https://")):
            raise ConfigError(
                "--webhook must be an address with http:// or https://", got=self.webhook
            )
        if self.slack_file is not None and not self.slack_file.is_file():
            raise ConfigError(
                "--slack-file must be a file with the address of a Slack webhook",
                got=str(self.slack_file),
                fix="Write the address that Slack gave you into it: it is a secret, so it is not an option.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Wiring:
    """The scrape targets, the rules, and the receivers of alerts."""

    runs: tuple[str, ...] = ()
    """Folders of runs."""

    servers: tuple[str, ...] = ()
    """HOST:PORT of each server's REST port."""

    exporters: tuple[str, ...] = ()
    """HOST:PORT of each `stoker monitor exporter`, whose `/sd` names more targets."""

    rules: RuleSettings = field(default_factory=RuleSettings)

    receiver: Receiver = field(default_factory=Receiver)

    def __post_init__(self) -> None:
        for option, addresses in (("--server", self.servers), ("--exporter", self.exporters)):
            for address in addresses:
                require_address(address, option=option)

    @property
    def scale(self) -> float:
        """The time scale of the rules."""
        return self.rules.time_scale

    def lasting(self, duration: str) -> str:
        """A duration divided by the time scale, at least 1 s, in the form of both programs' settings."""
        short = scaled_duration(duration, self.scale)
        return "1s" if short.endswith("ms") else short


def prometheus_settings(wiring: Wiring, *, alertmanager: str, prometheus: str) -> dict[str, Any]:
    """Return prometheus.yml.

    Args:
        wiring: the scrape targets.
        alertmanager: HOST:PORT that receives the alerts.
        prometheus: HOST:PORT of Prometheus itself.
    """
    every = wiring.lasting("15s")
    found: dict[str, Any] = {"job_name": "stoker-train"}
    if wiring.runs:
        folders = [_GLOB.sub(r"\\\g<0>", folder) for folder in wiring.runs]
        files = [f"{folder}/{FOLDER}/*.json" for folder in folders]
        found["file_sd_configs"] = [{"files": files, "refresh_interval": wiring.lasting("1m")}]
    if wiring.exporters:
        found["http_sd_configs"] = [
            {"url": f"http://{address}/sd", "refresh_interval": wiring.lasting("1m")}
            for address in wiring.exporters
        ]
    # A target from an exporter may be a server, which is recognized by its path.
    found["relabel_configs"] = [
        {
            "source_labels": ["__metrics_path__"],
            "regex": SERVER_PATH,
            "target_label": "job",
            "replacement": "stoker-server",
        }
    ]
    jobs = [
        _static("stoker-server", wiring.servers) | {"metrics_path": SERVER_PATH},
        _static("stoker-exporter", wiring.exporters),
        _static("prometheus", (prometheus,)),
        _static("alertmanager", (alertmanager,)),
    ]
    return {
        "global": {
            "scrape_interval": every,
            "scrape_timeout": "1s" if every == "1s" else "10s",
            "evaluation_interval": every,
        },
        "rule_files": ["rules.yml", "rules.d/*.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [found, *jobs],
    }


def _static(job: str, targets: tuple[str, ...]) -> dict[str, Any]:
    return {"job_name": job, "static_configs": [{"targets": list(targets)}]}


def alertmanager_settings(wiring: Wiring) -> dict[str, Any]:
    """Return alertmanager.yml: alerts of one kind and place together; pages silence their tickets."""
    receiver = wiring.receiver
    to: dict[str, Any] = {"name": "stoker"}
    heartbeat: dict[str, Any] = {"name": "watchdog"}
    if receiver.webhook:
        to["webhook_configs"] = [{"url": receiver.webhook, "send_resolved": True}]
        heartbeat["webhook_configs"] = [{"url": receiver.webhook, "send_resolved": False}]
    if receiver.slack_file is not None:
        to["slack_configs"] = [
            {
                "api_url_file": str(receiver.slack_file.resolve()),
                "send_resolved": True,
                "title": "{{ .CommonAnnotations.summary }}",
                "title_link": "{{ .CommonAnnotations.runbook_url }}",
                "text": "{{ range .Alerts }}{{ .Annotations.summary }}\n{{ end }}",
            }
        ]
    burns = [
        {
            "source_matchers": [f'alertname="{name}"'],
            "target_matchers": [f'alertname="{name}Slow"'],
            "equal": ["model_name"],
        }
        for name in ("StokerErrorBudgetBurn", "StokerLatencyBudgetBurn")
    ]
    return {
        "route": {
            "receiver": "stoker",
            "group_by": ["alertname", "instance", "run", "model_name"],
            "group_wait": wiring.lasting("30s"),
            "group_interval": wiring.lasting("5m"),
            "repeat_interval": wiring.lasting("4h"),
            "routes": [
                {
                    "matchers": ['alertname="Watchdog"'],
                    "receiver": "watchdog",
                    "repeat_interval": wiring.lasting("5m"),
                }
            ],
        },
        "receivers": [to, heartbeat],
        "inhibit_rules": burns,
    }


def as_yaml(settings: dict[str, Any]) -> str:
    """Return settings as YAML, in their order."""
    return yaml.safe_dump(settings, sort_keys=False, width=10_000)
