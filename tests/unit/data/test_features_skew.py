"""The spread of a column against that of training, on columns whose spread is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.core.files import sha256_file
from stoker.core.statistics.columns import ColumnStatistics
from stoker.data.columns import Column, Dtype
from stoker.data.dataset import Dataset, Shard
from stoker.data.features.analysis.anomalies import find_skew
from stoker.data.features.analysis.measure import compute_statistics


def column_of(folder: Path, values: Any, dtype: Dtype) -> ColumnStatistics:
    column = Column(name="x", dtype=dtype)
    path = folder / "x.parquet"
    pq.write_table(pa.table({"x": pa.array(values, column.arrow_type)}), path)
    shard = Shard(
        file=path.name,
        rows=len(values),
        size_bytes=path.stat().st_size,
        sha256=sha256_file(path),
    )
    dataset = Dataset(root=folder, columns=(column,), splits={"now": (shard,)}, column_hashes={})
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


def test_few_rows_and_columns_that_say_nothing_have_none(tmp_path: Path) -> None:
    assert not kinds(tmp_path, [9.0, 9.5], np.arange(1000.0))
    assert not kinds(tmp_path, [None, None], np.arange(1000.0))
    assert not kinds(tmp_path, [str(n) for n in range(500)], ["a"] * 500, "string")
