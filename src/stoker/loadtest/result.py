"""What a run of load has shown, and whether it can be believed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.loadtest.latency import Latencies

PERCENTS = (50.0, 90.0, 99.0, 99.9)
"""What a table shows, beside the longest."""

LATE_S = 0.001
"""How late the generator may send one request in a hundred without a word about it, seconds."""

LATE_SHARE = 0.1
"""... or this share of the median latency, where that is more."""

BUSY_SHARE = 0.9
"""Share of a core from which on the generator may have been what was slow."""


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """Latencies of the answers of 200, and the count of all else."""

    mode: str
    """ "open" or "closed"."""

    asked_rate_per_s: float | None
    """Requests a second that were due; None of a closed loop."""

    connections: int
    """Connections."""

    took_s: float
    """From the first request's time to the last answer, or to the end of the schedule."""

    sent: int
    """Requests that were due or, in a closed loop, sent."""

    latencies: Latencies
    """Of answers of 200; in an open loop from when the request was due."""

    errors: Mapping[str, int]
    """ "HTTP 503", "connection refused", "no answer in time", "not sent in time" -> how many."""

    lag: Latencies
    """How late the generator itself took up each request of its schedule; empty of a closed loop."""

    waited: Latencies
    """How long a request that was taken up waited for a free connection; empty of a closed loop."""

    cpu_share: float
    """Share of a core that the generator took."""

    stopped: bool = False
    """Ended by hand before its time."""

    notes: tuple[str, ...] = field(init=False)
    """What must be known beside the figures."""

    def __post_init__(self) -> None:
        """Say what limits the figures."""
        object.__setattr__(self, "notes", tuple(_notes(self)))

    @property
    def kept_schedule(self) -> bool:
        """Whether the generator was in time, so that the latencies are the server's."""
        allowed_s = max(LATE_S, LATE_SHARE * self.latencies.at(50))
        return not self.lag.count or self.lag.at(99) <= allowed_s

    @property
    def throughput_per_s(self) -> float:
        """Answers of 200 a second."""
        return self.latencies.count / self.took_s if self.took_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """For other programs; latencies in milliseconds."""
        return {
            "mode": self.mode,
            "asked_rate_per_s": self.asked_rate_per_s,
            "connections": self.connections,
            "took_s": self.took_s,
            "sent": self.sent,
            "answered": self.latencies.count,
            "throughput_per_s": self.throughput_per_s,
            "latency_ms": _milliseconds(self.latencies),
            "errors": dict(self.errors),
            "generator": {
                "kept_schedule": self.kept_schedule,
                "lag_ms": _milliseconds(self.lag),
                "waited_for_connection_ms": _milliseconds(self.waited),
                "cpu_share": self.cpu_share,
            },
            "stopped": self.stopped,
            "notes": list(self.notes),
        }


def _milliseconds(latencies: Latencies) -> dict[str, float] | None:
    if not latencies.count:
        return None
    curve = zip(PERCENTS, latencies.curve(PERCENTS), strict=True)
    values = {f"p{percent:g}": value_s * 1e3 for percent, value_s in curve}
    return {"mean": latencies.mean_s * 1e3, **values, "max": latencies.max_s * 1e3}


def _notes(result: LoadResult) -> list[str]:
    notes = []
    if result.stopped:
        notes.append(f"stopped by hand after {result.took_s:.1f} s")
    if not result.kept_schedule:
        notes.append(
            f"the generator did not keep its schedule (1 % of its requests more than "
            f"{result.lag.at(99) * 1e3:.1f} ms late): its own lag is in these latencies; lower the "
            "rate, or give it a core"
        )
    if result.cpu_share > BUSY_SHARE:
        notes.append(
            f"the generator took {result.cpu_share:.0%} of a core: the server may be able to do more"
        )
    waited_s = result.waited.at(99)
    if waited_s > max(LATE_S, LATE_SHARE * result.latencies.at(50)):
        notes.append(
            f"1 % of the requests waited more than {waited_s * 1e3:.1f} ms for one of "
            f"{result.connections} connections: the server is slower than the rate, or needs more "
            "connections; the wait counts"
        )
    if result.errors and result.latencies.count:
        notes.append("latencies are those of the answers of 200 alone")
    return notes
