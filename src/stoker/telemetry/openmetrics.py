"""Converts Prometheus' text format to OpenMetrics 1.0 without changing the name of any metric.

OpenMetrics requires that the names of a counter's samples end with `_total`. TensorFlow Serving has counters without
this ending, so all of its counters get the type `unknown` here, even the few with the ending.

Source: OpenMetrics specification 1.0, sections 4.1 (text format) and 5.1 (metric types).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""Content type of the answer to a scrape."""

END = "# EOF"
"""Last line of a text in OpenMetrics."""

_TOTAL = "_total"


def as_openmetrics(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines in the format OpenMetrics, without the last line `END`.

    Args:
        lines: Lines in the text format of Prometheus, without line breaks.
    """
    for line in lines:
        if line.startswith("# "):
            yield _header(line)
        elif "_bucket{" in line:
            yield _bucket(line)
        else:
            yield line


def _header(line: str) -> str:
    keyword, name, rest = line[2:].split(" ", 2)
    is_counter = name.endswith(_TOTAL) and not name.startswith(":")
    family = name.removesuffix(_TOTAL) if is_counter else name
    if keyword == "TYPE" and rest == "counter" and not is_counter:
        rest = "unknown"
    if keyword == "HELP":
        rest = rest.replace('"', '\\"')
    return f"# {keyword} {family} {rest}"


def _bucket(line: str) -> str:
    """Write the bound of a histogram's bucket as a float: `10` becomes `10.0`."""
    begin, mark, end = line.rpartition('le="')
    bound, quote, rest = end.partition('"')
    if not mark or not bound.isdigit():
        return line
    return f"{begin}{mark}{bound}.0{quote}{rest}"
