"""Tables: the kind of a column decides how its cells are aligned and where they wrap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stoker.pages.html import Html, element, html, join

Row = Sequence[str]
"""The cells of a row: each is `Html`, or plain text, which is escaped."""


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
        columns: The titles. Their type (`Number`, `Prose`, `Code` or `Fill`) says what a column contains; a
            plain string is the title of a column of names, aligned left, which break only if they are very
            long. If all titles are empty, the table has no head.
        rows: Each with as many cells as columns; without rows, the result is empty.
        class_: An additional CSS class.
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
    # `tabindex` lets the box have the keyboard's focus, so that keys can scroll it.
    return element("div", whole, class_=f"scroll {class_}".rstrip(), tabindex=0)


def facts(rows: Iterable[Row], values: str = Prose()) -> Html:
    """Names and their values, without a head; the values are `Prose` or `Number`."""
    return table(["", values], rows, class_="facts")


_KINDS: dict[type[str], str] = {Number: "number", Prose: "prose", Code: "code", Fill: "fill"}
"""Type of a title -> CSS class of the cells in its column."""


def _cell(tag: str, kind: str, content: str) -> Html:
    # CSS has no maximum width for a table cell, so a box inside the cell limits the width of its content.
    inside = element("div", content) if kind in ("text", "code") else html(content)
    return element(tag, inside, class_=kind)
