"""The result of a load test: latencies, whether the generator kept its schedule, and a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hdrh.histogram import HdrHistogram

from stoker.pages.html import Html, element
from stoker.pages.plot import Axis, line_plot, picture_file

_UNITS_PER_S = 10_000_000
"""Latencies are recorded in tenths of a microsecond, because fast local servers answer in about 10 us."""

_MAX_S = 2 * 3600.0
"""Largest value that is recorded, seconds: the longest run plus the longest wait after it."""

_DIGITS = 3
"""Number of significant digits of every value: the error is at most 0.1 %."""


class Latencies:
    """Latencies in an HDR (High Dynamic Range) histogram; the methods take and return seconds."""

    def __init__(self) -> None:
        self._histogram = HdrHistogram(1, int(_MAX_S * _UNITS_PER_S), _DIGITS)
        self._max_s = 0.0
        self._sum_s = 0.0

    def add(self, value_s: float) -> None:
        """Record a value; a value above the largest that can be recorded counts as the largest."""
        value_s = min(max(value_s, 0.0), _MAX_S)
        self._histogram.record_value(max(1, int(value_s * _UNITS_PER_S)))
        self._sum_s += value_s
        self._max_s = max(value_s, self._max_s)

    @property
    def count(self) -> int:
        """Number of values."""
        return int(self._histogram.get_total_count())

    @property
    def max_s(self) -> float:
        """The exact maximum, seconds; 0 without values."""
        return self._max_s

    @property
    def mean_s(self) -> float:
        """The exact mean, seconds; 0 without values."""
        return self._sum_s / self.count if self.count else 0.0

    def at(self, percent: float) -> float:
        """Return a percentile, seconds; 0 without values."""
        return self.curve([percent])[0]

    def curve(self, percents: Sequence[float]) -> list[float]:
        """Return several percentiles in one pass over the buckets."""
        if not self.count:
            return [0.0] * len(percents)
        wanted = [self._whole(percent) for percent in percents]
        found = self._histogram.get_percentile_to_value_dict(wanted)
        # The upper end of a bucket may exceed the maximum.
        return [min(found[percent] / _UNITS_PER_S, self._max_s) for percent in wanted]

    def _whole(self, percent: float) -> float:
        """Round a percentage up so that it is a whole number of values; the library would round to the nearest number.

        The library's 90th percentile of six values would be the fifth value, but only 83 % are at or below it.
        """
        values = math.ceil(round(percent / 100 * self.count, 6))
        return 100 * max(values, 1) / self.count


PERCENTS = (50.0, 90.0, 99.0, 99.9)
"""Percentiles that tables show, in addition to the maximum."""

LATE_S = 0.001
"""A warning is shown if the generator sends 1 % of the requests later than this, seconds."""

LATE_SHARE = 0.1
"""If this share of the median latency is larger than `LATE_S`, it is used instead."""

BUSY_SHARE = 0.9
"""Share of a core's CPU time above which the generator may have been the bottleneck."""


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """Latencies of successful answers, and the number of errors."""

    mode: str
    """ "open" or "closed"."""

    asked_rate_per_s: float | None
    """Due requests per second; None in a closed loop."""

    connections: int
    """Number of connections."""

    took_s: float
    """Time from the first request to the last answer or to the end of the schedule, whichever is later, seconds."""

    sent: int
    """Number of requests that were due or, in a closed loop, sent."""

    latencies: Latencies
    """Latencies of answers with status 200; in an open loop, from the due time."""

    errors: Mapping[str, int]
    """ Error ("HTTP 503", "connection refused", "no answer in time", "not sent in time") -> number of requests."""

    lag: Latencies
    """How late the generator took each request from its schedule; empty in a closed loop."""

    waited: Latencies
    """How long each request waited for a free connection; empty in a closed loop."""

    cpu_share: float
    """CPU time of the generator, as a share of one core."""

    stopped: bool = False
    """Whether the run was interrupted."""

    notes: tuple[str, ...] = field(init=False)
    """Warnings about the figures."""

    def __post_init__(self) -> None:
        """Collect the notes."""
        object.__setattr__(self, "notes", tuple(_notes(self)))

    @property
    def kept_schedule(self) -> bool:
        """Whether the generator was on time, so that the latencies are the server's."""
        allowed_s = max(LATE_S, LATE_SHARE * self.latencies.at(50))
        return not self.lag.count or self.lag.at(99) <= allowed_s

    @property
    def throughput_per_s(self) -> float:
        """Answers with status 200 per second."""
        return self.latencies.count / self.took_s if self.took_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values, with latencies in milliseconds."""
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
        notes.append("latencies include only answers with status 200")
    return notes


_WIDTH_PX, _HEIGHT_PX = 640, 320
"""Size of the plot, pixels."""

_POINTS = 200
"""Number of points of the line."""

_TICKS = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999)
"""Labeled percentiles of the axis."""


def latency_picture(result: LoadResult, *, title: str) -> str:
    """Return an SVG plot of latency by percentile; 90 %, 99 %, 99.9 % and so on are equally far apart.

    Args:
        result: The measured result; without answers, the plot only says so.
        title: Title of the plot.
    """
    summary = (
        f"{result.throughput_per_s:,.0f} answers/s over {result.took_s:.1f} s, "
        f"{result.connections} connections, {result.mode} loop"
    )
    plot = _plot(result.latencies) if result.latencies.count else _NOTHING
    return picture_file(plot, above=(title, summary), below=result.notes)


_NOTHING = element(
    "svg", element("text", "No request was answered with 200.", x=12, y=24), height=40
)


def _plot(latencies: Latencies) -> Html:
    most_ms = _round_up(latencies.max_s * 1e3)
    nines = max(2.0, math.log10(latencies.count))
    at = [nines * step / _POINTS for step in range(_POINTS + 1)]
    values_s = latencies.curve([100 * (1 - 10**-place) for place in at])
    points = [
        (place / nines, value_s * 1e3 / most_ms)
        for place, value_s in zip(at, values_s, strict=True)
    ]
    places = [
        (-math.log10(1 - percentile / 100) / nines, f"{percentile:g}") for percentile in _TICKS
    ]
    quarters = [(part / 4, f"{most_ms * part / 4:g} ms") for part in range(5)]
    return line_plot(
        [*points, (1.0, latencies.max_s * 1e3 / most_ms)],
        across=Axis(name="percentile", ticks=[tick for tick in places if tick[0] <= 1]),
        up=Axis(name="", ticks=quarters),
        size_px=(_WIDTH_PX, _HEIGHT_PX),
        title="latency by percentile",
    )


def _round_up(value: float) -> float:
    """Round up to 1, 2, 4 or 8 times a power of ten, because their quarters are short numbers."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-3)))
    return next(power * step for step in (1, 2, 4, 8, 10, 20) if power * step >= value)
