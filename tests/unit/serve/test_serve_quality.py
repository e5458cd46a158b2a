"""Skew and drift from offered requests: what is sampled, what is bounded, and what is forgotten."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorflow.core.example import example_pb2

from stoker.core.statistics.columns import ColumnStatistics
from stoker.core.statistics.values import statistics_of_sizes, statistics_of_values
from stoker.registry.training_statistics import TRAINING_STATISTICS, write_training_statistics
from stoker.serve.observability import prediction_quality
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.observability.prediction_quality import MIN_ROWS, PredictionQuality
from stoker.serve.observability.sampled_examples import EXAMPLES, MAX_BYTES, columns_of

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

    def offer(self, mean: float, rows: int = MIN_ROWS, *, model: str = "m") -> None:
        """Requests with so many rows, whose numbers have this mean."""
        for start in range(0, rows, 50):
            values = RNG.normal(mean, size=min(50, rows - start)).astype(np.float32)
            self.quality.offer(model, 1, {"fare": values})

    def value(self, name: str, column: str = "fare") -> float | None:
        found = re.search(
            rf'stoker_prediction_{name}_ratio{{model_name="m",column="{column}"}} (\S+)',
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


def example(**features: Any) -> bytes:
    kinds = {bytes: "bytes_list", float: "float_list", int: "int64_list"}
    made = example_pb2.Example()
    for name, values in features.items():
        getattr(made.features.feature[name], kinds[type(values[0])]).value.extend(values)
    return bytes(made.SerializeToString())


def test_examples_become_the_columns_that_training_knew() -> None:
    def column(name: str, dtype: str, length: int | None = None, *, whole: bool = False) -> Any:
        return replace(EMPTY, name=name, dtype=dtype, length=length, whole=whole)

    columns = [column("fare", "float32"), column("kind", "string"), column("place", "float32", 2)]
    columns += [column("age", "float32", whole=True), column("rooms", "int64")]
    columns += [column("tags", "string", 0), column("photo", "image")]
    good = {"place": [1.0, 2.0], "rooms": [3], "photo": [b"x" * 500], "other": [1]}
    raw = [
        example(**good, fare=[5.0], kind=[b"cash"], age=[40], tags=[b"a", b"b"]),
        example(**good, age=[-(2**63)]),
        example(**{**good, "place": [1.0]}),
        example(**{**good, "rooms": [1.0], "fare": [b"5"]}),
        example(fare=[5.0]),
    ]
    found = columns_of(raw, {each.name: each for each in columns})

    assert set(found) == {each.name for each in columns} - {"tags"}
    assert found["rooms"].tolist() == [[3], [3]]
    assert found["place"].tolist() == [[1.0, 2.0], [1.0, 2.0]]
    assert found["kind"].tolist() == [[b"cash"], [b""]]
    assert found["photo"].tolist() == [[b"x" * 500]] * 2
    np.testing.assert_array_equal(found["fare"], [[5.0], [np.nan]])
    np.testing.assert_array_equal(found["age"], [[40.0], [np.nan]])


def test_shifted_examples_and_images_are_skew(site: Site) -> None:
    sizes = RNG.integers(4_000, 6_000, 2_000)
    photo = statistics_of_sizes(sizes, replace(EMPTY, name="photo", dtype="image"))
    fare = statistics_of_values(RNG.normal(size=2_000), EMPTY)
    write_training_statistics(site.folder, [fare, photo])
    for _ in range(0, MIN_ROWS, 10):
        fares, bytes_ = RNG.normal(2.0, size=10), RNG.integers(1_000, 4_000, 10)
        raw = [
            example(fare=[float(fare)], photo=[b"x" * int(size)])
            for fare, size in zip(fares, bytes_, strict=True)
        ]
        site.quality.offer("m", 1, {EXAMPLES: np.array(raw, object)})
    site.until(lambda: site.value("skew") is not None and site.value("skew", "photo") is not None)

    assert (site.value("skew") or 0.0) > 0.4
    assert (site.value("skew", "photo") or 0.0) > 0.7

    site.quality.offer("m", 1, {EXAMPLES: np.array([b"no Example"], object)})
    site.quality.offer("m", 1, {EXAMPLES: np.array([b"x" * (MAX_BYTES + 1)], object)})
    site.quality.close()  # waits for both


def test_few_rows_say_nothing(site: Site) -> None:
    site.offer(2.0, MIN_ROWS - 50)
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
    site.offer(2.0, 20 * MIN_ROWS)
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
