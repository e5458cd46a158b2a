"""Waterfall, split and timeline: SVG made of numbers and escaped names alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH_PX, ROW_PX, LABEL_PX, VALUE_PX = 860, 26, 250, 210
"""Of a picture, of a row of it, of the names on its left and of the numbers on its right."""

_BLUE, _GREEN, _GREY, _ORANGE = "#3b7dbf", "#1f8a4c", "#a9b6c2", "#d9822b"

PARTS = {
    "input_wait": ("waiting for input", _ORANGE),
    "transfer": ("transfer to the device", "#8e6bbf"),
    "compute": ("compute", _GREEN),
    "communication": ("exchange of gradients", "#2a9d8f"),
    "python": ("Python between calls", "#c0392b"),
    "checkpoint": ("checkpoints", "#7f8c8d"),
    "rest": ("rest: the input's work beside the step", "#e5b567"),
}
"""Part of a step -> what it is called, and its colour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """One step of a waterfall."""

    name: str
    value: float
    """What has been reached with it."""

    said: str
    """What stands at its right."""


def waterfall(rises: Sequence[Rise], *, title: str) -> str:
    """From first to last: what each step added to what was there."""
    most = max((rise.value for rise in rises), default=0.0) or 1.0
    room = WIDTH_PX - LABEL_PX - VALUE_PX
    rows, before = [], 0.0
    for number, rise in enumerate(rises):
        whole = number in (0, len(rises) - 1)
        begin, end = (0.0, rise.value) if whole else sorted((before, rise.value))
        colour = _GREY if number == 0 else _BLUE if whole else _GREEN
        rows.append(
            _row(
                number,
                name=rise.name,
                said=rise.said,
                bars=[(begin / most * room, (end - begin) / most * room, colour)],
            )
        )
        before = rise.value
    return _picture(rows, title=title)


def split(shares: Mapping[str, float], step_s: float, *, title: str) -> str:
    """The parts of a step, one under the other, each where the one above ends."""
    room = WIDTH_PX - LABEL_PX - VALUE_PX
    rows, begin = [], 0.0
    for number, (part, share) in enumerate(shares.items()):
        name, colour = PARTS[part]
        said = f"{shown_s(share * step_s)}  {share:.1%}"
        rows.append(_row(number, name=name, said=said, bars=[(begin * room, share * room, colour)]))
        begin += share
    return _picture(rows, title=title)


def timeline(calls: Sequence[Mapping[str, Any]], *, title: str) -> str:
    """Calls of training as they followed each other: waiting, then steps; gaps are Python."""
    if not calls:
        return ""
    end_s = max(call["end_s"] for call in calls)
    room = WIDTH_PX - LABEL_PX - VALUE_PX
    rows = []
    for number, call in enumerate(calls):
        begin, wait = call["begin_s"] / end_s * room, call["wait_s"] / end_s * room
        length = (call["end_s"] - call["begin_s"]) / end_s * room
        wait = min(wait, length)
        bars = [(begin, wait, _ORANGE), (begin + wait, length - wait, _GREEN)]
        took = call["end_s"] - call["begin_s"]
        said = f"{shown_s(took)}, waited {shown_s(call['wait_s'])}"
        rows.append(_row(number, name=f"call of {call['steps']} steps", said=said, bars=bars))
    return _picture(rows, title=title)


def shown_s(seconds: float) -> str:
    """`1.23 s`, `4.56 ms`, `7.89 us`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _row(number: int, *, name: str, said: str, bars: Sequence[tuple[float, float, str]]) -> str:
    top = number * ROW_PX
    drawn = "".join(
        f'<rect x="{LABEL_PX + begin:.1f}" y="{top + 5}" width="{max(length, 1.0):.1f}" '
        f'height="{ROW_PX - 10}" rx="2" fill="{colour}"/>'
        for begin, length, colour in bars
    )
    middle = top + ROW_PX / 2 + 4
    return (
        f'<text x="{LABEL_PX - 10}" y="{middle}" text-anchor="end">{escape(name)}</text>'
        f'{drawn}<text x="{WIDTH_PX - VALUE_PX + 12}" y="{middle}">{escape(said)}</text>'
    )


def _picture(rows: Sequence[str], *, title: str) -> str:
    height = len(rows) * ROW_PX + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {height}" '
        f'width="100%" role="img" font-family="system-ui, sans-serif" font-size="13" '
        f'fill="#1c2733"><title>{escape(title)}</title>' + "".join(rows) + "</svg>"
    )
