"""What the pages of `tune` and `profile` are made of: one file each, no script, nothing loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from stoker.tune.drawing import Bar, seconds, waterfall_of_parts
from stoker.tune.profile import PARTS, Split

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; margin: 2rem auto; max-width: 60rem;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.4rem; }
h3 { font-size: 1rem; margin-bottom: .3rem; } p.sub { color: #5b6b7b; margin-top: .2rem; }
section { border-left: 4px solid #c0612b; padding: .1rem 0 .1rem 1rem; margin: 1.2rem 0; }
pre { background: #f2f5f8; padding: .6rem .8rem; overflow-x: auto; border-radius: .3rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: #5b6b7b; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #e4e9ee; vertical-align: top;
  overflow-wrap: anywhere; }
th { overflow-wrap: normal; }
td.n, th.n { text-align: right; white-space: nowrap; }
"""


def page(heading: str, parts: Iterable[str]) -> str:
    """A whole page.

    Args:
        heading: Plain text.
        parts: HTML, in which every name is escaped already.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy"\n'
        " content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(heading)}</title><style>{STYLE}</style></head><body>\n"
        f"<h1>{escape(heading)}</h1>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain texts; what begins with a digit stands right."""

    def cell(tag: str, text: str) -> str:
        number = ' class="n"' if text[:1].isdigit() else ""
        return f"<{tag}{number}>{escape(text)}</{tag}>"

    lines = ["<tr>" + "".join(cell("td", text) for text in row) + "</tr>" for row in rows]
    titles = "".join(cell("th", text) for text in head)
    return f"<table><tr>{titles}</tr>\n" + "\n".join(lines) + "</table>"


def paragraph(text: str) -> str:
    """Plain text."""
    return f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    """A section's."""
    return f"<h2>{escape(text)}</h2>"


def parts_of_a_step(split: Split, *, title: str) -> str:
    """A waterfall: each part of a step from where the one before it ends."""
    bars = [
        Bar(label=PARTS[part], value=share, shown=f"{seconds(share * split.step_s)}, {share:.1%}")
        for part, share in split.shares().items()
    ]
    return waterfall_of_parts(bars, title=title)
