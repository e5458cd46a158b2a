"""Latency over percentile, as a picture."""

from __future__ import annotations

import math

from stoker.loadtest.latency import Latencies
from stoker.loadtest.result import LoadResult
from stoker.pages.html import Html, element
from stoker.pages.plot import Axis, line_plot, picture_file

_WIDTH_PX, _HEIGHT_PX = 640, 320
"""The plot's own size."""

_POINTS = 200
"""Points of the line."""

_TICKS = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999)
"""Percentiles that the axis names."""


def latency_picture(result: LoadResult, *, title: str) -> str:
    """An SVG: percentiles to the right, each next 9 as far as the one before, latency upwards.

    Args:
        result: What was measured; of no answers the picture says so.
        title: What was asked.
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
    """The next of 1, 2, 4, 8 times a power of ten, whose quarters are short numbers."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-3)))
    return next(power * step for step in (1, 2, 4, 8, 10, 20) if power * step >= value)
