"""What splits have in common: counted exactly, and said where it spoils a figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.datasets import write_dataset

from stoker.data.columns import Column
from stoker.data.features.analysis.analyze import analyze
from stoker.data.features.analysis.anomalies import Anomaly
from stoker.data.features.analysis.measure import compute_statistics
from stoker.data.features.analysis.splits import find_split_anomalies, relate_splits
from stoker.data.features.analysis.statistics import Statistics
from stoker.data.ingest import IngestConfig, ingest


def related(
    folder: Path, values: Mapping[str, Any], label: str, **settings: Any
) -> tuple[Statistics, dict[str, list[Anomaly]]]:
    """Ingest a table; the statistics of its label and its splits, and kind -> anomalies."""
    pq.write_table(pa.table(dict(values)), folder / "rows.parquet")
    config = IngestConfig(source=str(folder / "rows.parquet"), **settings)
    dataset = ingest(config, folder / "data", label=label)
    statistics = compute_statistics(replace(dataset, columns=(dataset.column(label),)))
    statistics = relate_splits(statistics, dataset, labels=[label], label_only=())
    found: dict[str, list[Anomaly]] = {}
    for anomaly in find_split_anomalies(statistics, labels=[label], config=config):
        found.setdefault(anomaly.kind, []).append(anomaly)
    return statistics, found


def test_facts_of_splits_are_those_that_python_counts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = (
        Column(name="Row", dtype="int64"),
        Column(name="row", dtype="float32"),
        Column(name="text", dtype="string"),
        Column(name="v", dtype="float32", length=2),
        Column(name="y", dtype="int64"),
    )
    tables: dict[str, list[tuple[Any, ...]]] = {}
    parts: dict[str, list[pa.Table]] = {}
    for split, count in (("train", 400), ("eval", 150), ("test", 50)):
        numbers = rng.integers(0, 3, (count, 5)).tolist()
        tables[split] = [
            (a, None if b == 0 else b / 2, "" if c == 0 else f"t{c}", (d, None), y % 2)
            for a, b, c, d, y in numbers
        ]
        arrays = [
            pa.array([row[place] for row in tables[split]], column.arrow_type)
            for place, column in enumerate(columns)
        ]
        parts[split] = [pa.Table.from_arrays(arrays, [c.name for c in columns])]
    dataset = write_dataset(tmp_path, columns, parts)

    statistics, _, _ = analyze(dataset, tmp_path / "out", labels=["y"])

    report = (tmp_path / "out" / "report.html").read_text()
    train = set(tables["train"])
    features = {row[:-1] for row in train}
    assert statistics.distinct == len({row for rows in tables.values() for row in rows})
    for split, rows in tables.items():
        facts = statistics.split_facts[split]
        assert facts.distinct == len(set(rows))
        assert facts.share == pytest.approx(len(rows) / 600)
        ones = sum(row[-1] for row in rows) / len(rows)
        assert facts.label_rates == {"y": pytest.approx({"0": 1 - ones, "1": ones})}
        is_train = split == "train"
        copies = sum(row in train for row in rows)
        assert facts.copies_of_train == (None if is_train else copies)
        seen = sum(row[:-1] in features for row in rows)
        assert facts.features_in_train == (None if is_train else seen)
        assert is_train or copies < seen
    copies = statistics.split_facts["test"].copies_of_train or 0
    assert f"{copies} ({copies / 50:.1%})" in report


def clicks(count: int, kinds: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    kind = rng.integers(0, kinds, count)
    labels = rng.random(count) < rng.uniform(0.1, 0.9, kinds)[kind]
    return {"kind": [f"kind {k}" for k in kind], "y": labels.astype(np.int64)}


def test_repeated_rows_are_reported_and_no_anomaly(tmp_path: Path) -> None:
    statistics, found = related(tmp_path, clicks(5000, 24), "y")

    assert found == {}
    assert statistics.distinct == 48
    assert statistics.split_facts["eval"].features_in_train == statistics.rows["eval"]


@pytest.mark.parametrize("mode", ["together", "drop"])
def test_a_label_that_decides_the_split_is_reported(mode: str, tmp_path: Path) -> None:
    _, found = related(tmp_path, clicks(5000, 60), "y", duplicates=mode)

    assert "but never with the same label" in found["label_splits"][0].message
    assert "copies" not in found


def with_copies(share: float) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    values = rng.normal(size=2000)
    values[: int(share * 2000)] = values[-int(share * 2000) :]
    return {"x": values, "y": (values > 0).astype(np.int64)}


def test_copies_in_a_table_of_distinct_rows_are_one_warning(tmp_path: Path) -> None:
    statistics, found = related(tmp_path, with_copies(0.08), "y")

    assert list(found) == ["copies"]
    (only,) = found["copies"]
    assert only.split == "eval"
    assert "Set data.duplicates: together" in only.message
    assert f"{statistics.split_facts['eval'].copies_of_train:,} of its" in only.message
    # Pictures of several keys: the key alone deals, so no `duplicates` keeps them apart.
    keyed = IngestConfig(source=str(tmp_path), split_by="patient")
    anomalies = find_split_anomalies(statistics, labels=(), config=keyed)
    (only,) = [each for each in anomalies if each.kind == "copies"]
    assert "data.duplicates" not in only.message
    assert only.message.endswith(
        "The copies differ in 'patient': split by a column in which they are equal, or delete them"
    )


def test_copies_that_are_kept_out_of_eval_are_not_an_anomaly(tmp_path: Path) -> None:
    statistics, found = related(tmp_path, with_copies(0.08), "y", duplicates="together")

    assert found == {}
    assert statistics.split_facts["eval"].copies_of_train == 0


def test_shares_and_label_rates_beyond_chance_are_reported(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    user = rng.choice(10, 4000, p=np.arange(1, 11) / 55)
    labels = rng.random(4000) < np.where(user % 2, 0.8, 0.2)
    values = {"user": user, "y": labels.astype(np.int64)}

    statistics, found = related(tmp_path, values, "y", split_by="user")

    share = statistics.split_facts["eval"].share
    assert abs(share - 0.2) > 0.05
    assert f"{share:.1%} of the rows instead of the 20.0%" in found["split_share"][0].message
    assert "rows with the same 'user' stay in one split" in found["label_rate"][0].message
    assert len(found["label_rate"]) == len(found["split_share"]) == 1


def test_a_number_as_label_that_is_spread_otherwise_is_reported(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    user = rng.integers(0, 10, 3000)
    values = {"user": user, "price": rng.normal(user, 0.1)}

    _, found = related(tmp_path, values, "price", split_by="user")

    assert "of its values are at most" in found["label_rate"][0].message


@pytest.mark.parametrize(
    "values",
    [
        {"x": np.arange(150) / 7, "y": np.arange(150) % 3},
        {"x": [1.5] * 30 + [2.5] * 2, "y": ["a"] * 31 + ["b"]},
        {"x": np.arange(3000), "y": np.random.default_rng(5).standard_cauchy(3000)},
        {"x": np.arange(3000), "y": (np.arange(3000) < 4).astype(np.int64)},
        {"y": np.arange(500) % 2},
    ],
    ids=["iris", "one_rare", "heavy_tails", "4_positives", "no_feature"],
)
def test_ordinary_tables_have_no_anomaly_of_their_splits(
    values: dict[str, Any], tmp_path: Path
) -> None:
    _, found = related(tmp_path, values, "y")

    assert found == {}


def test_images_are_compared_by_their_bytes_where_both_splits_hold_them(tmp_path: Path) -> None:
    columns = (Column(name="image", dtype="image"), Column(name="label", dtype="string"))
    tables: dict[str, list[pa.Table]] = {}
    for split, first in (("train", 0), ("eval", 30)):
        images = [f"image {place}".encode() for place in range(first, first + 40)]
        table = {"image": pa.array(images, pa.binary()), "label": [split] * 40}
        tables[split] = [pa.table(table)]
    whole = write_dataset(tmp_path, columns, tables)
    measured = compute_statistics(replace(whole, columns=columns[1:]))
    for store, copies in ((None, 10), ("original (...)", 10), ("resized (...)", None)):
        dataset = replace(whole, image_store=store)

        statistics = relate_splits(measured, dataset, labels=["label"], label_only=())

        facts = statistics.split_facts["eval"]
        assert (facts.copies_of_train, facts.features_in_train) == (copies, copies)
        assert facts.distinct == 40
        assert statistics.distinct == (None if copies is None else 70)
