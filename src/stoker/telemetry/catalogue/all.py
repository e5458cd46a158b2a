"""All metrics of all writers."""

from __future__ import annotations

from stoker.telemetry.catalogue import gpu, host, rollout, serving, training
from stoker.telemetry.catalogue.metric import Metric

METRICS: tuple[Metric, ...] = (
    *serving.METRICS,
    *rollout.METRICS,
    *gpu.METRICS,
    *host.METRICS,
    *training.METRICS,
)
"""All metrics; a new writer adds its file with one line here."""
