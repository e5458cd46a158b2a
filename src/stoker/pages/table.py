"""Tables: the kind of a column decides how its cells are aligned and where they wrap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stoker.pages.html import Html, element, html, join

Row = Sequence[str]
"""A cell: `Html`, or plain text, which is escaped."""


class Number(str):
    """Title of a column of numbers: aligned right, on one line."""

    __slots__ = ()


class Prose(str):
    """Title of a column of sentences."""

    __slots__ = ()


class Code(str):
    """Title of a column of names from a program."""

    __slots__ = ()


class Fill(str):
    """Title of a column that takes the remaining width."""

    __slots__ = ()


def table(columns: Sequence[str], rows: Iterable[Row], *, class_: str = "") -> Html:
    """A table in its own box, which scrolls sideways if the page is too narrow.

    Args:
        columns: The titles: `Number`, `Prose`, `Code` or `Fill`; any other is a column of names,
            at the left, which break only where they are very long. No head if all are empty.
        rows: Each with as many cells as columns; without rows nothing is drawn.
        class_: A further class for the style.
    """
    kinds = [_KINDS.get(type(title), "text") for title in columns]
    body = [
        element("tr", *(_cell("td", *each) for each in zip(kinds, row, strict=True)))
        for row in rows
    ]
    if not body:
        return Html()
    heads = (_cell("th", *each) for each in zip(kinds, columns, strict=True))
    head = [element("thead", element("tr", *heads))] if any(columns) else []
    whole = element("table", *head, element("tbody", join(body, Html("\n"))))
    # The box can have the focus, so that the keyboard scrolls it too.
    return element("div", whole, class_=f"scroll {class_}".rstrip(), tabindex=0)


def facts(rows: Iterable[Row], values: str = Prose()) -> Html:
    """Names and their values, without a head; the values are `Prose` or `Number`."""
    return table(["", values], rows, class_="facts")


_KINDS: dict[type[str], str] = {Number: "number", Prose: "prose", Code: "code", Fill: "fill"}
"""Title -> the style's class of its column."""


def _cell(tag: str, kind: str, content: str) -> Html:
    # A box inside the cell is as wide as its content, up to a limit: the cell itself has no style for that.
    inside = element("div", content) if kind in ("text", "code") else html(content)
    return element(tag, inside, class_=kind)
