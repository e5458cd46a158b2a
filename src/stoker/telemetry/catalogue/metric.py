"""The definition of a metric: its name, kind, unit, labels and meaning."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Kinds of metrics, with Prometheus's names."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Writer(StrEnum):
    """The program that writes a metric."""

    TRAINING = "training"
    SERVER = "server"
    ROLLOUT = "rollout"
    EXPORTER = "exporter"
    """`stoker monitor exporter`, and each training and server for the GPUs that it uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric in Prometheus."""

    name: str
    """Full name: `stoker_...` in base units, or the unchanged name of TensorFlow Serving or dcgm-exporter."""

    kind: Kind

    unit: str
    """`seconds`, `bytes`, `ratio` (0 to 1), `celsius`, `watts`, ...; "" for a count."""

    help: str
    """Meaning of the metric: one sentence that ends with a period."""

    writer: Writer

    labels: tuple[str, ...] = ()
    """Names of its labels; samples have their values in this order."""

    tensorboard: str = ""
    """Its name in TensorBoard and `metrics.jsonl`; empty if it is not written there."""
