"""The server's metrics, by TensorFlow Serving's names and in the text format of Prometheus.

prometheus-client cannot write them: it adds `_total` to the name of every counter.

Workers count into files of one folder; the worker that is scraped adds them up.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from stoker.serve.runtime.machine import gpu_families, resident_bytes
from stoker.serve.runtime.shared_counters import SharedCounters, read_counters
from stoker.telemetry.exposition import Labels, header, sample

LATENCY_BOUNDS_US = tuple(10 * 1.8**power for power in range(33))
"""Upper bounds of the latency buckets, microseconds; TensorFlow Serving's own."""

COUNT_BOUNDS = tuple(float(2**power) for power in range(14))
"""Upper bounds of the buckets for rows and batches; TensorFlow Serving's own without the last."""

UNKNOWN_MODEL = "other"
"""The label of models that are not served: clients must not be able to create series."""

MOST_ROWS = 20_000
"""Most rows of a worker over all metrics, enough for some thousand models. After that, a new model counts
as `UNKNOWN_MODEL`: rows are never removed, and adding and removing models must not fill the memory."""

_OF_MODELS = ("model_name", "model", "version")

FILE_SUFFIX = ".metrics"
"""Suffix of a worker's file."""

COUNTING = threading.Lock()
"""Lock of all numbers; code that counts several things of a request takes it once."""


class _Metric:
    """A metric: a row of numbers for each combination of labels."""

    kind = ""

    def __init__(self, name: str, help_text: str, *, cells: SharedCounters | None = None) -> None:
        """Args: name: the full name; help_text: one line; cells: storage of the numbers."""
        self.name, self.help_text = name, help_text
        self._cells = cells or SharedCounters()
        self._rows: dict[Labels, memoryview[float]] = {}

    @property
    def _width(self) -> int:
        """Numbers per row."""
        return 1

    def lines(self) -> list[str]:
        """Return the samples of this process, one per line."""
        return self.lines_of(self.found_in(self._cells.rows()))

    def found_in(self, rows: dict[str, list[float]]) -> dict[Labels, list[float]]:
        """Return this metric's rows among all rows, by labels."""
        found = {}
        for key, values in rows.items():
            name, *labels = json.loads(key)
            if name == self.name:
                found[tuple((label, value) for label, value in labels)] = values
        return found

    def lines_of(self, rows: dict[Labels, list[float]]) -> list[str]:
        """Return the samples of some rows, one per line."""
        return [sample(self.name, labels, values[0]) for labels, values in rows.items()]

    def total(self) -> float:
        """Return the sum of the first number of every row of this process."""
        with COUNTING:
            return sum(row[0] for row in self._rows.values())

    def _row(self, labels: Labels) -> memoryview[float]:
        row = self._rows.get(labels)
        if row is None:
            if not self._cells.has_room(self._key(labels), most=MOST_ROWS):
                labels = tuple(
                    (label, UNKNOWN_MODEL if label in _OF_MODELS else value)
                    for label, value in labels
                )
            row = self._rows[labels] = self._cells.row(self._key(labels), self._width)
        return row

    def _key(self, labels: Labels) -> str:
        return json.dumps([self.name, *labels])


class Count:
    """The number of one combination of labels, looked up once for frequent counting."""

    __slots__ = ("_row",)

    def __init__(self, row: memoryview[float]) -> None:
        """Args: row: its storage."""
        self._row = row

    def add(self, amount: float = 1.0) -> None:
        """Add to the number."""
        with COUNTING:
            self._row[0] += amount

    def put(self, amount: float = 1.0) -> None:
        """Add to the number; the caller holds `COUNTING`."""
        self._row[0] += amount


class Spread:
    """The buckets of one combination of labels, looked up once for frequent counting."""

    __slots__ = ("_bounds", "_row")

    def __init__(self, row: memoryview[float], bounds: tuple[float, ...]) -> None:
        """Args: row: their storage; bounds: the metric's."""
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


class Counter(_Metric):
    """A number per combination of labels that never decreases."""

    kind = "counter"

    def of(self, **labels: str) -> Count:
        """Return the number of these labels."""
        with COUNTING:
            return Count(self._row(tuple(labels.items())))

    def add(self, amount: float = 1.0, **labels: str) -> None:
        """Add to the number of these labels."""
        self.of(**labels).add(amount)


class Gauge(_Metric):
    """A current value per combination of labels; only living processes count."""

    kind = "gauge"

    def add(self, amount: float, **labels: str) -> None:
        """Add to the number of these labels."""
        with COUNTING:
            self._row(tuple(labels.items()))[0] += amount

    @contextmanager
    def held(self, **labels: str) -> Iterator[None]:
        """Count one more while the context is open."""
        self.add(1.0, **labels)
        try:
            yield
        finally:
            self.add(-1.0, **labels)


class Age(Gauge):
    """How long ago something last happened, seconds, per combination of labels; those of workers differ."""

    def happened(self, at_s: float, **labels: str) -> None:
        """It happened at a time of the monotonic clock, which all processes of a machine share."""
        with COUNTING:
            self._row(tuple(labels.items()))[0] = at_s

    def lines_of(self, rows: dict[Labels, list[float]]) -> list[str]:
        """Return the samples of some rows, one per line; none of what has not happened."""
        now_s = time.monotonic()
        return super().lines_of({key: [now_s - row[0]] for key, row in rows.items() if row[0]})


class Histogram(_Metric):
    """Counts of values per bucket, per combination of labels."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        help_text: str,
        *,
        bounds: Sequence[float] = LATENCY_BOUNDS_US,
        cells: SharedCounters | None = None,
    ) -> None:
        """Args: name, help_text, cells: as of every metric; bounds: ascending, without +Inf."""
        super().__init__(name, help_text, cells=cells)
        self._bounds = tuple(bounds)

    @property
    def _width(self) -> int:
        return len(self._bounds) + 2  # the sum, and a count per bound and for +Inf

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

    def lines_of(self, rows: dict[Labels, list[float]]) -> list[str]:
        """Return the samples of some rows, one per line, with cumulative buckets."""
        return [line for labels, row in rows.items() for line in self._of(labels, row)]

    def _of(self, labels: Labels, row: Sequence[float]) -> list[str]:
        texts = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        lines, below = [], 0.0
        for text, count in zip(texts, row[1:], strict=True):
            below += count
            lines.append(sample(f"{self.name}_bucket", (*labels, ("le", text)), below))
        lines.append(sample(f"{self.name}_sum", labels, row[0]))
        lines.append(sample(f"{self.name}_count", labels, below))
        return lines


class ServeMetrics:
    """All metrics of a server, over all its workers."""

    def __init__(self, folder: Path | None = None, *, worker: int | str = 0) -> None:
        """Start from zero, or continue the counts of a replaced worker.

        Args:
            folder: Folder of all workers' counts; None counts in memory, for this process alone.
            worker: The number of this worker; no other living worker has it.
        """
        self._folder = folder
        self.worker = worker
        self._cells = SharedCounters(None if folder is None else folder / f"{worker}{FILE_SUFFIX}")
        counter, gauge = partial(Counter, cells=self._cells), partial(Gauge, cells=self._cells)
        latency = partial(Histogram, bounds=LATENCY_BOUNDS_US, cells=self._cells)
        sizes = partial(Histogram, bounds=COUNT_BOUNDS, cells=self._cells)
        serving, batching = ":tensorflow:serving:", ":tensorflow:serving:batching_session:"
        self.request_count = counter(f"{serving}request_count", "Requests by model and status.")
        self.request_latency = latency(
            f"{serving}request_latency", "Time to answer a request, microseconds."
        )
        self.runtime_latency = latency(
            f"{serving}runtime_latency", "Time inside the model, microseconds."
        )
        self.example_counts = sizes(
            f"{serving}request_example_counts", "Examples per request to classify or regress."
        )
        self.example_count_total = counter(
            f"{serving}request_example_count_total", "Examples classified or regressed."
        )
        self.version_request_count = counter(
            "stoker_request_count", "Requests by model, the version that was asked, and status."
        )
        self.version_request_latency = latency(
            "stoker_request_latency", "Time of a version to answer a request, microseconds."
        )
        self.queuing_latency = latency(
            f"{batching}queuing_latency", "Time that a request waits for its batch, microseconds."
        )
        self.wrapped_run_count = counter(f"{batching}wrapped_run_count", "Batches that were run.")
        self.input_batch_size = sizes(f"{batching}input_batch_size", "Rows of a request.")
        self.processed_batch_size = sizes(f"{batching}processed_batch_size", "Rows of a batch.")
        self.padding_size = sizes(f"{batching}padding_size", "Padding rows of a batch.")
        self.queued_requests = gauge(
            "stoker_queued_requests", "Requests that wait for their model."
        )
        self.requests_under_way = gauge("stoker_requests_under_way", "Requests being answered.")
        self.head_cache = counter(
            "stoker_head_cache",
            "Small REST requests whose headers were cached, and newly cached ones.",
        )
        self.rollout_state_age = Age(
            "stoker_rollout_state_age_seconds",
            "Time since a worker last read the state of a model's rollout, seconds.",
            cells=self._cells,
        )
        self.workers_replaced = counter("stoker_workers_replaced", "Replaced workers, by reason.")
        self.log_dropped = counter(
            "stoker_log_dropped", "Log entries that were dropped so that no request waits."
        )
        self.copies = counter(
            "stoker_rollout_copies",
            "Requests copied to a version in shadow, and those dropped, compared, different and bad.",
        )
        self.copy_latency = latency(
            "stoker_rollout_copy_latency",
            "Time of a copied request in each version's model, microseconds.",
        )
        self._pid = gauge("stoker_worker_pid", "The process of each worker.")
        self._begin_life()

    def all(self) -> list[_Metric]:
        """Return every metric."""
        return [found for found in vars(self).values() if isinstance(found, _Metric)]

    def exposition(self) -> str:
        """Return the text for Prometheus, summed over all workers."""
        sources = self._sources()
        living = [rows for rows in sources if self._lives(rows)]
        lines: list[str] = []
        for metric in self.all():
            of = living if isinstance(metric, Gauge) else sources
            added = _added(metric.found_in(rows) for rows in of)
            lines += header(metric.name, metric.kind, metric.help_text)
            lines += metric.lines_of(added)
        return "\n".join([*lines, *self._machine_lines(living)]) + "\n"

    def _begin_life(self) -> None:
        """Reset the gauges of a replaced worker, and note this process."""
        rows = self._cells.rows()
        for metric in self.all():
            if isinstance(metric, Gauge):
                for labels, values in metric.found_in(rows).items():
                    metric.add(-values[0], **dict(labels))
        self._pid.add(os.getpid(), worker=str(self.worker))

    def _sources(self) -> list[dict[str, list[float]]]:
        if self._folder is None:
            return [self._cells.rows()]
        return [read_counters(path) for path in sorted(self._folder.glob(f"*{FILE_SUFFIX}"))]

    def _lives(self, rows: dict[str, list[float]]) -> bool:
        return any(_is_alive(int(row[0])) for row in self._pid.found_in(rows).values())

    def _machine_lines(self, living: Sequence[dict[str, list[float]]]) -> list[str]:
        """Return the current memory of every worker, and the GPUs."""
        pids = {
            labels: int(row[0])
            for rows in living
            for labels, row in self._pid.found_in(rows).items()
        }
        name = "process_resident_memory_bytes"
        lines = header(name, "gauge", "Memory of each worker, bytes.")
        lines += [sample(name, labels, resident_bytes(pid)) for labels, pid in sorted(pids.items())]
        return lines + [line for family in gpu_families() for line in family]


def _added(found: Iterable[dict[Labels, list[float]]]) -> dict[Labels, list[float]]:
    """Return the rows of several workers, added number by number."""
    total: dict[Labels, list[float]] = {}
    for rows in found:
        for labels, values in rows.items():
            before = total.get(labels, [0.0] * len(values))
            total[labels] = [a + b for a, b in zip(before, values, strict=True)]
    return total


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
