"""Statistics of values in memory against those that the analysis computes by queries of the same values."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.core.statistics.columns import ColumnStatistics
from stoker.core.statistics.gap import distribution_gap
from stoker.core.statistics.values import statistics_of_values
from stoker.data.columns import Column, Dtype
from stoker.data.dataset import one_shard
from stoker.data.features.analysis.measure import compute_statistics

RNG = np.random.default_rng(0)
WORDS = RNG.choice(["cash", "card", "", "app"], 700, p=[0.5, 0.3, 0.1, 0.1]).astype(object)

CASES: list[tuple[Dtype, Any]] = [
    ("float32", RNG.lognormal(2.0, 0.5, 700).astype(np.float32)),
    ("float32", np.where(RNG.random(700) < 0.2, np.nan, RNG.normal(size=700)).astype(np.float32)),
    ("float32", np.array([1.5, np.inf, -np.inf, 0.0, -0.0, np.nan, 1.5], np.float32)),
    ("float64", RNG.choice([0.1, 0.25, -3.0], 700)),
    ("float32", np.full(10, np.nan, np.float32)),
    ("float64", np.array([-1.7e308, 1.7e308, 0.0])),
    ("int64", RNG.poisson(3.0, 700)),
    ("int64", np.array([2**62, -5, 7, 7])),
    ("float32", np.full(9, 2.5, np.float32)),
    ("string", WORDS),
    ("string", np.array([f"word {number}" for number in range(500)], object)),
]


def queried(folder: Path, dtype: Dtype, values: Any, length: int | None = None) -> ColumnStatistics:
    column = Column(name="x", dtype=dtype, length=length)
    if length is None:
        array = pa.array(values, column.arrow_type, from_pandas=dtype != "string")
    else:
        array = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), length)
    path = folder / "x.parquet"
    pq.write_table(pa.table({"x": array}), path)
    dataset = one_shard(path, "now", rows=len(values), columns=[column])
    return compute_statistics(dataset).column("now", "x")


def comparable(column: ColumnStatistics) -> dict[str, Any]:
    """All but the lengths, which no comparison of distributions needs, and moments to 9 digits."""
    found = asdict(column) | {"lengths": None}
    for name in ("mean", "std"):
        if found["numbers"] and found["numbers"][name] is not None:
            found["numbers"][name] = pytest.approx(found["numbers"][name], rel=1e-9, abs=1e-12)
    return found


@pytest.mark.parametrize(("dtype", "values"), CASES)
def test_both_ways_find_the_same(tmp_path: Path, dtype: Dtype, values: Any) -> None:
    expected = queried(tmp_path, dtype, values)

    found = statistics_of_values(values, expected)

    assert asdict(found) == comparable(expected)


def test_vectors_too(tmp_path: Path) -> None:
    values = RNG.normal(size=(300, 2)).astype(np.float32)
    expected = queried(tmp_path, "float32", values, length=2)

    assert asdict(statistics_of_values(values, expected)) == comparable(expected)


def test_the_gap_is_the_difference_of_shares_and_chance_falls_with_rows() -> None:
    like = statistics_of_values(
        WORDS,
        ColumnStatistics(
            name="x",
            dtype="string",
            count=0,
            missing=0,
            distinct=0,
            numbers=None,
            lengths=None,
            top=(),
        ),
    )
    training = statistics_of_values(np.array(["a"] * 500 + ["b"] * 500, object), like)
    now = statistics_of_values(np.array(["a"] * 900 + ["b"] * 100, object), like)
    few = statistics_of_values(np.array(["a"] * 9 + ["b"], object), like)

    gap, by_few = distribution_gap(now, training), distribution_gap(few, training)

    assert gap is not None
    assert gap.share == pytest.approx(0.4)
    assert gap.chance == pytest.approx(1.63 * (2 / 1000) ** 0.5)
    assert gap.beyond_chance == pytest.approx(0.4 - gap.chance)
    assert by_few is not None
    assert by_few.share == pytest.approx(0.4)
    assert by_few.beyond_chance == 0.0
    assert distribution_gap(now, statistics_of_values(np.array(["", ""], object), like)) is None
