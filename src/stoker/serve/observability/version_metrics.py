"""Request counts and latencies for each version of a model. The alerts about rollouts use these metrics."""

from __future__ import annotations

from stoker.serve.errors import Code
from stoker.serve.observability.counters import Count, Spread
from stoker.serve.observability.metrics import ServeMetrics

MAX_VERSIONS = 100
"""Maximum number of versions of a model that get a label of their own in each worker; further versions share
`OTHER_VERSIONS`. A limit is needed because series are never removed, and a server may load a new version each hour."""

OTHER_VERSIONS = "other"
"""The label of further versions."""


class VersionMetrics:
    """Counts requests by the version that answered; thread-safe."""

    def __init__(self, metrics: ServeMetrics) -> None:
        """Args: metrics: the metrics to update."""
        self._metrics = metrics
        self._labels: dict[str, dict[int, str]] = {}
        self._requests: dict[tuple[str, int | None, str], Count] = {}
        self._latency: dict[tuple[str, int], Spread] = {}

    def count(self, model: str, version: int | None, code: Code, *, took_s: float) -> None:
        """Count a finished request by its status; if it succeeded, also record its duration.

        Args:
            model: The model, which must be served.
            version: The version that got the request; None: the request failed before it reached a version.
            code: How the request ended.
            took_s: Duration of the request, seconds.
        """
        key = model, version, code.name
        found = self._requests.get(key) or self.requests_of(model, version, status=code.name)
        found.add()
        if version is not None and code is Code.OK:
            (self._latency.get((model, version)) or self.latency_of(model, version)).observe(
                took_s * 1e6
            )

    def requests_of(self, model: str, version: int | None, *, status: str) -> Count:
        """Return the counter of a version's requests with a status."""
        found = self._metrics.version_request_count.of(
            model_name=model, version=self._label(model, version), status=status
        )
        self._requests[model, version, status] = found
        return found

    def latency_of(self, model: str, version: int) -> Spread:
        """Return the histogram of the durations of a version's successful requests, microseconds."""
        found = self._metrics.version_request_latency.of(
            model_name=model, version=self._label(model, version)
        )
        self._latency[model, version] = found
        return found

    def _label(self, model: str, version: int | None) -> str:
        if version is None:
            return ""
        labels = self._labels.setdefault(model, {})
        if version not in labels and len(labels) >= MAX_VERSIONS:
            return OTHER_VERSIONS
        return labels.setdefault(version, str(version))
