"""Skew and drift from offered requests: what is sampled, what is bounded, and what is forgotten."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stoker.core.statistics.columns import ColumnStatistics
from stoker.core.statistics.values import statistics_of_values
from stoker.registry.training_statistics import TRAINING_STATISTICS, write_training_statistics
from stoker.serve.observability import prediction_quality
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.observability.prediction_quality import LEAST_ROWS, PredictionQuality

RNG = np.random.default_rng(0)
EMPTY = ColumnStatistics(
    name="fare",
    dtype="float32",
    count=0,
    missing=0,
    distinct=0,
    numbers=None,
    lengths=None,
    top=(),
)


class Site:
    """A model's versions, and what watches over their requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = ServeMetrics()
        self.loaded = {("m", 1)}
        self.quality = PredictionQuality(self.metrics, self.folder_of, window_s=0.0)
        write_training_statistics(folder, [statistics_of_values(RNG.normal(size=2_000), EMPTY)])

    def folder_of(self, model: str, version: int) -> Path | None:
        return self.folder if (model, version) in self.loaded else None

    def offer(self, mean: float, rows: int = LEAST_ROWS, *, model: str = "m") -> None:
        """Requests with so many rows, whose numbers have this mean."""
        for start in range(0, rows, 50):
            values = RNG.normal(mean, size=min(50, rows - start)).astype(np.float32)
            self.quality.offer(model, 1, {"fare": values})

    def value(self, name: str) -> float | None:
        found = re.search(
            rf'stoker_prediction_{name}_ratio{{model_name="m",column="fare"}} (\S+)',
            self.metrics.exposition(),
        )
        return None if found is None else float(found[1])

    def until(self, claim: Callable[[], bool]) -> None:
        end_s = time.monotonic() + 20
        while not claim():
            assert time.monotonic() < end_s
            time.sleep(0.01)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(prediction_quality, "INTERVAL_S", 0.0)
    monkeypatch.setattr(prediction_quality, "_SWEEP_S", 0.0)
    found = Site(tmp_path)
    yield found
    found.quality.close()


def test_a_shift_is_skew_in_each_window_and_drift_in_the_first_one_with_it(site: Site) -> None:
    site.offer(0.0)
    site.until(lambda: site.value("skew") is not None)
    assert site.value("skew") == pytest.approx(0.0, abs=0.05)
    assert site.value("drift") is None

    site.offer(2.0)
    site.until(lambda: site.value("drift") is not None)
    # Half of the values lie above 2, of the training's 2 %.
    skew, drift = site.value("skew"), site.value("drift")
    assert skew is not None
    assert drift is not None
    assert skew > 0.4
    assert drift > 0.3

    site.offer(2.0)
    site.until(lambda: site.value("drift") != drift)
    assert site.value("drift") == pytest.approx(0.0, abs=0.05)
    assert (site.value("skew") or 0.0) > 0.4


def test_few_rows_say_nothing(site: Site) -> None:
    site.offer(2.0, LEAST_ROWS - 50)
    site.quality.close()

    assert site.value("skew") is None


def test_a_version_that_is_gone_takes_its_series_along(site: Site) -> None:
    site.offer(2.0)
    site.until(lambda: site.value("skew") is not None)

    site.loaded.clear()
    site.offer(0.0, 50, model="another")
    site.until(lambda: site.value("skew") is None)


def test_requests_at_once_are_sampled_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_quality, "INTERVAL_S", 60.0)
    site.offer(2.0, 20 * LEAST_ROWS)
    site.quality.close()

    assert site.value("skew") is None


def test_the_memory_of_all_windows_is_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_quality, "MAX_BYTES", 1)
    site.loaded |= {(f"m{number}", 1) for number in range(20)}
    for number in range(20):
        site.offer(0.0, 50, model=f"m{number}")
    site.quality.close()

    assert len(site.quality._windows) == 1


@pytest.mark.parametrize("text", ["{", '{"columns": 3}', '{"columns": [{"name": "x"}]}'])
def test_damaged_statistics_are_one_warning_and_no_series(
    site: Site, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (site.folder / TRAINING_STATISTICS).write_text(text)
    with caplog.at_level(logging.WARNING):
        site.offer(0.0, 50)
        site.until(lambda: ("m", 1) in site.quality._next_s and len(caplog.records) > 0)
        for _ in range(10):
            site.offer(0.0)
        site.quality.close()

    assert site.value("skew") is None
    assert len(caplog.records) == 1
    assert "are not compared with its training" in caplog.records[0].getMessage()
