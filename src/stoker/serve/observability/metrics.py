"""All metrics of a server, with TensorFlow Serving's names, and their text for Prometheus.

prometheus-client cannot write these names, because it adds `_total` to the name of every counter.

Each worker counts in a file of its own in a shared folder. The worker that Prometheus scrapes adds the files up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from stoker.serve.observability.counters import (
    Age,
    Counter,
    Gauge,
    Histogram,
    Instrument,
    Level,
    Row,
    Values,
    grouped,
)
from stoker.serve.runtime.gil_yield import YieldGil, no_yield
from stoker.serve.runtime.machine import gpu_families, resident_bytes
from stoker.serve.runtime.series_limit import MAX_SERIES, SeriesLimit
from stoker.serve.runtime.shared_counters import SharedCounters, read_counters
from stoker.telemetry.catalogue import serving
from stoker.telemetry.exposition import family, header

LATENCY_BOUNDS_US = tuple(10 * 1.8**power for power in range(33))
"""Upper bounds of the latency buckets, microseconds; the same as TensorFlow Serving's."""

COUNT_BOUNDS = tuple(float(2**power) for power in range(14))
"""Upper bounds of the buckets for numbers of rows; the same as TensorFlow Serving's, without its last bound."""

FILE_SUFFIX = ".metrics"
"""Suffix of the file with a worker's numbers."""

_Worker = dict[str, dict[Values, Row]]
"""The numbers of one worker: metric's name -> values of its labels -> numbers."""


class ServeMetrics:
    """All metrics of a server, over all its workers."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        worker: int | str = 0,
        max_series: int = MAX_SERIES,
    ) -> None:
        """Start from zero, or continue the counts of a replaced worker.

        Args:
            folder: Folder with the files of all workers; None: the numbers of this process alone, in memory.
            worker: The number of this worker; no other running worker has the same number.
            max_series: Maximum number of series of all models together; further series are counted as `UNKNOWN_MODEL`.
        """
        self._folder = folder
        self.worker = worker
        self._cells = SharedCounters(None if folder is None else folder / f"{worker}{FILE_SUFFIX}")
        self.limit = SeriesLimit(folder, max_series=max_series)
        cells, limit = self._cells, self.limit
        counter = partial(Counter, cells=cells, limit=limit)
        gauge = partial(Gauge, cells=cells, limit=limit)
        level = partial(Level, cells=cells, limit=limit)
        latency = partial(Histogram, bounds=LATENCY_BOUNDS_US, cells=cells, limit=limit)
        sizes = partial(Histogram, bounds=COUNT_BOUNDS, cells=cells, limit=limit)
        self.request_count = counter(serving.REQUEST_COUNT)
        self.request_latency = latency(serving.REQUEST_LATENCY)
        self.runtime_latency = latency(serving.RUNTIME_LATENCY)
        self.example_counts = sizes(serving.EXAMPLE_COUNTS)
        self.example_count_total = counter(serving.EXAMPLE_COUNT_TOTAL)
        self.version_request_count = counter(serving.VERSION_REQUEST_COUNT)
        self.version_request_latency = latency(serving.VERSION_REQUEST_LATENCY)
        self.queuing_latency = latency(serving.QUEUING_LATENCY)
        self.wrapped_run_count = counter(serving.WRAPPED_RUN_COUNT)
        self.input_batch_size = sizes(serving.INPUT_BATCH_SIZE)
        self.processed_batch_size = sizes(serving.PROCESSED_BATCH_SIZE)
        self.padding_size = sizes(serving.PADDING_SIZE)
        self.queued_requests = gauge(serving.QUEUED_REQUESTS)
        self.requests_without_thread = gauge(serving.REQUESTS_WITHOUT_THREAD)
        self.requests_under_way = gauge(serving.REQUESTS_UNDER_WAY)
        self.head_cache = counter(serving.HEAD_CACHE)
        self.rollout_state_age = Age(serving.ROLLOUT_STATE_AGE, cells=cells, limit=limit)
        self.workers_replaced = counter(serving.WORKERS_REPLACED)
        self.log_dropped = counter(serving.LOG_DROPPED)
        self.copies = counter(serving.COPIES)
        self.copy_latency = latency(serving.COPY_LATENCY)
        self.prediction_skew = level(serving.PREDICTION_SKEW)
        self.prediction_drift = level(serving.PREDICTION_DRIFT)
        self._pid = gauge(serving.WORKER_PID)
        self._begin_life()

    def all(self) -> list[Instrument]:
        """Return the instruments of all metrics."""
        return [found for found in vars(self).values() if isinstance(found, Instrument)]

    def exposition(self) -> str:
        """Return all metrics in Prometheus's text format, summed over all workers."""
        return "".join(f"{line}\n" for lines in self.blocks() for line in lines)

    def blocks(self, yield_gil: YieldGil = no_yield) -> Iterator[Sequence[str]]:
        """Yield the lines of `exposition`: each block has the header of a metric or the lines of a series.

        Args:
            yield_gil: Called often.
        """
        workers = [grouped(rows, yield_gil) for rows in self._sources(yield_gil)]
        living = [worker for worker in workers if self._lives(worker)]
        for instrument in self.all():
            metric = instrument.metric
            of = living if isinstance(instrument, Gauge) else workers
            yield header(metric.name, metric.kind, metric.help)
            for values, rows in _by_series(of, metric.name).items():
                yield_gil()
                yield instrument.lines_of(values, instrument.combined(rows))
        yield from self._machine_blocks(living)

    def _begin_life(self) -> None:
        """Reset the gauges of the replaced worker, and record the ID of this process."""
        rows = grouped(self._cells.rows())
        for instrument in self.all():
            if isinstance(instrument, Gauge):
                for values in rows.get(instrument.metric.name, {}):
                    instrument.reset(values)
        self._pid.add(os.getpid(), worker=str(self.worker))

    def _sources(self, yield_gil: YieldGil) -> list[dict[str, list[float]]]:
        if self._folder is None:
            return [self._cells.rows()]
        paths = sorted(self._folder.glob(f"*{FILE_SUFFIX}"))
        return [read_counters(path, yield_gil) for path in paths]

    def _lives(self, worker: _Worker) -> bool:
        return any(_is_alive(int(row[0])) for row in worker.get(self._pid.metric.name, {}).values())

    def _machine_blocks(self, living: Sequence[_Worker]) -> Iterator[list[str]]:
        """Yield the current memory of every worker and every GPU."""
        pids = _by_series(living, self._pid.metric.name)
        memory: dict[Sequence[str], float] = {
            values: resident_bytes(int(rows[0][0])) for values, rows in sorted(pids.items())
        }
        yield family(serving.RESIDENT_MEMORY, memory)
        yield from gpu_families()


def _by_series(workers: Sequence[_Worker], name: str) -> Mapping[Values, list[Row]]:
    """Return values of a metric's labels -> the numbers of all workers that have this series."""
    found: dict[Values, list[Row]] = {}
    for worker in workers:
        for values, row in worker.get(name, {}).items():
            found.setdefault(values, []).append(row)
    return found


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
