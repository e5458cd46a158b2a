"""The spread of a column against that of training, on columns whose spread is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.core.statistics.columns import ColumnStatistics
from stoker.core.statistics.values import statistics_of_sizes
from stoker.data.columns import Column, Dtype
from stoker.data.dataset import one_shard
from stoker.data.features.analysis.anomalies import find_skew
from stoker.data.features.analysis.measure import compute_statistics


def column_of(folder: Path, values: Any, dtype: Dtype) -> ColumnStatistics:
    column = Column(name="x", dtype=dtype)
    path = folder / "x.parquet"
    pq.write_table(pa.table({"x": pa.array(values, column.arrow_type)}), path)
    dataset = one_shard(path, "now", rows=len(values), columns=[column])
    return compute_statistics(dataset).column("now", "x")


def kinds(folder: Path, now: Any, then: Any, dtype: Dtype = "float32") -> list[str]:
    columns = column_of(folder, now, dtype), column_of(folder, then, dtype)
    return [anomaly.kind for anomaly in find_skew("now", *columns)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rows", [20, 300, 3000])
def test_two_samples_of_one_distribution_have_no_skew(tmp_path: Path, seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    assert not kinds(tmp_path, rng.normal(size=rows), rng.normal(size=2000))
    assert not kinds(tmp_path, rng.poisson(3.0, rows), rng.poisson(3.0, 2000), "int64")
    words = [rng.choice(["a", "b", "c"], n, p=[0.6, 0.3, 0.1]) for n in (rows, 2000)]
    assert not kinds(tmp_path, words[0], words[1], "string")
    zeros = [np.where(rng.random(n) < 0.6, 0.0, rng.exponential(1.0, n)) for n in (rows, 2000)]
    assert not kinds(tmp_path, zeros[0], zeros[1])


def test_other_units_and_other_shares_are_skew(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    fares = rng.lognormal(2.0, 0.5, 2000)
    assert kinds(tmp_path, rng.lognormal(2.0, 0.5, 400) * 1.609, fares) == ["skew"]
    assert kinds(tmp_path, rng.poisson(5.0, 400), rng.poisson(3.0, 2000), "int64") == ["skew"]
    words = [rng.choice(["a", "b"], n, p=[p, 1 - p]) for n, p in ((400, 0.8), (2000, 0.5))]
    assert kinds(tmp_path, words[0], words[1], "string") == ["skew"]
    assert kinds(tmp_path, np.zeros(100), fares) == ["skew"]


def images(sizes: Any) -> list[bytes]:
    return [b"x" * max(1, int(size)) for size in sizes]


def test_images_are_compared_by_the_sizes_of_their_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    photos = images(rng.normal(4000, 500, 1000))

    assert kinds(tmp_path, images(rng.normal(4000, 500, 300)), photos, "image") == []
    assert kinds(tmp_path, images(rng.normal(2000, 250, 300)), photos, "image") == ["skew"]
    (found,) = find_skew(
        "now",
        column_of(tmp_path, images([2000] * 300), "image"),
        column_of(tmp_path, photos, "image"),
    )
    assert found.message.startswith("100% of its images have at most 2,000 bytes")


def test_a_server_computes_the_same_sizes_as_the_analysis(tmp_path: Path) -> None:
    sizes = np.random.default_rng(0).integers(1, 5000, 997)
    analyzed = column_of(tmp_path, [*images(sizes), None], "image")

    assert statistics_of_sizes(np.append(sizes, 0), analyzed) == analyzed
    assert analyzed.lengths is not None
    assert len(analyzed.lengths.quantiles) == 9


def test_few_rows_and_columns_that_say_nothing_have_none(tmp_path: Path) -> None:
    assert not kinds(tmp_path, [9.0, 9.5], np.arange(1000.0))
    assert not kinds(tmp_path, [None, None], np.arange(1000.0))
    assert not kinds(tmp_path, [str(n) for n in range(500)], ["a"] * 500, "string")
