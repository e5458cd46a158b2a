"""Limits of an HTTP connection and the path of the metrics, in a module that imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

METRICS_PATH = "/monitoring/prometheus/metrics"
"""TensorFlow Serving's default path of the metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """Limits of a connection."""

    connections: int = 4096
    """Maximum number of connections at the same time; a further connection gets 503."""

    head_bytes: int = 32 << 10
    """Maximum size of request line and headers, bytes; a larger request gets 431."""

    head_s: float = 10.0
    """Maximum time until the headers are complete, seconds; then the request gets 408. It also limits silent
    connections."""

    body_s: float = 30.0
    """Maximum time from the end of the headers to the end of the body, seconds; then the request gets 408."""

    idle_s: float = 75.0
    """Maximum time between two requests of a connection, seconds; then it is closed. It exceeds the 60 s after which
    load balancers (AWS, nginx) close their idle connections: if the server closed first, a request in transit would be
    lost."""

    send_s: float = 25.0
    """Maximum time that a client may leave an answer unread, seconds; then the connection is closed."""
