"""Sends a run's newest metrics through OTLP to a collector, for jobs that cannot be scraped.

OpenTelemetry's environment variables apply: `OTEL_EXPORTER_OTLP_*`, `OTEL_METRIC_EXPORT_INTERVAL`,
`OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`. A separate thread does all the work, so a collector that does not
answer never delays training. Needs the extra `otel`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as OtlpMetric
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from stoker.core.errors import ConfigError, Plain
from stoker.telemetry.catalogue import training as catalogue
from stoker.telemetry.catalogue.metric import Kind, Metric
from stoker.telemetry.otlp_exporter import exporter_module
from stoker.telemetry.writers.live import BUCKETS, LiveMetrics, Samples, StepHistogram

_LOG = logging.getLogger(__name__)

FLUSH_S = 2.0
"""Maximum time at the end to send the last values, seconds."""

EVERY_MS = 15_000
"""Default of `OTEL_METRIC_EXPORT_INTERVAL`, the interval between two exports, milliseconds."""


@contextlib.contextmanager
def exported(live: LiveMetrics) -> Iterator[None]:
    """Send the metrics regularly inside the `with` block, and a last time at its end.

    Raises:
        ConfigError: An environment variable of OpenTelemetry is invalid.
    """
    # Otherwise each failed attempt to reach the collector would be logged.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    try:
        exporter: MetricExporter = exporter_module("metric").OTLPMetricExporter()
        every_s = _interval_s()
        data = _Data(live)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            "OpenTelemetry's environment variables (OTEL_...) must be valid",
            got=Plain(f"{type(error).__name__}: {error}".rstrip(".")),
        ) from error
    over = threading.Event()
    sender = threading.Thread(
        target=_send, args=(exporter, data, every_s, over), name="stoker-otlp", daemon=True
    )
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join(FLUSH_S)


def _send(exporter: MetricExporter, data: _Data, every_s: float, over: threading.Event) -> None:
    lost = 0
    while True:
        ends = over.wait(every_s)
        try:
            sent = exporter.export(data.now()) is MetricExportResult.SUCCESS
            why = "the collector does not accept them"
        except Exception as error:  # noqa: BLE001 - whatever it is, training continues
            sent, why = False, f"{type(error).__name__}: {error}"
        if sent and lost:
            _LOG.warning("metrics are sent by OTLP again; %d exports were lost", lost)
        elif not sent and not lost:
            _LOG.warning("metrics are not sent by OTLP, training goes on: %s", why)
        lost = 0 if sent else lost + 1
        if ends:
            return


class _Data:
    """Converts the metrics to OpenTelemetry's types."""

    def __init__(self, live: LiveMetrics) -> None:
        self._live, self._began_ns = live, time.time_ns()
        own: dict[str, str | int] = {
            "service.instance.id": live.info.run,
            "process.pid": os.getpid(),
        }
        named = Resource.create(own)
        if str(named.attributes[SERVICE_NAME]).startswith("unknown_service"):
            named = Resource.create({**own, SERVICE_NAME: "stoker-train"})
        self._resource = named

    def now(self) -> MetricsData:
        """Return the newest values."""
        samples, histogram = self._live.samples()
        now_ns = time.time_ns()
        metrics = [self._metric(metric, samples[metric], now_ns) for metric in samples]
        metrics.append(self._histogram(histogram, now_ns))
        scope = ScopeMetrics(
            scope=InstrumentationScope("stoker.train"), metrics=metrics, schema_url=""
        )
        return MetricsData(
            [ResourceMetrics(resource=self._resource, scope_metrics=[scope], schema_url="")]
        )

    def _metric(self, metric: Metric, samples: Samples, now_ns: int) -> OtlpMetric:
        points = [
            NumberDataPoint(
                attributes=dict(zip(metric.labels, labels, strict=True)),
                start_time_unix_nano=self._began_ns,
                time_unix_nano=now_ns,
                value=value,
            )
            for labels, value in samples.items()
        ]
        if metric.kind is Kind.COUNTER:
            data: Sum | Gauge = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
        else:
            data = Gauge(points)
        return OtlpMetric(metric.name, metric.help, "", data)

    def _histogram(self, histogram: StepHistogram, now_ns: int) -> OtlpMetric:
        metric = catalogue.STEP_TIME_S
        point = HistogramDataPoint(
            attributes={"run": self._live.info.run},
            start_time_unix_nano=self._began_ns,
            time_unix_nano=now_ns,
            count=sum(histogram.counts),
            sum=histogram.sum_s,
            bucket_counts=histogram.counts,
            explicit_bounds=BUCKETS,
            # Minimum and maximum are optional in the protocol, and not known here.
            min=None,  # type: ignore[arg-type]  # None is allowed; the annotation is too narrow
            max=None,  # type: ignore[arg-type]  # None is allowed; the annotation is too narrow
        )
        return OtlpMetric(
            metric.name, metric.help, "", Histogram([point], AggregationTemporality.CUMULATIVE)
        )


def _interval_s() -> float:
    every_ms = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or EVERY_MS)
    if not every_ms > 0:
        raise ValueError(f"OTEL_METRIC_EXPORT_INTERVAL is {every_ms:g}")
    return every_ms / 1000
