"""A report: one HTML file without a script that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.pages.html import Html, element, join
from stoker.pages.style import PAGE_STYLE


def page(title: str, parts: Iterable[str], *, beside: str = "") -> str:
    """A whole page.

    Args:
        title: Its heading, plain text.
        parts: `Html`, or plain text that becomes escaped.
        beside: What stands next to the heading, e.g. a badge.
    """
    heading = element("h1", title, *([" ", beside] if beside else []))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{element('title', title)}{element('style', Html(PAGE_STYLE))}</head><body>\n"
        f"{join([heading, *parts], Html(chr(10)))}\n</body></html>\n"
    )
