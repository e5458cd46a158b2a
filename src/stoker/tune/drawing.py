"""Pictures as inline SVG: bars, a waterfall and a timeline. Every text in them is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH_PX = 900
"""Width of a picture."""

LABEL_PX = 260
"""Room for the names at the left."""

VALUE_PX = 190
"""Room for the values at the right."""

ROW_PX = 26
"""Height of a row."""

COLOURS = ("#3b7dbf", "#c0612b", "#1f8a4c", "#8a6d1f", "#7a4fa3", "#5b6b7b")
"""By the row's or the lane's number, round about; distinct also where red and green are not."""

SHADES = (
    "#1f8a4c", "#8a6d1f", "#3b7dbf", "#c0612b", "#5b6b7b", "#7a4fa3", "#c94f86", "#d5dce3",
)  # fmt: skip
"""Colors of a stacked bar by part number; the last one, light, is for unused time."""

GAIN, LOSS, TOTAL = "#1f8a4c", "#c0392b", "#3b7dbf"
"""Of a waterfall."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One row."""

    label: str
    """Its name."""

    value: float
    """Its length, in whatever unit; what is not finite is drawn as nothing."""

    shown: str = ""
    """What stands behind it; by default the value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that lasted."""

    lane: int
    """Number of its lane."""

    begin_s: float
    """From, seconds."""

    length_s: float
    """For so long, seconds."""


def waterfall_of_parts(bars: Sequence[Bar], *, title: str) -> str:
    """Parts of a whole: each begins where the one above it ends, and together they take the room.

    Args:
        bars: At least none: without any there is a picture of nothing.
        title: What a screen reader says of it.
    """
    values = [max(0.0, _finite(bar.value)) for bar in bars]
    # The largest floats have no sum, but as shares of the largest they have.
    most, begin = max(values, default=0.0), float(LABEL_PX)
    whole = sum(value / most for value in values) if most > 0 else 0.0
    rows = []
    for number, (bar, value) in enumerate(zip(bars, values, strict=True)):
        width = _room() * value / most / whole if whole > 0 else 0.0
        colour = COLOURS[number % len(COLOURS)]
        rows.append(
            _label(number, bar.label)
            + _box(begin, number, width, colour, tip=f"{bar.label}: {_shown(bar)}")
            + _text(begin + width + 6, number, _shown(bar))
        )
        begin += width
    return _svg("".join(rows), rows=len(bars), title=title)


def stacked_bar(bars: Sequence[Bar], *, title: str) -> str:
    """Parts of a whole in one bar, with a legend below.

    Args:
        bars: In the order of their colors; bars of zero length are left out.
        title: Text for screen readers.
    """
    values = [max(0.0, _finite(bar.value)) for bar in bars]
    most = max(values, default=0.0)
    whole = sum(value / most for value in values) if most > 0 else 0.0
    drawn, left, row = [], 0.0, 1
    for number, (bar, value) in enumerate(zip(bars, values, strict=True)):
        if value <= 0 or whole <= 0:
            continue
        colour = SHADES[number % len(SHADES)]
        width = WIDTH_PX * value / most / whole
        tip = f"{bar.label}: {_shown(bar)}"
        drawn.append(_box(left, 0, width, colour, tip=tip))
        drawn.append(_box(0, row, ROW_PX - 8, colour, tip=tip))
        drawn.append(_text(ROW_PX, row, f"{bar.label}: {_shown(bar)}"))
        left, row = left + width, row + 1
    return _svg("".join(drawn), rows=row, title=title)


def waterfall(bars: Sequence[Bar], *, title: str) -> str:
    """From the first value to the last: each bar between is the change that it made.

    Args:
        bars: Levels in their order; the first and the last are drawn from zero.
        title: What a screen reader says of it.
    """
    most = max((_finite(bar.value) for bar in bars), default=0.0)
    scale = _room() / most if most > 0 else 0.0
    rows, before = [], 0.0
    for number, bar in enumerate(bars):
        value = max(0.0, _finite(bar.value))
        is_total = number in (0, len(bars) - 1)
        low, high = (0.0, value) if is_total else (min(before, value), max(before, value))
        colour = TOTAL if is_total else (GAIN if value >= before else LOSS)
        tip = f"{bar.label}: {_shown(bar)}"
        rows.append(
            _label(number, bar.label)
            + _box(LABEL_PX + low * scale, number, (high - low) * scale, colour, tip=tip)
            + _text(LABEL_PX + high * scale + 6, number, _shown(bar))
        )
        before = value
    return _svg("".join(rows), rows=len(bars), title=title)


def timeline(spans: Sequence[Span], *, lanes: Sequence[str], title: str) -> str:
    """When what happened, a lane for each kind, from the first span's begin to the last one's end.

    Args:
        spans: In any order.
        lanes: Names; a span of another lane is left out.
        title: What a screen reader says of it.
    """
    seen = [span for span in spans if 0 <= span.lane < len(lanes) and _is_drawable(span)]
    first = min((span.begin_s for span in seen), default=0.0)
    last = max((span.begin_s + span.length_s for span in seen), default=0.0)
    scale = (WIDTH_PX - LABEL_PX) / (last - first) if last > first else 0.0
    boxes = [
        _box(
            LABEL_PX + (span.begin_s - first) * scale,
            span.lane,
            # What is too short to be seen is drawn all the same.
            max(0.5, span.length_s * scale),
            COLOURS[span.lane % len(COLOURS)],
            tip=f"{lanes[span.lane]}: {seconds(span.length_s)}",
        )
        for span in seen
    ]
    names = [_label(number, name) for number, name in enumerate(lanes)]
    axis = _text(LABEL_PX, len(lanes), "0") + _text(
        WIDTH_PX, len(lanes), seconds(last - first), anchor="end"
    )
    return _svg("".join([*names, *boxes, axis]), rows=len(lanes) + 1, title=title)


def seconds(value_s: float) -> str:
    """`1.23 s`, `45.6 ms` or `789 us`."""
    if value_s >= 1 or value_s == 0:
        return f"{value_s:.3g} s"
    return f"{value_s * 1e3:.3g} ms" if value_s >= 1e-3 else f"{value_s * 1e6:.3g} us"


def _is_drawable(span: Span) -> bool:
    return math.isfinite(span.begin_s) and math.isfinite(span.length_s) and span.length_s > 0


def _finite(value: float) -> float:
    # By what is smaller nothing can be divided.
    return value if math.isfinite(value) and abs(value) > 1e-200 else 0.0


def _shown(bar: Bar) -> str:
    return bar.shown or f"{bar.value:.4g}"


def _room() -> float:
    return WIDTH_PX - LABEL_PX - VALUE_PX


def _label(row: int, text: str) -> str:
    return _text(LABEL_PX - 8, row, text, anchor="end")


def _text(x: float, row: int, text: str, *, anchor: str = "start") -> str:
    y = row * ROW_PX + ROW_PX * 0.66
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" '
        f'fill="currentColor">{escape(text)}</text>'
    )


def _box(x: float, row: int, width: float, colour: str, *, tip: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{row * ROW_PX + 4}" width="{width:.1f}" height="{ROW_PX - 8}" '
        f'rx="2" fill="{colour}"><title>{escape(tip)}</title></rect>'
    )


def _svg(inside: str, *, rows: int, title: str) -> str:
    height = max(1, rows) * ROW_PX
    return (
        f'<svg viewBox="0 0 {WIDTH_PX} {height}" width="100%" role="img" '
        f'aria-label="{escape(title, quote=True)}" font-family="system-ui, sans-serif">'
        f"{inside}</svg>"
    )
