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
"""Every metric once; a file of another writer joins with one line."""
