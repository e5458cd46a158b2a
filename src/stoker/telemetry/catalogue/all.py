"""The metrics of all writers in one tuple."""

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
"""All metrics; add the file of a new writer here."""
