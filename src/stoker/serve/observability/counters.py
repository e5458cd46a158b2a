"""Counters, gauges and histograms of a server. Their numbers are in rows that all workers of the server can read."""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from stoker.serve.runtime.gil_yield import YieldGil, no_yield
from stoker.serve.runtime.series_limit import SeriesLimit
from stoker.serve.runtime.shared_counters import SharedCounters
from stoker.telemetry.catalogue.metric import Metric
from stoker.telemetry.exposition import Labels, label_text, sample

UNKNOWN_MODEL = "other"
"""The label of models that are not served, so that clients cannot create series, and of models beyond the limit of
series."""

OF_MODELS = frozenset({"model_name", "model", "version", "column"})
"""Labels whose values come from models."""

COUNTING = threading.Lock()
"""Lock of all numbers. Code that changes several numbers for a request takes it once."""

Values = tuple[str, ...]
"""Values of a metric's labels, in the order of the labels."""

Row = Sequence[float]
"""The numbers of one series."""


class Instrument:
    """Writes one metric: a row of numbers for each combination of labels."""

    def __init__(
        self,
        metric: Metric,
        *,
        cells: SharedCounters | None = None,
        limit: SeriesLimit | None = None,
    ) -> None:
        """Args: metric: from the catalogue; cells: storage of the numbers; limit: limits the series of models."""
        self.metric = metric
        self._cells = cells or SharedCounters()
        self._limit = limit or SeriesLimit()
        self._is_of_models = not OF_MODELS.isdisjoint(metric.labels)
        self._rows: dict[Labels, memoryview[float]] = {}

    @property
    def _width(self) -> int:
        """Number of values in a row."""
        return 1

    def combined(self, rows: Sequence[Row]) -> Row:
        """Combine the rows of several workers for the same series."""
        if len(rows) == 1:
            return rows[0]
        return [sum(numbers) for numbers in zip(*rows, strict=True)]

    def lines_of(self, values: Values, row: Row) -> list[str]:
        """Return the lines of one series in Prometheus's text format."""
        return [sample(self.metric.name, self._labels(values), row[0])]

    def lines(self) -> list[str]:
        """Return the samples of this process in Prometheus's text format, one per line."""
        found = grouped(self._cells.rows()).get(self.metric.name, {})
        return [line for values, row in found.items() for line in self.lines_of(values, row)]

    def total(self) -> float:
        """Return the sum of the first number of every row of this process."""
        with COUNTING:
            return sum(row[0] for row in self._rows.values())

    def _labels(self, values: Values) -> Labels:
        return tuple(zip(self.metric.labels, values, strict=True))

    def _row(self, labels: Labels) -> memoryview[float]:
        row = self._rows.get(labels)
        if row is None:
            row = self._rows[labels] = self._new_row(dict(labels))
        return row

    def _new_row(self, labels: Mapping[str, str]) -> memoryview[float]:
        values = self._in_order(labels)
        if self._is_of_models and not self._limit.admits(self._key(values)):
            values = self._beyond_limit(values)
        return self._cells.row(self._key(values), self._width)

    def _in_order(self, labels: Mapping[str, str]) -> Values:
        if labels.keys() != set(self.metric.labels):
            expected = ", ".join(self.metric.labels) or "no label"
            raise ValueError(f"{self.metric.name} has {expected}, not {', '.join(labels)}")
        return tuple(labels[name] for name in self.metric.labels)

    def _beyond_limit(self, values: Values) -> Values:
        return tuple(
            UNKNOWN_MODEL if name in OF_MODELS else value for name, value in self._labels(values)
        )

    def _key(self, values: Values) -> str:
        return json.dumps([self.metric.name, *values])


def grouped(
    rows: Mapping[str, Row], yield_gil: YieldGil = no_yield
) -> dict[str, dict[Values, Row]]:
    """Group the rows of a worker: metric's name -> values of its labels -> numbers.

    Args:
        rows: Key -> numbers.
        yield_gil: Called often.
    """
    found: dict[str, dict[Values, Row]] = {}
    for key, numbers in rows.items():
        yield_gil()
        name, *values = json.loads(key)
        found.setdefault(name, {})[tuple(values)] = numbers
    return found


class Count:
    """The number of one combination of labels, looked up once, so that frequent counting is fast."""

    __slots__ = ("_row",)

    def __init__(self, row: memoryview[float]) -> None:
        """Args: row: storage of the number."""
        self._row = row

    def add(self, amount: float = 1.0) -> None:
        """Add to the number."""
        with COUNTING:
            self._row[0] += amount

    def put(self, amount: float = 1.0) -> None:
        """Add to the number; the caller holds `COUNTING`."""
        self._row[0] += amount


class Spread:
    """The buckets of one combination of labels, looked up once, so that frequent counting is fast."""

    __slots__ = ("_bounds", "_row")

    def __init__(self, row: memoryview[float], bounds: tuple[float, ...]) -> None:
        """Args: row: storage of the buckets; bounds: upper bounds of the metric's buckets."""
        self._row, self._bounds = row, bounds

    def observe(self, value: float) -> None:
        """Count one value."""
        with COUNTING:
            self.put(value)

    def observe_all(self, values: Iterable[float]) -> None:
        """Count several values."""
        with COUNTING:
            for value in values:
                self.put(value)

    def put(self, value: float, times: int = 1) -> None:
        """Count a value `times` times; the caller holds `COUNTING`."""
        row = self._row
        row[1 + bisect_left(self._bounds, value)] += times
        row[0] += value * times


class Counter(Instrument):
    """A number that never decreases, per combination of labels."""

    def of(self, **labels: str) -> Count:
        """Return the number of these labels."""
        with COUNTING:
            return Count(self._row(tuple(labels.items())))

    def add(self, amount: float = 1.0, **labels: str) -> None:
        """Add to the number of these labels."""
        self.of(**labels).add(amount)


class Gauge(Instrument):
    """A current value, per combination of labels. Only values of running processes count."""

    def add(self, amount: float, **labels: str) -> None:
        """Add to the number of these labels."""
        with COUNTING:
            self._row(tuple(labels.items()))[0] += amount

    def reset(self, values: Values) -> None:
        """Set the number of a series to zero."""
        with COUNTING:
            self._row(self._labels(values))[0] = 0.0

    @contextmanager
    def held(self, **labels: str) -> Iterator[None]:
        """Add 1 for the duration of the `with` block."""
        self.add(1.0, **labels)
        try:
            yield
        finally:
            self.add(-1.0, **labels)


class Age(Gauge):
    """Seconds since an event last happened, per combination of labels. One of the labels is the worker."""

    def happened(self, at_s: float, **labels: str) -> None:
        """Record when the event happened, seconds of the monotonic clock, which all processes of a machine share."""
        with COUNTING:
            self._row(tuple(labels.items()))[0] = at_s

    def lines_of(self, values: Values, row: Row) -> list[str]:
        """Return the line of one series; empty if the event never happened."""
        return super().lines_of(values, [time.monotonic() - row[0]]) if row[0] else []


class Level(Gauge):
    """A value that can be set and removed, per combination of labels.

    The maximum over the workers counts. A row holds the value plus 1; 0 means that no value is set.
    """

    def set(self, value: float, **labels: str) -> None:
        """Set the value of these labels, at least 0. Beyond the limit of series, it is ignored."""
        with COUNTING:
            values = self._in_order(labels)
            if self._limit.admits(self._key(values)):
                self._row(self._labels(values))[0] = 1.0 + value

    def unset(self, **labels: str) -> None:
        """Remove the value of these labels, if it is set."""
        values = self._in_order(labels)
        if self._labels(values) in self._rows:
            self.reset(values)

    def combined(self, rows: Sequence[Row]) -> Row:
        """Return the row with the largest value."""
        return max(rows, key=lambda row: row[0])

    def lines_of(self, values: Values, row: Row) -> list[str]:
        """Return the line of one series; empty if no value is set."""
        return super().lines_of(values, [row[0] - 1.0]) if row[0] else []


class Histogram(Instrument):
    """Numbers of values in buckets, per combination of labels."""

    def __init__(
        self,
        metric: Metric,
        *,
        bounds: Sequence[float],
        cells: SharedCounters | None = None,
        limit: SeriesLimit | None = None,
    ) -> None:
        """Args: metric, cells, limit: see `Instrument`; bounds: the buckets' upper bounds, ascending, without +Inf."""
        super().__init__(metric, cells=cells, limit=limit)
        self._bounds = tuple(bounds)
        self._bound_texts = (*(f"{bound:g}" for bound in self._bounds), "+Inf")

    @property
    def _width(self) -> int:
        return len(self._bounds) + 2  # the sum, a count per bound, and a count for +Inf

    def of(self, **labels: str) -> Spread:
        """Return the buckets of these labels."""
        with COUNTING:
            return Spread(self._row(tuple(labels.items())), self._bounds)

    def observe(self, value: float, **labels: str) -> None:
        """Count one value."""
        self.of(**labels).observe(value)

    def observe_all(self, values: Iterable[float], **labels: str) -> None:
        """Count several values."""
        self.of(**labels).observe_all(values)

    def lines_of(self, values: Values, row: Row) -> list[str]:
        """Return the lines of one series, with cumulative buckets."""
        labels, name = label_text(self._labels(values)), self.metric.name
        begin = f"{name}_bucket{{{labels}{',' if labels else ''}le="
        lines, below = [], 0.0
        for text, count in zip(self._bound_texts, row[1:], strict=True):
            below += count
            lines.append(f'{begin}"{text}"}} {below:.16g}')
        lines.append(f"{name}_sum{{{labels}}} {row[0]:.16g}")
        lines.append(f"{name}_count{{{labels}}} {below:.16g}")
        return lines
