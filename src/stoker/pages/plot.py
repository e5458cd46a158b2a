"""A plot of a line with two axes, and a picture as an SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.pages.html import PICTURE_STYLE, Html, element

LEFT_PX, TOP_PX, RIGHT_PX, BELOW_PX = 64, 10, 24, 44
"""Space around the plot for the numbers and names of the axes."""

FILE_PX, LINE_PX = 760, 22
"""Width of a picture in its own file, and the height of a line of text in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One axis."""

    name: str
    """The quantity that it shows, with the unit; may be empty."""

    ticks: Sequence[tuple[float, str]]
    """Ticks: positions from 0 to 1 and their labels."""


def line_plot(
    points: Sequence[tuple[float, float]],
    *,
    across: Axis,
    up: Axis,
    size_px: tuple[int, int],
    title: str,
    diagonal: bool = False,
) -> Html:
    """Draw a line, with a dot at each point if there are at most 20.

    Args:
        points: Horizontal and vertical positions, from 0 to 1.
        across: The horizontal axis.
        up: The vertical axis.
        size_px: Width and height of the plot without its axes.
        title: Text for screen readers.
        diagonal: Whether to draw the diagonal, on which both axes are equal.
    """
    width, height = size_px
    places = [(width * x, height * (1 - y)) for x, y in points]
    dots = places if len(places) <= 20 else []
    drawn = [
        *(element("line", x1=width * x, x2=width * x, y1=0, y2=height) for x, _ in across.ticks),
        *(
            element("line", x1=0, x2=width, y1=height * (1 - y), y2=height * (1 - y))
            for y, _ in up.ticks
        ),
        *([element("line", x1=0, x2=width, y1=height, y2=0)] if diagonal else []),
        *(_label(width * x, height + 16, text) for x, text in across.ticks),
        *(_label(-8, height * (1 - y) + 4, text, "end") for y, text in up.ticks),
        _label(width / 2, height + 36, across.name),
        element("g", _label(0, 0, up.name), transform=f"translate(-48,{height / 2:g}) rotate(-90)"),
        element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in places)),
        *(element("circle", cx=x, cy=y, r=4, class_="s0") for x, y in dots),
    ]
    whole = (width + LEFT_PX + RIGHT_PX, height + TOP_PX + BELOW_PX)
    return element(
        "svg",
        element("g", *drawn, transform=f"translate({LEFT_PX},{TOP_PX})"),
        class_="plot",
        viewBox=f"0 0 {whole[0]} {whole[1]}",
        width=whole[0],
        height=whole[1],
        role="img",
        aria_label=title,
    )


def picture_file(picture: Html, *, above: Sequence[str] = (), below: Sequence[str] = ()) -> str:
    """A picture as an SVG file, on white, with lines of text above and below it.

    Args:
        picture: An SVG element whose height is a number.
        above: Lines of text above the picture; the first is the heading.
        below: Warnings below the picture, one per line.
    """
    height = float(picture.partition(' height="')[2].partition('"')[0])
    begin, end = 16 + LINE_PX * len(above), 16 + LINE_PX * len(above) + height
    lines = [
        *(element("text", text, x=12, y=24 + LINE_PX * row) for row, text in enumerate(above)),
        *(
            element("text", text, x=12, y=end + LINE_PX * (row + 1), class_="warning")
            for row, text in enumerate(below)
        ),
    ]
    whole = element(
        "svg",
        element("style", Html(PICTURE_STYLE)),
        element("rect", width="100%", height="100%", fill="#fff"),
        *lines,
        element("svg", picture, x=12, y=begin, width=FILE_PX - 24, height=height),
        xmlns="http://www.w3.org/2000/svg",
        width=FILE_PX,
        height=end + LINE_PX * len(below) + 16,
    )
    return f"{whole}\n"


def _label(x: float, y: float, text: str, anchor: str = "middle") -> Html:
    return element("text", text, x=x, y=y, text_anchor=anchor)
