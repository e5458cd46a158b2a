"""Publishes a run's newest metrics: on a port, in a file for node_exporter, or through OTLP to a collector.

A failure never ends or delays training; it only causes a warning.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.core.errors import UserError
from stoker.core.incarnation import is_newest
from stoker.telemetry.scrape_server import Page, ScrapeServer
from stoker.telemetry.targets import published, reachable_address
from stoker.telemetry.writers.append_only import DiskFailures
from stoker.telemetry.writers.live import LiveMetrics

_LOG = logging.getLogger(__name__)

PATH = "/metrics"
"""Path of the page that Prometheus scrapes."""

REUSE_S = 0.1
"""Minimum time between two collections of the metrics, seconds: many scrapes must not slow down training."""

TEXTFILE_EVERY_S = 5.0
"""Interval between two writes of the textfile, seconds."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Destinations:
    """Where the metrics of a run are published."""

    runs: Path
    """The folder `runs`, in which Prometheus looks for targets."""

    port: int | None = None
    """Port to listen on; 0: any free port; None: metrics are not served."""

    host: str = "127.0.0.1"
    """IPv4 address to listen on."""

    textfile: Path | None = None
    """File for node_exporter; None: no file is written."""


@contextlib.contextmanager
def offered(
    live: LiveMetrics, where: Destinations, *, environ: Mapping[str, str]
) -> Iterator[None]:
    """Publish the metrics inside the `with` block.

    Args:
        live: The metrics.
        where: Port and file.
        environ: Environment; OpenTelemetry's variables in it say whether and where to send metrics.
    """
    with contextlib.ExitStack() as held:
        if where.port is not None:
            _serve(live, where, held)
        if where.textfile is not None:
            held.enter_context(_in_textfile(live, where.textfile))
        if _wants_otlp(environ):
            _export(live, held)
        yield


def _serve(live: LiveMetrics, where: Destinations, held: contextlib.ExitStack) -> None:
    try:
        page = Page(content=live.text, reuse_s=REUSE_S)
        server = held.enter_context(
            ScrapeServer({PATH: page}, port=where.port or 0, host=where.host)
        )
    except UserError as error:
        _LOG.warning("metrics are not served, training goes on: %s", error.line())
        return
    address = reachable_address(server.address)
    _LOG.warning("metrics: http://%s%s", address, PATH)
    if not ipaddress.IPv4Address(where.host).is_loopback:
        _LOG.warning("other machines can read these metrics: train.metrics_host is %s", where.host)
    try:
        held.enter_context(published(where.runs, live.info.run, address))
    except OSError as error:
        _LOG.warning("Prometheus does not find this run automatically, training goes on: %s", error)


@contextlib.contextmanager
def _in_textfile(live: LiveMetrics, path: Path) -> Iterator[None]:
    """Write the file regularly; remove it at the end, because node_exporter would otherwise report it forever."""
    over, failures = threading.Event(), DiskFailures(str(path))
    # node_exporter reads only files named `*.prom`, so it ignores this one.
    made = path.with_name(f".{path.name}.tmp")

    def keep() -> None:
        while True:
            if not is_newest():
                return
            with failures:
                path.parent.mkdir(parents=True, exist_ok=True)
                # As in a scrape, a name that is not valid Unicode must not prevent the other metrics.
                made.write_bytes(live.text().encode(errors="replace"))
                os.replace(made, path)
            if over.wait(TEXTFILE_EVERY_S):
                return

    thread = threading.Thread(target=keep, name="stoker-textfile", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for each in (made, path) if is_newest() else ():
            with contextlib.suppress(OSError):
                each.unlink()


def _wants_otlp(environ: Mapping[str, str]) -> bool:
    off = (
        environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environ.get("OTEL_METRICS_EXPORTER", "").lower() == "none"
    )
    return not off and any(environ.get(name) for name in _ENDPOINTS)


def _export(live: LiveMetrics, held: contextlib.ExitStack) -> None:
    try:
        from stoker.telemetry.writers.otlp import exported
    except ImportError:
        _LOG.warning(
            "metrics are not sent, training goes on: %s is set, which needs OpenTelemetry. "
            "Run: pip install 'stoker[otel]'",
            _ENDPOINTS[0],
        )
        return
    try:
        held.enter_context(exported(live))
    except UserError as error:
        _LOG.warning("metrics are not sent, training goes on: %s", error.line())
