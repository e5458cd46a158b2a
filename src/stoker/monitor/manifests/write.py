"""Writes both folders and a README; refuses to overwrite files that were edited."""

from __future__ import annotations

from pathlib import Path

from stoker.core.files import writable
from stoker.monitor.generated import write_generated
from stoker.monitor.manifests.compose import compose_texts
from stoker.monitor.manifests.kubernetes import (
    EXPORTER_LABEL,
    TRAIN_LABEL,
    TRAIN_PORT,
    kubernetes_texts,
)
from stoker.monitor.stack.wiring import Wiring

_README = f"""\
# Monitoring, as Stoker generated it

Written by `stoker monitor up --out`. Nothing was started and nothing applied to a cluster; images were not pulled.

## Docker Compose

`docker compose --file compose/compose.yaml up --detach` starts Prometheus (127.0.0.1:9090), Alertmanager
(127.0.0.1:9093) and Grafana (127.0.0.1:3000, with the dashboards) on the network of a Linux host, because runs and
servers listen on its loopback address.

## Kubernetes

`kubectl apply --namespace monitoring --filename kubernetes/` adds what prometheus-operator reads:

| file | what |
|---|---|
| `rules.yaml` | PrometheusRule: recording rules and alerts |
| `servers.yaml` | ServiceMonitor: Services with the label `app.kubernetes.io/component: model-server` and a port `rest` |
| `training.yaml` | PodMonitor: pods with `app.kubernetes.io/component: {TRAIN_LABEL}` and a port named `{TRAIN_PORT}` |
| `exporters.yaml` | PodMonitor: pods with `app.kubernetes.io/component: {EXPORTER_LABEL}` and a port named `{TRAIN_PORT}` |
| `dashboard-*.yaml` | ConfigMaps that the sidecar of Grafana's chart loads (label `grafana_dashboard`) |

A Prometheus object chooses by labels: its `ruleSelector`, `serviceMonitorSelector` and `podMonitorSelector` must
match `app.kubernetes.io/name: stoker`. Receivers of alerts are part of your Alertmanager.

## Your own changes

Put rules of your own into files of your own. A generated file that was edited is not written over: the command stops
and names it.
"""


def write_manifests(wiring: Wiring, out: Path) -> list[str]:
    """Write everything, or nothing.

    Args:
        wiring: what is watched, by which rules.
        out: The folder; files in it that were generated and not edited are replaced.

    Returns:
        The files, relative to `out`.

    Raises:
        ConfigError: a file was edited.
        UserError: the folder cannot be written.
    """
    texts = {
        **{f"compose/{name}": text for name, text in compose_texts(wiring).items()},
        **{f"kubernetes/{name}": text for name, text in kubernetes_texts(wiring).items()},
        "README.md": _README,
    }
    with writable(out, what="--out", fix="Name another folder."):
        write_generated(out, texts, fix="Name another folder, or delete the edited file.")
    return list(texts)
