"""Skew and drift of requests, computed in the background from a sample, for models that have training statistics.

Skew compares the last window of requests with the training data; drift compares it with the previous window. Both are
the difference that `stoker skew` computes, minus the part that chance explains. `stoker skew` reports a column above
0.1.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from stoker.core.errors import DataError
from stoker.core.statistics.columns import ColumnStatistics
from stoker.core.statistics.gap import distribution_gap
from stoker.registry.training_statistics import read_training_statistics
from stoker.serve.observability.counters import Level
from stoker.serve.observability.input_window import (
    Inputs,
    InputWindow,
    SampledInputs,
    sampled_inputs,
)
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.observability.sampled_examples import EXAMPLES, columns_of, first_examples
from stoker.serve.runtime.background import Background
from stoker.serve.runtime.gil_yield import GilYield

_log = logging.getLogger(__name__)

MIN_ROWS = 200
"""Minimum number of rows of a window; until then, the window is extended. With fewer rows, chance alone can cause a
difference of 0.1."""

INTERVAL_S = 0.5
"""Minimum time between two sampled requests of a version, seconds. It limits the cost at any load; a window of the
default 300 s still has three times `MIN_ROWS`."""

REQUEST_ROWS = 64
"""Maximum number of rows that are sampled from a request."""

REQUEST_BYTES = 1 << 20
"""Maximum size of an input that is sampled, bytes."""

MAX_BYTES = 64 << 20
"""Maximum memory of the windows of all models, bytes. Beyond it, no new window begins."""

_MAX_VERSIONS = 10_000
"""Maximum number of versions whose time of the next sample is remembered."""

_SWEEP_S = 1.0
"""Minimum time between two checks whether versions are still loaded, seconds."""

_NEVER_S = float("inf")

Version = tuple[str, int]
"""A model and the number of one of its versions."""


@dataclass(kw_only=True, slots=True)
class _Sampled:
    """A request that is part of the sample."""

    model: str
    version: int
    inputs: SampledInputs
    examples: NDArray[Any] | None = None
    """The serialized Examples, if the request had some; else None."""


class PredictionQuality:
    """Samples the inputs of requests, and sets the metrics at the end of each window."""

    def __init__(
        self,
        metrics: ServeMetrics,
        folder_of: Callable[[str, int], Path | None],
        *,
        window_s: float,
    ) -> None:
        """Start the background thread.

        Args:
            metrics: The server's metrics; those of skew and drift are set.
            folder_of: Returns the folder of a model's version; None if the version is not loaded.
            window_s: Minimum length of a window, seconds.
        """
        self._metrics, self._folder_of, self._window_s = metrics, folder_of, window_s
        self._next_s: dict[Version, float] = {}
        self._windows: dict[str, InputWindow] = {}
        self._versions: dict[str, int] = {}
        self._swept_s = time.monotonic()
        self._before: dict[str, dict[str, ColumnStatistics]] = {}
        self._waiting: Background[_Sampled] = Background(
            self._take, name="stoker-prediction-quality", on_drop=lambda _: None
        )

    def is_due(self, model: str, version: int) -> bool:
        """Return whether the next request to a version would be sampled."""
        return time.monotonic() >= self._next_s.get((model, version), 0.0)

    def offer(self, model: str, version: int, inputs: Inputs) -> None:
        """Add a request to the sample if one is due. Does not block.

        Args:
            model: The model that answered the request.
            version: The version that answered.
            inputs: Inputs of a signature that takes raw columns or Examples; they are copied.
        """
        if not self.is_due(model, version):
            return
        if len(self._next_s) >= _MAX_VERSIONS:
            self._next_s.clear()
        self._next_s[model, version] = time.monotonic() + INTERVAL_S
        examples = first_examples(inputs)
        if examples is not None:
            inputs = {EXAMPLES: examples}
        small = {name: each for name, each in inputs.items() if each.nbytes <= REQUEST_BYTES}
        copied = sampled_inputs(small, rows=REQUEST_ROWS)
        size = copied.held_bytes + (0 if examples is None else sum(map(len, examples)))
        sampled = _Sampled(model=model, version=version, inputs=copied, examples=examples)
        self._waiting.offer(sampled, size=size)

    def close(self) -> None:
        """Process the pending requests, and end."""
        self._waiting.close()

    def _take(self, batch: Sequence[_Sampled]) -> None:
        self._sweep()
        for sampled in batch:
            window = self._window_of(sampled.model, sampled.version)
            if window is None:
                continue
            window.add(_rows_of(sampled, window.training))
            is_over = time.monotonic() - window.began_s >= self._window_s
            if is_over and window.seen >= MIN_ROWS:
                del self._windows[sampled.model]
                self._compare(sampled.model, window)

    def _window_of(self, model: str, version: int) -> InputWindow | None:
        window = self._windows.get(model)
        if window is not None:
            return window
        if sum(each.held_bytes for each in self._windows.values()) >= MAX_BYTES:
            return None
        training = self._training(model, version)
        if not training:
            self._next_s[model, version] = _NEVER_S
            return None
        window = self._windows[model] = InputWindow(training, began_s=time.monotonic())
        self._versions[model] = version
        return window

    def _sweep(self) -> None:
        """Discard the windows and metrics of unloaded versions; a new version starts with an empty window."""
        if time.monotonic() - self._swept_s < _SWEEP_S:
            return
        self._swept_s = time.monotonic()
        for model, version in list(self._versions.items()):
            if self._folder_of(model, version) is None:
                del self._versions[model]
                self._windows.pop(model, None)
                for column in self._before.pop(model, {}):
                    self._metrics.prediction_skew.unset(model_name=model, column=column)
                    self._metrics.prediction_drift.unset(model_name=model, column=column)

    def _training(self, model: str, version: int) -> Mapping[str, ColumnStatistics]:
        folder = self._folder_of(model, version)
        try:
            return {} if folder is None else read_training_statistics(folder)
        except (DataError, OSError) as error:
            _log.warning("requests to %s are not compared with its training data: %s", model, error)
            return {}

    def _compare(self, model: str, window: InputWindow) -> None:
        yield_gil, before = GilYield(), self._before.get(model, {})
        now: dict[str, ColumnStatistics] = {}
        for column in window.statistics():
            now[column.name] = column
            yield_gil()
            self._set(self._metrics.prediction_skew, model, column, window.training[column.name])
            if column.name in before:
                self._set(self._metrics.prediction_drift, model, column, before[column.name])
        self._before[model] = now

    def _set(
        self, level: Level, model: str, column: ColumnStatistics, other: ColumnStatistics
    ) -> None:
        gap = distribution_gap(column, other)
        if gap is not None:
            level.set(gap.beyond_chance, model_name=model, column=column.name)


def _rows_of(sampled: _Sampled, training: Mapping[str, ColumnStatistics]) -> SampledInputs:
    """Return a request's columns. Examples are parsed; bytes that are not Examples are returned unchanged."""
    if sampled.examples is None or EXAMPLES in training:
        return sampled.inputs
    try:
        found = columns_of(sampled.examples, training)
    except DecodeError:
        return sampled.inputs
    return sampled_inputs(found, rows=REQUEST_ROWS)
