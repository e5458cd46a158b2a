"""Generates the settings of Prometheus and Alertmanager: what is scraped, and where alerts are sent."""

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
"""Characters that are escaped in a pattern of file_sd; `*` cannot be escaped there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receiver:
    """Where alerts are sent. If both fields are empty, only Prometheus and Alertmanager show the alerts."""

    webhook: str = ""
    """URL to which Alertmanager sends alerts as JSON by POST."""

    slack_file: Path | None = None
    """File with the URL of a Slack webhook; the URL is a secret."""

    def __post_init__(self) -> None:
        if self.webhook and not self.webhook.startswith(("http://", "https://")):
            raise ConfigError("--webhook must be a URL with http:// or https://", got=self.webhook)
        if self.slack_file is not None and not self.slack_file.is_file():
            raise ConfigError(
                "--slack-file must be a file with the address of a Slack webhook",
                got=str(self.slack_file),
                fix="Write the address from Slack into a file. It is a secret, so no option takes it directly.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Wiring:
    """The scrape targets, the rules, and the receivers of alerts."""

    runs: tuple[str, ...] = ()
    """Folders of runs."""

    servers: tuple[str, ...] = ()
    """Address of each server's REST port, HOST:PORT."""

    exporters: tuple[str, ...] = ()
    """Address of each `stoker monitor exporter`, HOST:PORT; its page `/sd` names more targets."""

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
        """Return a duration divided by the time scale, at least 1 s, in the form that both programs' settings have."""
        short = scaled_duration(duration, self.scale)
        return "1s" if short.endswith("ms") else short


def prometheus_settings(wiring: Wiring, *, alertmanager: str, prometheus: str) -> dict[str, Any]:
    """Return the content of prometheus.yml.

    Args:
        wiring: The scrape targets.
        alertmanager: Address of the Alertmanager that receives the alerts, HOST:PORT.
        prometheus: Address of Prometheus itself, HOST:PORT.
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
    # A target that an exporter names may be a server; it is recognized by its path.
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
    """Return the content of alertmanager.yml.

    Alerts with the same name, instance, run and model are sent together. An alert with severity `page` suppresses the
    alert with severity `ticket` about the same error budget.
    """
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
    """Return settings as YAML text, without sorting their keys."""
    return yaml.safe_dump(settings, sort_keys=False, width=10_000)
