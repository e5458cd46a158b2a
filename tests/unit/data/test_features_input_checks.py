"""What the statistics say against columns: those that decide the label, say nothing, or are unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn import datasets

from stoker.core.files import sha256_file
from stoker.data.columns import Column
from stoker.data.dataset import Dataset, Shard
from stoker.data.features.input_checks import VocabularyLoss, input_findings, vocabulary_losses
from stoker.data.features.leaks import find_leaks
from stoker.data.features.measure import compute_statistics
from stoker.data.features.spec import LabelSpec, TransformSpec, VocabularySpec

_DTYPES: dict[str, Any] = {"int64": "int64", "double": "float64", "string": "string"}


def write(root: Path, **splits: dict[str, Any]) -> Dataset:
    shards: dict[str, tuple[Shard, ...]] = {}
    for split, given in splits.items():
        table, path = pa.table(given), root / f"{split}.parquet"
        pq.write_table(table, path, write_page_checksum=True)
        size = path.stat().st_size
        shard = Shard(file=path.name, rows=len(table), size_bytes=size, sha256=sha256_file(path))
        shards[split] = (shard,)
    columns = tuple(Column(name=f.name, dtype=_DTYPES[str(f.type)]) for f in table.schema)
    hashes = {split: {column.name: "0" for column in columns} for split in shards}
    return Dataset(root=root, columns=columns, splits=shards, column_hashes=hashes)


def leaks(dataset: Dataset, *labels: str) -> dict[str, list[str]]:
    statistics = compute_statistics(dataset)
    return {
        label: [leak.column for leak in find_leaks(dataset, statistics, [label])]
        for label in labels
    }


ROWS = 400


def table(rows: int = ROWS) -> dict[str, Any]:
    """A sale, what is known of it before, and what is known only after it."""
    rng = np.random.default_rng(3)
    sold = (np.arange(rows) % 8 == 0).astype(int)
    price = rng.lognormal(3, 1, rows).round(2)
    city = rng.choice(list("abcdef"), rows)
    return {
        "sold": sold,
        "price": price,
        "copy": np.where(sold, "yes", "no"),
        "buyer": np.where(sold, [f"b{row}" for row in range(rows)], ""),
        "paid_at": pa.array(rng.normal(size=rows), pa.float64(), mask=sold == 0),
        "score": np.where(sold, 5, -5) + rng.random(rows),
        "almost": np.where(np.arange(rows) == 8, 1 - sold, sold),
        "cents": np.rint(price * 100).astype(int),
        "discounted": price * rng.uniform(0.99, 1, rows),
        "city": city,
        "id": np.arange(rows),
        "rank": np.argsort(np.argsort(-sold, kind="stable"), kind="stable"),
        "width": rng.normal(size=rows),
    }


def test_columns_that_decide_the_label_are_found_and_no_others(tmp_path: Path) -> None:
    found = leaks(write(tmp_path, train=table()), "sold", "price")

    # A rank, or an id of rows that are sorted by the label, is one of them.
    assert found["sold"] == ["copy", "buyer", "paid_at", "score", "rank"]
    assert found["price"] == ["cents"]


def test_few_rows_and_few_of_a_class_decide_nothing(tmp_path: Path) -> None:
    few = {name: column[:80] for name, column in table().items() if name in ("sold", "copy")}
    rare = {"y": [1] * 5 + [0] * 195, "z": ["a"] * 5 + ["b"] * 195}

    for name, given, label in (("few", few, "sold"), ("rare", rare, "y")):
        (tmp_path / name).mkdir()
        assert leaks(write(tmp_path / name, train=given), label) == {label: []}


def test_a_table_that_is_easy_to_learn_holds_no_column_that_decides_it(tmp_path: Path) -> None:
    given = datasets.load_iris()
    columns = {f"c{place}": column for place, column in enumerate(given.data.T)}

    assert leaks(write(tmp_path, train=columns | {"y": given.target}), "y") == {"y": []}


def spec(*vocabularies: tuple[str, str, dict[str, Any]]) -> TransformSpec:
    """Vocabularies by name, each with its column and its parameters."""
    return TransformSpec(
        features=(),
        labels={},
        serving_columns=(),
        label_columns=(),
        weight=None,
        weight_columns=(),
        vocabularies={
            name: VocabularySpec(file=name, terms=2, escaped=True) for name, _, _ in vocabularies
        },
        ids={},
        analyzers=tuple(
            {
                "kind": "vocabulary",
                "of": column,
                "is_raw_column": True,
                "params": {"top_k": None, "frequency_threshold": None} | params,
                "answer": {"file": name},
            }
            for name, column, params in vocabularies
        ),
    )


def test_values_that_a_vocabulary_does_not_have_are_counted_by_row(tmp_path: Path) -> None:
    train = {"city": ["a", "b\nc", "a", "d"], "code": [1, 2, 2, 3]}
    dataset = write(
        tmp_path, train=train, eval={"city": ["a", "", "x", "b\nc"], "code": [9, 9, 1, 2]}
    )
    (tmp_path / "cities").write_bytes(b"a\nb\\nc\n")
    (tmp_path / "codes").write_bytes(b"1\n2\n")

    found = vocabulary_losses(
        dataset, spec(("cities", "city", {}), ("codes", "code", {"top_k": 2})), tmp_path
    )

    assert [(each.column, each.split, each.rows, each.lost) for each in found] == [
        ("city", "eval", 4, 1),
        ("code", "train", 4, 1),
        ("code", "eval", 4, 2),
    ]


def anomaly(column: str, kind: str) -> dict[str, Any]:
    return {"column": column, "kind": kind, "message": "it is so"}


def loss(column: str, *, lost: int, rows: int = 200) -> dict[str, Any]:
    given = VocabularyLoss(vocabulary="v", column=column, split="eval", rows=rows, lost=lost)
    return {name: getattr(given, name) for name in ("column", "split", "rows", "lost")}


SERVED: dict[str, tuple[int | None, ...]] = {"a": (), "b": (), "mask": (8,)}
LABEL = LabelSpec(name="y", dtype="int64", shape=(), classes=None)


def told(**given: Any) -> list[str]:
    plain: dict[str, Any] = {"anomalies": (), "losses": (), "label_columns": ("y",), "own": False}
    return [
        finding.line()
        for finding in input_findings(**plain | {"served": SERVED, "labels": {"": LABEL}} | given)
    ]


def test_only_columns_that_the_model_sees_are_judged_each_in_one_line_with_the_remedy() -> None:
    lines = told(
        anomalies=[
            anomaly("a", "constant"),
            anomaly("b", "decides_label"),
            anomaly("mask", "constant"),
            anomaly("unused", "all_missing"),
        ],
        losses=[loss("a", lost=198), loss("b", lost=20), loss("a", lost=50, rows=50)],
    )

    constant, decides, lost = lines
    assert constant.startswith("column 'a' of train: it is so, so the model learns nothing")
    assert decides.startswith(
        "column 'b' of train: it is so. Set data.columns: {exclude: ['b']} if"
    )
    assert lost.startswith(
        "99% of the rows of eval have a value of 'a' that its vocabulary does not"
    )
    assert constant.endswith("Set data.columns: {exclude: ['a']}.")
    [own] = told(anomalies=[anomaly("a", "all_missing")], own=True, label_columns=("a",))
    assert own.endswith("Leave it out of the elements.")


def test_a_label_made_only_of_what_the_model_sees_is_a_warning() -> None:
    [line] = told(label_columns=("a", "b"))

    assert line.startswith("the label is computed from columns that the model sees: a, b.")
    assert told(label_columns=("a", "tips")) == []
    # A picture that is to be restored is its own label.
    of_vectors = LabelSpec(name="y", dtype="float32", shape=(8,), classes=None)
    assert told(label_columns=("mask",), labels={"": of_vectors}) == []
