"""Creates OpenTelemetry spans of finished requests in another thread, and sends them in batches.

OpenTelemetry's own environment variables apply: `OTEL_TRACES_SAMPLER`, `OTEL_EXPORTER_OTLP_*`,
`OTEL_BSP_*`, `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_SDK_DISABLED`. This module needs the
extra `otel`, and is imported only if tracing is on.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Collection, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from stoker.core.errors import ConfigError, Plain
from stoker.serve.dataplane.open_inference import SERVER_NAME, SERVER_VERSION
from stoker.serve.observability.access_log import Entry
from stoker.serve.observability.counters import Counter
from stoker.serve.runtime.background import Background
from stoker.serve.tracing.spans import Span, span_of
from stoker.telemetry.otlp_exporter import exporter_module

_log = logging.getLogger(__name__)

FLUSH_S = 2.0
"""Maximum wait for pending spans at shutdown, seconds, in case the receiver is missing."""

_NS = 1_000_000_000


class Traces:
    """Sends a span for each sampled request."""

    def __init__(
        self, *, dropped: Counter, scheme: str = "http", silent: Collection[str] = ()
    ) -> None:
        """Start to send.

        Args:
            dropped: Counts requests that were dropped before they became spans.
            scheme: URL scheme of the REST interface: "http" or "https".
            silent: Paths whose requests get no spans, because load balancers and Prometheus poll them.

        Raises:
            ConfigError: an environment variable of OpenTelemetry is invalid.
        """
        # Log lost batches only, not the warning of each attempt to reach a missing receiver.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)
        self._scheme, self._silent = scheme, frozenset(silent)
        self._trace_ids = _TraceIds()
        self._provider = _provider(self._trace_ids)
        self._tracer = self._provider.get_tracer("stoker.serve", SERVER_VERSION)
        self._caller = TraceContextTextMapPropagator()
        self._waiting: Background[tuple[Entry, float]] = Background(
            self._write,
            name="stoker-traces",
            on_drop=lambda count: dropped.add(count, log="traces"),
        )

    def add(self, entry: Entry) -> None:
        """Queue a request. Does not block."""
        if entry.protocol == "REST" and entry.method.partition(" ")[2] in self._silent:
            return
        # Copied, because a blocked thread may still change the record after its client got 504.
        entry = dataclasses.replace(entry, record=copy.copy(entry.record))
        self._waiting.offer((entry, time.monotonic()))

    def close(self) -> None:
        """Send the pending spans, but wait at most `FLUSH_S`."""
        self._waiting.close()
        # In a thread, because OpenTelemetry's own shutdown waits 30 s for a missing receiver.
        ending = threading.Thread(
            target=self._provider.shutdown, name="stoker-traces-end", daemon=True
        )
        ending.start()
        ending.join(FLUSH_S)
        if ending.is_alive():
            _log.error("not all traces could be sent in %g s; the rest is lost", FLUSH_S)

    def _write(self, batch: Sequence[tuple[Entry, float]]) -> None:
        for entry, now_s in batch:
            caller = self._caller.extract(entry.caller, context=Context())
            if self._may_be_sampled(caller):
                self._record(span_of(entry, now_s=now_s, scheme=self._scheme), caller)

    def _may_be_sampled(self, caller: Context) -> bool:
        """Return whether the sampler may select a request. If not, no span needs to be created, which saves time.

        OpenTelemetry's own samplers decide only by the trace ID, so they will decide the same when the span is created.
        Other samplers are called only when the span is created.
        """
        sampler = self._provider.sampler
        parent = trace.get_current_span(caller).get_span_context()
        number = parent.trace_id if parent.is_valid else self._trace_ids.next_trace_id()
        if not type(sampler).__module__.startswith("opentelemetry.sdk."):
            return True
        return sampler.should_sample(caller, number, "").decision is not Decision.DROP

    def _record(self, span: Span, caller: Context) -> None:
        made = self._tracer.start_span(
            span.name,
            context=caller,
            kind=trace.SpanKind.SERVER,
            attributes=span.attributes,
            start_time=_ns(span.began_s),
        )
        if made.is_recording():
            inside = trace.set_span_in_context(made, Context())
            for part in span.parts:
                self._tracer.start_span(
                    part.name, context=inside, start_time=_ns(part.began_s)
                ).end(_ns(part.ended_s))
            if span.error:
                made.set_status(trace.StatusCode.ERROR)
        made.end(_ns(span.ended_s))


class _TraceIds(RandomIdGenerator):
    """Gives a trace the ID that the sampler has already decided on. For use in one thread."""

    def __init__(self) -> None:
        self._trace_id = super().generate_trace_id()

    def next_trace_id(self) -> int:
        self._trace_id = super().generate_trace_id()
        return self._trace_id

    def generate_trace_id(self) -> int:
        return self._trace_id


def _ns(seconds: float) -> int:
    return round(seconds * _NS)


def _provider(trace_ids: RandomIdGenerator) -> TracerProvider:
    try:
        exporter: SpanExporter = exporter_module("trace").OTLPSpanExporter()
        provider = TracerProvider(
            resource=_resource(), shutdown_on_exit=False, id_generator=trace_ids
        )
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            "OpenTelemetry's environment variables (OTEL_...) must be valid",
            got=Plain(f"{type(error).__name__}: {error}".rstrip(".")),
        ) from error
    return provider


def _resource() -> Resource:
    own: dict[str, str | int] = {"service.version": SERVER_VERSION, "process.pid": os.getpid()}
    named = Resource.create(own)
    # the environment does not name the service
    if str(named.attributes[SERVICE_NAME]).startswith("unknown_service"):
        return Resource.create({**own, SERVICE_NAME: SERVER_NAME})
    return named
