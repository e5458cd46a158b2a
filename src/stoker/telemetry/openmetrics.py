"""Converts Prometheus' text format to OpenMetrics 1.0 without changing the name of any metric.

OpenMetrics demands that the samples of a counter end in `_total`. A counter without that end, as TensorFlow
Serving's have, is of type `unknown` here; so are its counters that do end in it, so that all are alike.

Source: OpenMetrics specification 1.0, sections 4.1 (text format) and 5.1 (metric types).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""Content type of the answer to a scrape."""

END = "# EOF"
"""Last line."""

_TOTAL = "_total"


def as_openmetrics(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines in OpenMetrics, except the last one, `END`.

    Args:
        lines: lines in the text format of Prometheus, each without its end.
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
    """Write the bucket's bound as a float: `10` is `10.0`."""
    begin, mark, end = line.rpartition('le="')
    bound, quote, rest = end.partition('"')
    if not mark or not bound.isdigit():
        return line
    return f"{begin}{mark}{bound}.0{quote}{rest}"
