"""Files for Docker Compose: Prometheus, Alertmanager and Grafana on the loopback address of the host's network."""

from __future__ import annotations

from typing import Any

from stoker.monitor.dashboards import dashboard_texts
from stoker.monitor.rules.groups import rules_text
from stoker.monitor.stack.wiring import (
    Wiring,
    alertmanager_settings,
    as_yaml,
    prometheus_settings,
)

PROMETHEUS_IMAGE = "prom/prometheus:v3.5.0"
ALERTMANAGER_IMAGE = "prom/alertmanager:v0.28.1"
GRAFANA_IMAGE = "grafana/grafana:12.1.1"

_PROMETHEUS, _ALERTMANAGER = "127.0.0.1:9090", "127.0.0.1:9093"
_SLACK = "/etc/alertmanager/slack-url"


def compose_texts(wiring: Wiring) -> dict[str, str]:
    """Return relative name -> content of every file."""
    notifying = alertmanager_settings(wiring)
    for receiver in notifying["receivers"]:
        for slack in receiver.get("slack_configs", ()):
            slack["api_url_file"] = _SLACK
    texts = {
        "compose.yaml": as_yaml(_compose(wiring)),
        "rules.yml": rules_text(wiring.rules),
        "rules.d/README": "Rules of your own: NAME.yml.\n",
        "prometheus.yml": as_yaml(
            prometheus_settings(wiring, alertmanager=_ALERTMANAGER, prometheus=_PROMETHEUS)
        ),
        "alertmanager.yml": as_yaml(notifying),
        "grafana/datasources/prometheus.yaml": as_yaml(
            {
                "apiVersion": 1,
                "datasources": [
                    {
                        "name": "Prometheus",
                        "type": "prometheus",
                        "access": "proxy",
                        "url": f"http://{_PROMETHEUS}",
                        "isDefault": True,
                        "jsonData": {"timeInterval": wiring.lasting("15s")},
                    }
                ],
            }
        ),
        "grafana/providers/stoker.yaml": as_yaml(
            {
                "apiVersion": 1,
                "providers": [
                    {
                        "name": "stoker",
                        "folder": "Stoker",
                        "type": "file",
                        "options": {"path": "/var/lib/grafana/dashboards"},
                    }
                ],
            }
        ),
    }
    dashboards = {f"grafana/dashboards/{name}": text for name, text in dashboard_texts().items()}
    return texts | dashboards


def _compose(wiring: Wiring) -> dict[str, Any]:
    # Use the host's network: runs and servers listen on its loopback address, which a bridge network cannot reach.
    common = {"network_mode": "host", "restart": "unless-stopped"}
    slack = wiring.receiver.slack_file
    return {
        "services": {
            "prometheus": {
                "image": PROMETHEUS_IMAGE,
                **common,
                "command": [
                    "--config.file=/etc/prometheus/prometheus.yml",
                    "--storage.tsdb.path=/prometheus",
                    "--storage.tsdb.retention.time=15d",
                    "--storage.tsdb.retention.size=10GB",
                    f"--web.listen-address={_PROMETHEUS}",
                ],
                "volumes": [
                    _mount("./prometheus.yml", "/etc/prometheus/prometheus.yml"),
                    _mount("./rules.yml", "/etc/prometheus/rules.yml"),
                    _mount("./rules.d", "/etc/prometheus/rules.d"),
                    *(_mount(folder, folder) | _MADE for folder in wiring.runs),
                    "series:/prometheus",
                ],
            },
            "alertmanager": {
                "image": ALERTMANAGER_IMAGE,
                **common,
                "command": [
                    "--config.file=/etc/alertmanager/alertmanager.yml",
                    "--storage.path=/alertmanager",
                    "--cluster.listen-address=",
                    f"--web.listen-address={_ALERTMANAGER}",
                ],
                "volumes": [
                    _mount("./alertmanager.yml", "/etc/alertmanager/alertmanager.yml"),
                    *([_mount(str(slack.resolve()), _SLACK)] if slack else []),
                    "alerts:/alertmanager",
                ],
            },
            "grafana": {
                "image": GRAFANA_IMAGE,
                **common,
                "environment": {"GF_SERVER_HTTP_ADDR": "127.0.0.1"},
                "volumes": [
                    _mount("./grafana/datasources", "/etc/grafana/provisioning/datasources"),
                    _mount("./grafana/providers", "/etc/grafana/provisioning/dashboards"),
                    _mount("./grafana/dashboards", "/var/lib/grafana/dashboards"),
                    "grafana:/var/lib/grafana",
                ],
            },
        },
        "volumes": {"series": {}, "alerts": {}, "grafana": {}},
    }


_MADE = {"bind": {"create_host_path": True}}
"""Options of a mount whose folder may not exist yet, e.g. the runs of an experiment that has not run."""


def _mount(source: str, target: str) -> dict[str, Any]:
    """Return a read-only mount of a file or folder, in the long form, which allows a colon in a path.

    `$` is written as `$$`: Compose would otherwise replace it by the value of a variable.
    """
    paths = {"source": source.replace("$", "$$"), "target": target.replace("$", "$$")}
    return {"type": "bind", **paths, "read_only": True}
