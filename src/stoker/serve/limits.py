"""Limits of an HTTP connection and the path of the metrics; known before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

METRICS_PATH = "/monitoring/prometheus/metrics"
"""TensorFlow Serving's default path of the metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """Limits of a connection."""

    connections: int = 4096
    """Most connections at once; another gets 503."""

    head_bytes: int = 32 << 10
    """Largest request line and headers; larger ones get 431."""

    head_s: float = 10.0
    """Longest time to the end of the headers, seconds; then 408. It also limits silent connections."""

    body_s: float = 30.0
    """Longest time from there to the end of the body, seconds; then 408."""

    idle_s: float = 75.0
    """Longest time between two requests of a connection, seconds; then it is closed. More than the 60 s after which
    balancers (AWS, nginx) close theirs: a connection closed first by the server loses the request in transit."""

    send_s: float = 25.0
    """Longest time that a client may leave an answer unread, seconds; then the connection is closed."""
