"""What the server counts, in TensorFlow Serving's names, as Prometheus reads them.

prometheus-client cannot write these: it adds `_total` to the name of every counter.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Mapping, Sequence

LATENCY_BOUNDS_US = tuple(10 * 1.8**power for power in range(33))
"""Upper bounds of the latency buckets, microseconds; TensorFlow Serving's own."""

COUNT_BOUNDS = tuple(float(2**power) for power in range(14))
"""Upper bounds of the buckets for rows and batches; TensorFlow Serving's own, less the last."""

Labels = tuple[tuple[str, str], ...]


class Counter:
    """A number per combination of labels that only grows."""

    kind = "counter"

    def __init__(self, name: str, help_text: str) -> None:
        """Args: name: the metric's full name; help_text: one line."""
        self.name, self.help_text = name, help_text
        self._values: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def add(self, amount: float = 1.0, **labels: str) -> None:
        """Add to the number of these labels."""
        key = tuple(labels.items())
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount

    def lines(self) -> list[str]:
        """The samples, one a line."""
        with self._lock:
            values = dict(self._values)
        return [_sample(self.name, labels, value) for labels, value in values.items()]


class Histogram:
    """How often a value fell below each bound, per combination of labels."""

    kind = "histogram"

    def __init__(
        self, name: str, help_text: str, *, bounds: Sequence[float] = LATENCY_BOUNDS_US
    ) -> None:
        """Args: name: full name; help_text: one line; bounds: ascending, the last is below +Inf."""
        self.name, self.help_text, self._bounds = name, help_text, tuple(bounds)
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def observe(self, value: float, **labels: str) -> None:
        """Count one value."""
        key = tuple(labels.items())
        with self._lock:
            counts = self._counts.setdefault(key, [0] * (len(self._bounds) + 1))
            counts[bisect.bisect_left(self._bounds, value)] += 1
            self._sums[key] = self._sums.get(key, 0.0) + value

    def lines(self) -> list[str]:
        """The samples, one a line, the buckets cumulated."""
        with self._lock:
            counts = {labels: list(found) for labels, found in self._counts.items()}
            sums = dict(self._sums)
        return [line for labels in counts for line in self._of(labels, counts[labels], sums)]

    def _of(self, labels: Labels, counts: list[int], sums: Mapping[Labels, float]) -> list[str]:
        texts = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        lines, below = [], 0
        for text, count in zip(texts, counts, strict=True):
            below += count
            lines.append(_sample(f"{self.name}_bucket", (*labels, ("le", text)), below))
        lines.append(_sample(f"{self.name}_sum", labels, sums[labels]))
        lines.append(_sample(f"{self.name}_count", labels, below))
        return lines


class ServeMetrics:
    """All metrics of one server."""

    def __init__(self) -> None:
        """Start from zero."""
        self.request_count = Counter(
            ":tensorflow:serving:request_count", "Requests by model and status."
        )
        self.request_latency = Histogram(
            ":tensorflow:serving:request_latency", "Time to answer a request, microseconds."
        )
        self.runtime_latency = Histogram(
            ":tensorflow:serving:runtime_latency", "Time inside the model, microseconds."
        )

        self.example_counts = Histogram(
            ":tensorflow:serving:request_example_counts",
            "Examples per request to classify or regress.",
            bounds=COUNT_BOUNDS,
        )
        self.example_count_total = Counter(
            ":tensorflow:serving:request_example_count_total", "Examples classified or regressed."
        )
        batching = ":tensorflow:serving:batching_session:"
        self.queuing_latency = Histogram(
            f"{batching}queuing_latency", "Time that a request waits for its batch, microseconds."
        )
        self.wrapped_run_count = Counter(f"{batching}wrapped_run_count", "Batches that were run.")
        self.input_batch_size = Histogram(
            f"{batching}input_batch_size", "Rows of a request.", bounds=COUNT_BOUNDS
        )
        self.processed_batch_size = Histogram(
            f"{batching}processed_batch_size", "Rows of a batch.", bounds=COUNT_BOUNDS
        )
        self.padding_size = Histogram(
            f"{batching}padding_size", "Rows that fill a batch up.", bounds=COUNT_BOUNDS
        )

    def all(self) -> list[Counter | Histogram]:
        """Every metric."""
        return [found for found in vars(self).values() if isinstance(found, Counter | Histogram)]

    def exposition(self) -> str:
        """The text that a Prometheus server scrapes."""
        lines: list[str] = []
        for metric in self.all():
            lines += [f"# HELP {metric.name} {metric.help_text}"]
            lines += [f"# TYPE {metric.name} {metric.kind}", *metric.lines()]
        return "\n".join(lines) + "\n"


def _sample(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{name}{{{inside}}} {value:.16g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
