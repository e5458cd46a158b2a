"""Statistics, schema, anomalies and the report of a dataset with everything wrong in it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.datasets import write_dataset

from stoker.core.errors import DataError
from stoker.core.statistics.columns import HISTOGRAM_BINS, TOP_VALUES
from stoker.data.columns import Column
from stoker.data.dataset import Dataset
from stoker.data.features.analysis.analyze import analyze
from stoker.data.features.analysis.anomalies import Anomaly, find_anomalies
from stoker.data.features.analysis.measure import compute_statistics
from stoker.data.features.analysis.splits import relate_splits
from stoker.data.features.analysis.statistics import (
    Schema,
    Statistics,
    infer_schema,
    load_schema,
    load_statistics,
)

HOSTILE = '<img src=x onerror="alert(1)">'

COLUMNS = (
    Column(name=HOSTILE, dtype="float32"),
    Column(name="A", dtype="int64"),
    Column(name="a", dtype="float64"),
    Column(name="word", dtype="string"),
    Column(name="many", dtype="string"),
    Column(name="same", dtype="int64"),
    Column(name="gone", dtype="float32"),
    Column(name="label", dtype="string"),
    Column(name="picture", dtype="image"),
)

ROWS = 500


def make_table(seed: int, *, is_eval: bool) -> pa.Table:
    rng = np.random.default_rng(seed)
    hostile = [None, math.nan, math.inf, -math.inf, -0.0, 0.0, *rng.normal(3, 1, ROWS - 6)]
    words = ["x", "</script>", "é", ""] + (["new"] if is_eval else [])
    scale = 1000 if is_eval else 1
    missing = rng.random(ROWS) < (0.5 if is_eval else 0.1)
    return pa.table(
        {
            HOSTILE: pa.array(hostile, pa.float32()),
            "A": rng.integers(0, 5, ROWS),
            "a": pa.array(rng.random(ROWS) * scale, pa.float64(), mask=missing),
            "word": rng.choice(words, ROWS),
            "many": [f"id {index}" for index in range(ROWS)],
            "same": np.full(ROWS, 7),
            "gone": pa.array([None] * ROWS, pa.float32()),
            "label": ["yes"] * (ROWS - 3) + ["no"] * (2 if is_eval else 3) + [""] * is_eval,
            "picture": [b"\x89PNG" + bytes(index) for index in range(ROWS)],
        }
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    train = make_table(1, is_eval=False)
    return write_dataset(
        tmp_path_factory.mktemp("data"),
        COLUMNS,
        {
            "train": [train.slice(0, 300), train.slice(300)],
            "eval": [make_table(2, is_eval=True)],
            "test": [],
        },
    )


@pytest.fixture(scope="module")
def statistics(dataset: Dataset) -> Statistics:
    return compute_statistics(dataset)


@pytest.fixture(scope="module")
def schema(statistics: Statistics) -> Schema:
    return infer_schema(statistics, labels=["label"])


@pytest.fixture(scope="module")
def anomalies(statistics: Statistics, schema: Schema) -> list[Anomaly]:
    return find_anomalies(statistics, schema)


def test_numbers_are_those_of_the_finite_values(statistics: Statistics, dataset: Dataset) -> None:
    column = statistics.column("train", HOSTILE)
    values = np.array(
        [v for v in dataset.table("train").column(HOSTILE).to_pylist() if v is not None]
    )
    finite = np.sort(values[np.isfinite(values)])

    assert (column.count, column.missing) == (ROWS - 2, 2)
    assert column.numbers is not None
    assert column.numbers.infinite == 2
    assert column.numbers.zeros == 2
    assert column.numbers.mean == pytest.approx(finite.mean())
    assert column.numbers.std == pytest.approx(finite.std())
    assert column.numbers.min == finite[0]
    assert column.numbers.quantiles == tuple(finite[i * len(finite) // 10] for i in range(1, 10))
    assert column.numbers.histogram == tuple(
        np.histogram(finite, HISTOGRAM_BINS, (finite[0], finite[-1]))[0]
    )


def test_columns_that_differ_only_by_case_are_not_mixed_up(statistics: Statistics) -> None:
    whole, real = statistics.column("train", "A"), statistics.column("train", "a")

    assert whole.distinct == 5
    assert sorted(top.value for top in whole.top) == ["0", "1", "2", "3", "4"]
    assert real.distinct == real.count < ROWS
    assert real.top == ()


def test_strings_are_counted_and_measured(statistics: Statistics, dataset: Dataset) -> None:
    word = statistics.column("train", "word")
    values = dataset.table("train").column("word").to_pylist()

    assert word.missing == values.count("")
    assert {top.value: top.count for top in word.top} == {
        value: values.count(value) for value in ("x", "</script>", "é")
    }
    assert word.lengths is not None
    assert (word.lengths.min, word.lengths.max) == (1, 9)
    assert len(statistics.column("train", "many").top) == TOP_VALUES


def test_images_are_measured_in_bytes(statistics: Statistics) -> None:
    picture = statistics.column("train", "picture")

    assert picture.lengths is not None
    assert (picture.lengths.min, picture.lengths.max) == (4, 4 + ROWS - 1)
    assert picture.distinct is None


def test_column_without_a_value_has_no_numbers(statistics: Statistics) -> None:
    gone = statistics.column("train", "gone")

    assert (gone.count, gone.missing, gone.missing_share) == (0, ROWS, 1.0)
    assert gone.numbers is not None
    assert gone.numbers.mean is None
    assert gone.numbers.histogram == gone.numbers.quantiles == ()


def test_schema_is_that_of_the_training_split(schema: Schema) -> None:
    columns = {column.name: column for column in schema.columns}

    assert columns["word"].domain == ("</script>", "x", "é")
    assert columns["many"].domain is None
    assert columns["A"].required
    assert not columns["a"].required
    assert (columns["A"].min, columns["A"].max) == (0, 4)


def test_schema_needs_a_training_split(dataset: Dataset) -> None:
    other = Dataset(
        root=dataset.root, columns=COLUMNS, splits={"train": ()}, column_hashes={"train": {}}
    )

    with pytest.raises(
        DataError, match="a schema can be inferred only from a split 'train' with records"
    ):
        infer_schema(compute_statistics(other))


EXPECTED = [
    ("test", "", "empty_split", "error"),
    ("eval", "label", "label_missing", "error"),
    ("train", HOSTILE, "infinite", "warning"),
    ("train", "same", "constant", "warning"),
    ("train", "gone", "all_missing", "warning"),
    ("train", "label", "label_imbalance", "warning"),
    ("eval", "a", "missing", "warning"),
    ("eval", "a", "out_of_range", "warning"),
    ("eval", "word", "new_values", "warning"),
]


@pytest.mark.parametrize(("split", "column", "kind", "severity"), EXPECTED)
def test_anomaly_is_found(
    split: str, column: str, kind: str, severity: str, anomalies: list[Anomaly]
) -> None:
    found = [(a.split, a.column, a.kind, a.severity) for a in anomalies]

    assert (split, column, kind, severity) in found


def test_nothing_else_is_an_anomaly_and_errors_come_first(anomalies: list[Anomaly]) -> None:
    found = [(a.split, a.column, a.kind, a.severity) for a in anomalies]
    also = {
        ("eval", HOSTILE, "infinite", "warning"),
        ("eval", "label", "missing", "warning"),
    }

    assert set(found) - set(EXPECTED) == also
    assert [a.severity for a in anomalies] == sorted(a.severity for a in anomalies)


def test_unseen_class_is_an_error(statistics: Statistics) -> None:
    found = find_anomalies(statistics, infer_schema(statistics, labels=["word"]))

    new = next(a for a in found if a.kind == "new_values")
    assert new.severity == "error"
    assert "'new'" in new.message


def test_clean_data_has_no_anomaly(tmp_path: Path) -> None:
    table = make_table(1, is_eval=False).select(["A", "word"])
    columns = tuple(column for column in COLUMNS if column.name in ("A", "word"))
    clean = write_dataset(tmp_path, columns, {"train": [table], "eval": [table.slice(100)]})

    assert analyze(clean, tmp_path / "out")[2] == []


@pytest.fixture(scope="module")
def written(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("analysis")
    analyze(dataset, folder, labels=["label"])
    return folder


def test_files_are_json_and_read_back(
    written: Path,
    dataset: Dataset,
    statistics: Statistics,
    schema: Schema,
    anomalies: list[Anomaly],
) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(name)

    for name in ("statistics.json", "schema.json", "anomalies.json"):
        json.loads((written / name).read_text(), parse_constant=refuse)
    related = relate_splits(statistics, dataset, labels=["label"], label_only=())
    assert load_statistics(written / "statistics.json") == related
    assert load_schema(written / "schema.json") == schema
    assert len(json.loads((written / "anomalies.json").read_text())) == len(anomalies)


@pytest.mark.parametrize("load", [load_statistics, load_schema])
def test_other_json_is_refused(load: Any, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")

    with pytest.raises(DataError, match=r"other\.json must hold"):
        load(tmp_path / "other.json")


def test_same_data_gives_the_same_bytes(written: Path, dataset: Dataset, tmp_path: Path) -> None:
    analyze(dataset, tmp_path, labels=["label"])

    names = sorted(path.name for path in written.iterdir())
    assert names == ["anomalies.json", "report.html", "schema.json", "statistics.json"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (written / name).read_bytes(), name


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_report_stands_alone_and_runs_nothing(written: Path) -> None:
    parser = Tags()
    parser.feed((written / "report.html").read_text())

    assert not {"script", "img", "link", "iframe"} & set(parser.tags)
    assert not [name for name, _ in parser.attributes if name.startswith("on")]
    assert not [name for name, _ in parser.attributes if name in ("src", "href")]
    assert HOSTILE in parser.text
    assert "</script>" in parser.text
    assert parser.tags.count("svg") >= 5


def test_changed_shard_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    copy = write_dataset(tmp_path, COLUMNS, {"train": [make_table(1, is_eval=False)]})
    path = copy.paths("train")[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)

    with pytest.raises(DataError, match="must have the hash"):
        compute_statistics(copy)


def test_analysis_needs_no_tensorflow() -> None:
    code = (
        "import sys, stoker.data.features.analysis.analyze; sys.exit('tensorflow' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
