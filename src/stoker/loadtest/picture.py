"""Latency over percentile, as a picture."""

from __future__ import annotations

import html
import math

from stoker.loadtest.latency import Latencies
from stoker.loadtest.result import LoadResult

_WIDTH_PX, _HEIGHT_PX = 640, 320
"""The plot's own size."""

_LEFT_PX, _TOP_PX, _BELOW_PX = 70, 60, 50
"""Room for the axes' numbers, the heading and the axis' name."""

_POINTS = 200
"""Points of the line."""

_TICKS = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999)
"""Percentiles that the axis names."""

_STYLE = (
    "text{font:12px sans-serif;fill:#444}.title{font-size:15px;fill:#111}"
    ".grid{stroke:#ddd}.line{fill:none;stroke:#1f6feb;stroke-width:2}.note{fill:#b3261e}"
)


def latency_picture(result: LoadResult, *, title: str) -> str:
    """An SVG: percentiles to the right, each next 9 as far as the one before, latency upwards.

    Args:
        result: What was measured; of no answers the picture says so.
        title: What was asked.
    """
    latencies = result.latencies
    below_px = _BELOW_PX + 16 * len(result.notes)
    width, height = _WIDTH_PX + _LEFT_PX + 30, _HEIGHT_PX + _TOP_PX + below_px
    body = _plot(latencies) if latencies.count else "<text>no answer of 200</text>"
    notes = "".join(
        f'<text class="note" x="0" y="{_HEIGHT_PX + _BELOW_PX + 16 * n}">{html.escape(note)}</text>'
        for n, note in enumerate(result.notes)
    )
    said = (
        f"{result.throughput_per_s:,.0f} answers/s over {result.took_s:.1f} s, "
        f"{result.connections} connections, {result.mode} loop"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" '
        f'aria-label="latency by percentile"><style>{_STYLE}</style>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text class="title" x="{_LEFT_PX}" y="24">{html.escape(title)}</text>'
        f'<text x="{_LEFT_PX}" y="44">{html.escape(said)}</text>'
        f'<g transform="translate({_LEFT_PX},{_TOP_PX})">{body}{notes}</g></svg>\n'
    )


def _plot(latencies: Latencies) -> str:
    most_ms = _round_up(latencies.max_s * 1e3)
    nines = max(2.0, math.log10(latencies.count))
    at = [nines * number / _POINTS for number in range(_POINTS + 1)]
    values_s = latencies.curve([100 * (1 - 10**-place) for place in at])
    points = [
        f"{_x(place, nines):.1f},{_y(value_s * 1e3, most_ms):.1f}"
        for place, value_s in zip(at, values_s, strict=True)
    ]
    points.append(f"{_WIDTH_PX:.1f},{_y(latencies.max_s * 1e3, most_ms):.1f}")
    return _axes(most_ms, nines) + f'<polyline class="line" points="{" ".join(points)}"/>'


def _x(nines: float, most: float) -> float:
    return _WIDTH_PX * nines / most


def _y(value_ms: float, most_ms: float) -> float:
    return _HEIGHT_PX * (1 - value_ms / most_ms)


def _axes(most_ms: float, nines: float) -> str:
    parts = []
    for percent in _TICKS:
        at = -math.log10(1 - percent / 100)
        if at > nines:
            break
        x = _x(at, nines)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{_HEIGHT_PX}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT_PX + 16}" text-anchor="middle">{percent:g}</text>'
        )
    for part in range(5):
        value_ms = most_ms * part / 4
        y = _y(value_ms, most_ms)
        parts.append(f'<line class="grid" x1="0" y1="{y:.1f}" x2="{_WIDTH_PX}" y2="{y:.1f}"/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{value_ms:g} ms</text>')
    parts.append(
        f'<text x="{_WIDTH_PX // 2}" y="{_HEIGHT_PX + 34}" text-anchor="middle">percentile</text>'
    )
    return "".join(parts)


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 8 times a power of ten, whose quarters are short numbers."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-3)))
    return next(power * step for step in (1, 2, 4, 8, 10, 20) if power * step >= value)
