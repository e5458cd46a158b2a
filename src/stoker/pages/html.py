"""HTML and SVG from Python: every string is escaped unless it is already `Html`.

`page` returns a whole report: one file without scripts, which loads no other file.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def html(text: str) -> Html:
    """The text as HTML: `Html` as it is, any other string escaped."""
    return text if isinstance(text, Html) else Html(escape(text))


def join(parts: Iterable[str], between: str = "") -> Html:
    """The parts as one piece of HTML.

    Args:
        parts: `Html`, or plain text, which is escaped.
        between: Separator, in the same form.
    """
    return Html(html(between).join(map(html, parts)))


def element(name: str, *inside: str, **attributes: str | float) -> Html:
    """One HTML or SVG element.

    Args:
        name: Its tag.
        inside: Its content: `Html`, or plain text, which is escaped.
        attributes: Attribute name -> value. Values are escaped; numbers are rounded to two decimals.
            The name `class_` is written as `class`, and `aria_label` as `aria-label`.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{written}>{join(inside)}</{name}>")


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def paragraph(*inside: str, quiet: bool = False) -> Html:
    """A paragraph; `quiet` styles it as a note."""
    return element("p", *inside, **({"class_": "quiet"} if quiet else {}))


def section(title: str, *inside: str) -> Html:
    """A part of a page with a heading; empty if its whole content is empty."""
    if not any(inside):
        return Html()
    return Html("\n" + element("section", element("h2", title), *inside))


def badge(word: str, *, kind: str) -> Html:
    """A word in a colored box.

    Args:
        word: The word.
        kind: `good`, `bad` or `warning`.
    """
    return element("span", word, class_=f"badge {kind}")


_FOLDER = Path(__file__).parent

PICTURE_STYLE = (_FOLDER / "pictures.css").read_text(encoding="utf-8")
"""Style sheet of a picture that has an SVG file of its own."""

PAGE_STYLE = PICTURE_STYLE + (_FOLDER / "page.css").read_text(encoding="utf-8")
"""Style sheet of a page."""


def page(title: str, parts: Iterable[str], *, next_to_title: str = "") -> str:
    """A complete page.

    Args:
        title: The heading, plain text.
        parts: `Html`, or plain text, which is escaped.
        next_to_title: Content to place next to the heading, e.g. a badge.
    """
    heading = element("h1", title, *([" ", next_to_title] if next_to_title else []))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{element('title', title)}{element('style', Html(PAGE_STYLE))}</head><body>\n"
        f"{join([heading, *parts], Html(chr(10)))}\n</body></html>\n"
    )
