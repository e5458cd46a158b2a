"""Requests that are answered together by one run of a model in the event loop, and their metrics."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from stoker.serve.dataplane.requests import ModelSpec, Tensors
from stoker.serve.errors import Code
from stoker.serve.observability.counters import COUNTING, Count, Spread
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.observability.version_metrics import VersionMetrics
from stoker.serve.routing import RunRequests

PROVEN_RUNS = 1_000
"""Number of quick runs that every compared version of a rollout must have had before any of them runs in the event
loop."""


@functools.lru_cache(maxsize=256)
def of_version(name: str, version: int) -> ModelSpec:
    """Return the spec of a model's version. Cached, because every request needs it."""
    return ModelSpec(name=name, version=version)


@dataclass(kw_only=True, slots=True)
class JoinedRequests(RunRequests):
    """Requests that one run can answer: for the same version and signature, with inputs that can be concatenated."""

    model: ModelSpec
    """The model, with the version that a rollout chose, if one did."""

    signature: str
    """The signature's name; empty for the default."""

    entrypoint: str = "REST"
    """The protocol of the requests: "REST" or "GRPC"."""


@dataclass(kw_only=True, slots=True)
class JoinedRun:
    """The result of one run for the rows of several requests."""

    model: str
    """The model's name."""

    version: int
    """The version that answered."""

    signature: str
    """The signature's name."""

    inputs: Tensors
    """Input name -> the rows of all requests, in their order."""

    outputs: Tensors
    """Output name -> the rows of all requests, in their order."""

    began_s: float
    """When the run began, seconds of the monotonic clock."""

    ended_s: float
    """When the run ended, seconds of the monotonic clock."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """The metrics of one version's requests over one protocol."""

    requests: Count
    took_us: Spread
    ran_us: Spread
    of_version: Count
    version_took_us: Spread


class JoinedCounts:
    """Counts requests that were answered in the event loop; thread-safe."""

    def __init__(self, metrics: ServeMetrics, versions: VersionMetrics) -> None:
        """Args: metrics: the metrics by model; versions: the metrics by version."""
        self._metrics, self._versions = metrics, versions
        self._known: dict[tuple[str, int, str], _Counts] = {}

    def add(self, joined: JoinedRequests, run: JoinedRun) -> None:
        """Count requests and the run that answered them."""
        key = run.model, run.version, joined.entrypoint
        counts = self._known.get(key)
        if counts is None:
            counts = self._known[key] = self._counts_of(*key)
        ended_s, number = run.ended_s, len(joined.came_s)
        with COUNTING:
            counts.requests.put(number)
            counts.of_version.put(number)
            for each_s in joined.came_s:
                took_us = (ended_s - each_s) * 1e6
                counts.took_us.put(took_us)
                counts.version_took_us.put(took_us)
            counts.ran_us.put((ended_s - run.began_s) * 1e6, times=number)

    def _counts_of(self, model: str, version: int, entrypoint: str) -> _Counts:
        metrics, api = self._metrics, "predict" if entrypoint == "REST" else "Predict"
        return _Counts(
            metrics.request_count.of(model_name=model, status=Code.OK.name),
            metrics.request_latency.of(model_name=model, API=api, entrypoint=entrypoint),
            metrics.runtime_latency.of(model_name=model, API="Predict", runtime="TF1"),
            self._versions.requests_of(model, version, status=Code.OK.name),
            self._versions.latency_of(model, version),
        )
