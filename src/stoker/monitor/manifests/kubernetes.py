"""Objects for Kubernetes: monitors and rules for prometheus-operator, and dashboards for Grafana's sidecar."""

from __future__ import annotations

from typing import Any

from stoker.monitor.dashboards import dashboard_texts
from stoker.monitor.discovery import SERVER_PATH
from stoker.monitor.rules.groups import rules_spec
from stoker.monitor.stack.wiring import Wiring, as_yaml

_API = "monitoring.coreos.com/v1"
_LABELS = {"app.kubernetes.io/name": "stoker", "app.kubernetes.io/component": "monitoring"}

SERVER_LABELS = {"app.kubernetes.io/component": "model-server"}
"""Label of the pods of servers that `stoker deploy` creates."""

TRAIN_LABEL, TRAIN_PORT = "training", "metrics"
"""Value of the label `app.kubernetes.io/component` of training pods, and name of their port for metrics."""

EXPORTER_LABEL = "gpu-exporter"


def kubernetes_texts(wiring: Wiring) -> dict[str, str]:
    """Return relative name -> content of every file."""
    found = {
        "rules.yaml": _named("PrometheusRule", "stoker", rules_spec(wiring.rules)),
        "servers.yaml": _named("ServiceMonitor", "stoker-server", _servers(wiring)),
        "training.yaml": _named(
            "PodMonitor", "stoker-train", _pods(wiring, TRAIN_LABEL, job="stoker-train")
        ),
        "exporters.yaml": _named(
            "PodMonitor", "stoker-exporter", _pods(wiring, EXPORTER_LABEL, job="stoker-exporter")
        ),
    }
    for name, text in dashboard_texts().items():
        found[f"dashboard-{name.removesuffix('.json')}.yaml"] = _dashboard(name, text)
    return {name: as_yaml(content) for name, content in found.items()}


def _named(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": _API,
        "kind": kind,
        "metadata": {"name": name, "labels": dict(_LABELS)},
        "spec": spec,
    }


def _job(job: str) -> list[dict[str, Any]]:
    # The alerts use these job names. By default, prometheus-operator uses the names of its objects as job names.
    return [{"action": "replace", "targetLabel": "job", "replacement": job}]


def _servers(wiring: Wiring) -> dict[str, Any]:
    return {
        "namespaceSelector": {"any": True},
        "selector": {"matchLabels": dict(SERVER_LABELS)},
        "endpoints": [
            {
                "port": "rest",
                "path": SERVER_PATH,
                "interval": wiring.lasting("15s"),
                "relabelings": _job("stoker-server"),
            }
        ],
    }


def _pods(wiring: Wiring, component: str, *, job: str) -> dict[str, Any]:
    return {
        "namespaceSelector": {"any": True},
        "selector": {"matchLabels": {"app.kubernetes.io/component": component}},
        "podMetricsEndpoints": [
            {
                "port": TRAIN_PORT,
                "path": "/metrics",
                "interval": wiring.lasting("15s"),
                "relabelings": _job(job),
            }
        ],
    }


def _dashboard(name: str, text: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"dashboard-{name.removesuffix('.json')}",
            # The sidecar in Grafana's Helm chart finds ConfigMaps by this label.
            "labels": {**_LABELS, "grafana_dashboard": "1"},
        },
        "data": {name: text},
    }
