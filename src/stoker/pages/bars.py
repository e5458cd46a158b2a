"""Bars, waterfalls and timelines as inline SVG.

Lengths are percentages and text has a fixed size: a picture fits any width, and stays readable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stoker.pages.html import Html, element, join
from stoker.pages.numbers import number, seconds

ROW_PX = 40
"""Height of a row: its text, and the bar below."""

TEXT_PX, BAR_PX = 14, 12
"""Position of the text of a row, and the height of its bar."""

LINE_PX = 22
"""Height of a line of a legend."""

SERIES = 8
"""Number of colors in the style sheet, `s0` to `s7`; the last one, a light color, is for unused time."""

MAX_LABEL = 40
"""Maximum length of a label, characters: it fits next to a value on a page 390 pixels wide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One row: a label, a value as text, and a bar."""

    label: str
    """Its name."""

    value: float
    """Its length, in any unit; a value that is not finite is drawn with length zero."""

    shown: str = ""
    """The value as text; by default the number."""

    @property
    def text(self) -> str:
        """The value as it is written."""
        return self.shown or number(self.value)

    @property
    def length(self) -> float:
        """The value to draw: zero if it is negative, not finite, or too small to divide by."""
        return self.value if math.isfinite(self.value) and self.value > 1e-200 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A time span in a timeline."""

    lane: int
    """Number of its lane."""

    begin_s: float
    """Its start, seconds."""

    length_s: float
    """Its duration, seconds."""


def waterfall_of_parts(bars: Sequence[Bar], *, title: str) -> Html:
    """Draw the parts of a whole: each begins where the previous one ends; together they take the full width.

    Args:
        bars: The parts.
        title: Text for screen readers.
    """
    rows, begin = [], 0.0
    for row, (bar, share) in enumerate(zip(bars, _shares(bars), strict=True)):
        rows.append(_row(row, bar, begin, share, kind=f"s{row % (SERIES - 1)}"))
        begin += share
    return _picture(rows, height=ROW_PX * len(bars), title=title)


def waterfall(bars: Sequence[Bar], *, title: str) -> Html:
    """Draw a waterfall from the first value to the last: each bar between them is a change.

    Args:
        bars: Levels in order; the first and the last are drawn from zero.
        title: Text for screen readers.
    """
    most = max((bar.length for bar in bars), default=0.0) or 1.0
    rows, before = [], 0.0
    for row, bar in enumerate(bars):
        level = bar.length / most
        is_total = row in (0, len(bars) - 1)
        low, high = (0.0, level) if is_total else sorted((before, level))
        kind = "s0" if is_total else ("gain" if level >= before else "loss")
        rows.append(_row(row, bar, low, high - low, kind=kind))
        before = level
    return _picture(rows, height=ROW_PX * len(bars), title=title)


def stacked_bar(bars: Sequence[Bar], *, title: str) -> Html:
    """Draw the parts of a whole in one bar, with a legend below.

    Args:
        bars: In the order of their colors; bars of zero length are left out.
        title: Text for screen readers.
    """
    drawn, begin, top = [], 0.0, float(LINE_PX + 8)
    for place, (bar, share) in enumerate(zip(bars, _shares(bars), strict=True)):
        if not share:
            continue
        kind, tip = f"s{place % SERIES}", f"{bar.label}: {bar.text}"
        drawn.append(_box(begin, share, y=0, height=LINE_PX, kind=kind, tip=tip))
        swatch = element("rect", x=0, y=top, width=12, height=12, class_=kind, rx=2)
        drawn += [swatch, _text(20, top + 10, tip)]
        begin, top = begin + share, top + LINE_PX
    return _picture(drawn, height=top, title=title)


def timeline(spans: Sequence[Span], *, lanes: Sequence[str], title: str) -> Html:
    """Draw when each span happened, from the start of the first to the end of the last.

    Args:
        spans: In any order.
        lanes: Names of the lanes; a span whose lane has no name here is left out.
        title: Text for screen readers.
    """
    seen = [span for span in spans if 0 <= span.lane < len(lanes) and _is_drawable(span)]
    first = min((span.begin_s for span in seen), default=0.0)
    last = max((span.begin_s + span.length_s for span in seen), default=0.0)
    whole_s = last - first or 1.0
    labels = [part for row, name in enumerate(lanes) for part in _track(row, name)]
    boxes = [
        _box(
            (span.begin_s - first) / whole_s,
            # A span that is too short to be visible is still drawn.
            max(0.001, span.length_s / whole_s),
            y=ROW_PX * span.lane + TEXT_PX + 6,
            kind=f"s{span.lane % (SERIES - 1)}",
            tip=f"{lanes[span.lane]}: {seconds(span.length_s)}",
        )
        for span in seen
    ]
    bottom = ROW_PX * len(lanes) + TEXT_PX
    axis = [_text(0, bottom, "0"), _text("100%", bottom, seconds(last - first))]
    return _picture([*labels, *boxes, *axis], height=bottom + 6, title=title)


def histogram(counts: Sequence[int], *, title: str) -> Html:
    """Draw upright bars next to each other, as wide as the page allows.

    Args:
        counts: Height of each bar; at least one is above zero.
        title: Text for screen readers.
    """
    width, most = 1 / len(counts), max(counts)
    drawn = [
        element(
            "rect",
            x=_percent(place * width + width * 0.05),
            y=_percent(1 - count / most),
            width=_percent(width * 0.9),
            height=_percent(count / most),
            class_="s0",
        )
        for place, count in enumerate(counts)
        if count
    ]
    return _picture(drawn, height=72, title=title)


def meter(value: float, *, most: float) -> Html:
    """Draw a bar for a table cell, next to the value.

    Args:
        value: Length of the bar, not negative.
        most: Length of the longest bar in the table, in the same unit.
    """
    share = value / most if most else 0.0
    box = element("rect", width=_percent(share), height="100%", rx=2, class_="s0")
    return element("svg", box, class_="meter", height=12, aria_hidden="true")


def _shares(bars: Sequence[Bar]) -> list[float]:
    """The share of each part; all zero if the sum is zero."""
    most = max((bar.length for bar in bars), default=0.0) or 1.0
    # The sum of very large floats may overflow; the sum of the floats divided by the largest does not.
    whole = sum(bar.length / most for bar in bars) or 1.0
    return [bar.length / most / whole for bar in bars]


def _is_drawable(span: Span) -> bool:
    return math.isfinite(span.begin_s) and math.isfinite(span.length_s) and span.length_s > 0


def _track(row: int, label: str, shown: str = "") -> list[Html]:
    """The label and value of a row, and the light line on which its bar is drawn."""
    top = ROW_PX * row
    # The full text of a long label is shown as a tooltip.
    short = label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"
    value = [_text("100%", top + TEXT_PX, shown)] if shown else []
    line = element(
        "rect", x=0, y=top + TEXT_PX + 6, width="100%", height=BAR_PX, rx=2, class_="track"
    )
    return [_text(0, top + TEXT_PX, short), *value, line]


def _row(row: int, bar: Bar, begin: float, share: float, *, kind: str) -> Html:
    tip = f"{bar.label}: {bar.text}"
    box = _box(begin, share, y=ROW_PX * row + TEXT_PX + 6, kind=kind, tip=tip)
    return join([*_track(row, bar.label, bar.text), box])


def _box(
    begin: float, share: float, *, y: float, kind: str, tip: str, height: float = BAR_PX
) -> Html:
    # Rounding must not push the end out of the picture.
    share = min(share, 1 - begin)
    return element(
        "rect",
        element("title", tip),
        x=_percent(begin),
        y=y,
        width=_percent(max(share, 0.0)),
        height=height,
        rx=2,
        class_=kind,
    )


def _text(x: float | str, y: float, text: str) -> Html:
    end = {"text_anchor": "end"} if x == "100%" else {}
    return element("text", text, x=x, y=y, **end)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _picture(parts: Iterable[str], *, height: float, title: str) -> Html:
    return element("svg", *parts, width="100%", height=max(height, 1), role="img", aria_label=title)
