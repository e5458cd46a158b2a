"""Keeps the newest metrics of a training run in memory: for scrapes, a file for node_exporter, and OTLP.

The training thread only stores numbers that it already has. The threads that read them do all other work.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.telemetry.catalogue import training as catalogue
from stoker.telemetry.catalogue.metric import Metric
from stoker.telemetry.exposition import family, header, sample, text_of
from stoker.telemetry.run_info import RunInfo
from stoker.telemetry.run_time import RunTime
from stoker.telemetry.wall_time import STEPS, TimeLeft

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
"""Upper bounds of the buckets of the histogram of step times, seconds; the last bucket has no bound."""

MAX_NAMES = 200
"""Maximum number of scalars that are published; TensorBoard also has the other metrics of a model."""

MAX_WAITING = 256
"""Maximum number of calls whose scalars wait to be counted by the next scrape. If no scrape comes, training counts
them all together, which takes less time than counting each call."""

LOOK_EVERY_S = 0.5
"""Minimum time between two observations of the progress, seconds, once the remaining time has been estimated."""

Samples = Mapping[Sequence[str], float]
"""Values of the labels, in the catalogue's order -> number."""

_DIRECT = {
    metric.tensorboard: metric
    for metric in (
        *(catalogue.SAMPLES_PER_S, catalogue.INPUT_WAIT, catalogue.BUSY_FRACTION, catalogue.MFU),
        *(catalogue.LOSS, catalogue.LOSS_SCALE, catalogue.GRADIENT_NORM),
    )
}
"""Name in TensorBoard -> the metric that has the same value."""

_ELSEWHERE = {
    *_DIRECT,
    *(m.tensorboard for m in (catalogue.STEP_TIME_S, catalogue.GOODPUT, catalogue.EPOCH)),
}
"""Names in TensorBoard of values that have a metric of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Sources of metrics that are computed only when they are read, not by the training thread."""

    run_time: RunTime
    checkpoint_age_s: Callable[[], float | None] = lambda: None
    local_steps: Callable[[], Mapping[str, float]] = dict
    """Returns worker -> its local step time, seconds; empty with a single worker."""

    stragglers: Callable[[], Mapping[str, float]] = dict
    """Returns worker -> its local step time divided by the median of the other workers."""

    gpus: Callable[[], Sequence[Sequence[str]]] = tuple
    """Returns the metrics of the GPUs that the run uses, each as lines in Prometheus's text format."""


@dataclass(kw_only=True, slots=True)
class StepHistogram:
    """Histogram of step times."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    """Number of steps in each bucket, not cumulative."""

    sum_s: float = 0.0
    """Total time of all steps, seconds."""

    def add(self, steps: int, step_s: float) -> None:
        """Add some steps of equal duration."""
        self.counts[bisect_left(BUCKETS, step_s)] += steps
        self.sum_s += steps * step_s

    def copy(self) -> StepHistogram:
        """Return a copy that later steps do not change."""
        return StepHistogram(counts=list(self.counts), sum_s=self.sum_s)

    def lines(self, run: str) -> list[str]:
        """Return the histogram's lines in Prometheus's text format."""
        metric, total = catalogue.STEP_TIME_S, 0
        lines = header(metric.name, metric.kind, metric.help)
        edges = [*(f"{edge:g}" for edge in BUCKETS), "+Inf"]
        for edge, count in zip(edges, self.counts, strict=True):
            total += count
            lines.append(sample(f"{metric.name}_bucket", (("run", run), ("le", edge)), total))
        lines.append(sample(f"{metric.name}_sum", (("run", run),), self.sum_s))
        lines.append(sample(f"{metric.name}_count", (("run", run),), total))
        return lines


class LiveMetrics:
    """Keeps the newest value of each metric; a `MetricWriter`."""

    def __init__(self, info: RunInfo, sources: Sources) -> None:
        """Start without values."""
        self.info, self._sources = info, sources
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, Mapping[str, float]]] = deque()
        self._newest: dict[str, float] = {}
        self._histogram = StepHistogram()
        self._left = TimeLeft()
        self._left_s: float | None = None
        self._epoch = 0.0
        self._steps = self._last_step = 0
        self._looked_s = 0.0
        self._most_s: dict[str, float] = {}

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Store the scalars of a call or an epoch; the caller must not change the mapping after this."""
        self._waiting.append((step, scalars))
        if len(self._waiting) >= MAX_WAITING:
            with self._lock:
                self._count()

    def _count(self) -> None:
        """Process the queued scalars; the caller must hold the lock."""
        while self._waiting:
            step, scalars = self._waiting.popleft()
            done, self._last_step = max(0, step - self._last_step), step
            step_s = scalars.get(catalogue.STEP_TIME_S.tensorboard)
            if done and step_s is not None:
                self._steps += done
                self._histogram.add(done, step_s)
            if len(self._newest) < MAX_NAMES or scalars.keys() <= self._newest.keys():
                self._newest.update(scalars)
            else:
                known = self._newest.keys() | _DIRECT
                self._newest.update({name: scalars[name] for name in scalars if name in known})

    def progress(self, *, step: int, steps: int, epoch: int) -> None:
        """Record the progress of the run."""
        self._epoch = float(epoch)
        now_s = time.monotonic()
        if self._left_s is None or now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._left_s = self._left.seconds(step / steps) if steps else None

    def rewind(self, step: int, *, validated: bool = True) -> None:  # noqa: ARG002 - MetricWriter
        """Continue after this step; training also calls this when it starts."""
        with self._lock:
            self._count()
            self._last_step = step

    def close(self) -> None:
        """Do nothing: the values exist only in memory."""

    def samples(self) -> tuple[dict[Metric, Samples], StepHistogram]:
        """Return every known counter and gauge, and the histogram of step times."""
        run = self.info.run
        with self._lock:
            self._count()
            newest = dict(self._newest)
            found: dict[Metric, Samples] = {catalogue.EPOCH: {(run,): self._epoch}}
            found[catalogue.STEPS] = {(run,): self._steps}
            if (left_s := self._left_s) is not None:
                found[catalogue.REMAINING] = {(run,): left_s}
            histogram = self._histogram.copy()
        for name, value in newest.items():
            if (metric := _DIRECT.get(name)) is not None:
                found[metric] = {(run,): value}
        named: Samples = {(run, name): newest[name] for name in newest if name not in _ELSEWHERE}
        if named:
            found[catalogue.MODEL_METRIC] = named
        found[catalogue.RUN_INFO] = {self.info.labels(): 1.0}
        return found | self._computed(run), histogram

    def text(self) -> str:
        """Return the answer to a scrape."""
        samples, histogram = self.samples()
        families: Iterable[Sequence[str]] = (
            family(metric, samples[metric]) for metric in catalogue.METRICS if metric in samples
        )
        return text_of([histogram.lines(self.info.run), *families, *self._sources.gpus()])

    def _computed(self, run: str) -> dict[Metric, Samples]:
        sources, found = self._sources, dict[Metric, Samples]()
        report = sources.run_time.report()
        found[catalogue.WALL_SECONDS] = {
            (run, part): seconds for part, seconds in self._growing(report).items()
        }
        if (goodput := sources.run_time.goodput) is not None:
            found[catalogue.GOODPUT] = {(run,): goodput}
        found[catalogue.RESTARTS] = {
            (run, cause): float(count) for cause, count in report["run"]["restarts"].items()
        }
        if (age_s := sources.checkpoint_age_s()) is not None:
            found[catalogue.CHECKPOINT_AGE] = {(run,): age_s}
        for metric, values in (
            (catalogue.LOCAL_STEP, sources.local_steps()),
            (catalogue.STRAGGLER, sources.stragglers()),
        ):
            found[metric] = {(run, worker): value for worker, value in values.items()}
        return found

    def _growing(self, report: Mapping[str, Any]) -> dict[str, float]:
        """Return the parts of this process as counters, which must never fall.

        If the report moves seconds to another part, they stay in the first part too.
        """
        parts, wait_s = report["process"]["parts"], report["process"]["input_wait_s"]
        now = {
            **parts,
            STEPS: max(0.0, parts[STEPS] - wait_s),
            "input_wait": wait_s,
            "waiting": report["run"]["waiting_s"],
        }
        with self._lock:
            self._most_s = {
                part: max(seconds, self._most_s.get(part, 0.0)) for part, seconds in now.items()
            }
            return dict(self._most_s)
