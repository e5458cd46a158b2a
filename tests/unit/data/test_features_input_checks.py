"""What the statistics say against columns: those that decide the label, say nothing, or are unknown."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn import datasets
from tests.datasets import write_dataset

from stoker.data.columns import VARYING, Column
from stoker.data.dataset import Dataset
from stoker.data.features.analysis import leaks as leaks_module
from stoker.data.features.analysis.anomalies import find_anomalies
from stoker.data.features.analysis.input_checks import (
    VocabularyLoss,
    input_findings,
    vocabulary_losses,
)
from stoker.data.features.analysis.leaks import ComputedLabels, find_leaks
from stoker.data.features.analysis.measure import compute_statistics
from stoker.data.features.analysis.statistics import infer_schema
from stoker.data.features.spec import LabelSpec, TransformSpec, VocabularySpec
from stoker.data.ingest import IngestConfig, ingest

_DTYPES: dict[str, Any] = {"int64": "int64", "double": "float64", "string": "string"}


def column_of(field: pa.Field) -> Column:
    is_vector, is_list = pa.types.is_fixed_size_list(field.type), pa.types.is_list(field.type)
    of_one = field.type.value_type if is_vector or is_list else field.type
    length = field.type.list_size if is_vector else VARYING if is_list else None
    return Column(name=field.name, dtype=_DTYPES[str(of_one)], length=length)


def write(root: Path, **splits: dict[str, Any]) -> Dataset:
    whole = {split: pa.table(given) for split, given in splits.items()}
    tables = {
        split: [part for part in (table[: len(table) // 3], table[len(table) // 3 :]) if len(part)]
        for split, table in whole.items()
    }
    columns = list(map(column_of, list(whole.values())[-1].schema))
    return write_dataset(root, columns, tables, row_group_size=70)


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


def test_the_length_of_a_list_that_decides_the_label_is_found(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    y, stars = np.arange(ROWS) % 2, rng.integers(0, 4, ROWS)
    lists: dict[str, Any] = {
        "flag": [["vip"] * number for number in y],
        "parity": [["a"] * number for number in y + 2 * rng.integers(0, 3, ROWS)],
        "reviews": [["x", "y"] * number for number in stars],
        "tags": [["a"] * number for number in rng.integers(0, 4, ROWS)],
    }
    columns = {name: pa.array(rows, pa.list_(pa.string())) for name, rows in lists.items()}

    found = leaks(write(tmp_path, train={"y": y, "stars": stars} | columns), "y", "stars")

    assert found == {"y": ["flag", "parity"], "stars": ["reviews"]}


def vector(rows: Any, item: pa.DataType) -> pa.Array:
    rows = list(map(list, rows))
    return pa.array(rows, pa.list_(item, len(rows[0])))


def subjects(dataset: Dataset, label: str) -> dict[str, str]:
    """Column -> how the finding calls what decides the label."""
    found = list(find_leaks(dataset, compute_statistics(dataset), [label]))
    assert len({leak.column for leak in found}) == len(found)
    return {leak.column: leak.message.partition(" alone")[0] for leak in found}


@pytest.mark.parametrize("sample_rows", [leaks_module.SAMPLE_ROWS, ROWS // 2])
def test_the_element_of_a_vector_or_list_that_decides_the_label_is_named(
    sample_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks_module, "SAMPLE_ROWS", sample_rows)
    rng = np.random.default_rng(7)
    y, price = np.arange(ROWS) % 2, rng.lognormal(3, 1, ROWS)
    noise = rng.normal(size=(ROWS, 200))

    def planted(place: int, values: Any, width: int = 8) -> Any:
        return np.concatenate(
            [noise[:, :place], np.asarray(values)[:, None], noise[:, place + 1 : width]], axis=1
        )

    paid = [
        [None if not sold and k == 1 else x for k, x in enumerate(row[:4])]
        for sold, row in zip(y, noise, strict=True)
    ]
    names = rng.choice(["a", "b", "c", ""], (ROWS, 5))
    names[:, 4] = np.where(y, "yes", "no")
    tags = [
        [["no", "yes"][sold]] + ["x"] * extra
        for sold, extra in zip(y, rng.integers(0, 3, ROWS), strict=True)
    ]
    given = {
        "y": y,
        "price": price,
        "copy": vector(planted(3, y), pa.float64()),
        "score": vector(planted(7, np.where(y, 5, -5) + rng.random(ROWS)), pa.float64()),
        "paid": pa.array(paid, pa.list_(pa.float64(), 4)),
        "names": vector(names, pa.string()),
        "all": vector(np.stack([y, y, -y], axis=1), pa.int64()),
        "long": vector(planted(199, y, 200), pa.float64()),
        "tags": pa.array(tags, pa.list_(pa.string())),
        "vip": pa.array([["x"] * sold for sold in y], pa.list_(pa.string())),
        "cents": vector(planted(2, price * 100), pa.float64()),
        "at_first": vector(
            planted(5, np.where(np.arange(ROWS) < ROWS - 9, y, 1 - y)), pa.float64()
        ),
    }
    dataset = write(tmp_path, train=given)

    counted = "(counted from 0)"
    assert subjects(dataset, "y") == {
        "copy": f"its element 3 {counted}",
        "score": f"its element 7 {counted}",
        "paid": f"its element 1 {counted}",
        "names": f"its element 4 {counted}",
        "all": f"each of its elements 0, 1, 2 {counted}",
        "long": f"its element 199 {counted}",
        "tags": f"its element 0 {counted}",
        "vip": "the length of its list",
    }
    assert subjects(dataset, "price") == {"cents": f"its element 2 {counted}"}


def test_embeddings_pixels_and_one_hot_vectors_are_not_taken_for_the_label(tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    digits = datasets.load_digits()
    rows = len(digits.target)
    topic = rng.integers(0, 20, rows)
    columns = {
        "pixels": vector(digits.data.astype(int), pa.int64()),
        # Each class has a center of its own, as in the embeddings of a trained model.
        "embedding": vector(
            rng.normal(size=(10, 300))[digits.target] + rng.normal(size=(rows, 300)), pa.float64()
        ),
        "topic": vector(np.eye(20, dtype=int)[topic], pa.int64()),
        "words": vector(rng.integers(0, 4, (rows, 30)), pa.int64()),
        "few": pa.array([[7] * (1 + each % 3) for each in topic], pa.list_(pa.int64())),
    }
    dataset = write(tmp_path, train=columns | {"y": digits.target, "topic_id": topic})

    assert subjects(dataset, "y") == {}


def test_at_most_64_elements_of_a_column_are_checked(tmp_path: Path) -> None:
    y = np.arange(ROWS) % 2
    noise = np.random.default_rng(1).normal(size=(ROWS, 127))

    def leak_at(place: int) -> pa.Array:
        values = noise.copy()
        values[:, place] = y
        return vector(values, pa.float64())

    # Of 127 elements every second one: 0, 2, ... 126.
    dataset = write(tmp_path, train={"y": y, "seen": leak_at(62), "unseen": leak_at(63)})

    assert subjects(dataset, "y") == {"seen": "its element 62 (counted from 0)"}


def test_lists_are_constant_only_if_they_are_equal_and_are_never_the_label_as_they_are(
    tmp_path: Path,
) -> None:
    lists: dict[str, Any] = {
        "equal": [["a", "a"]] * ROWS,
        "longer": [["a"] * (1 + row % 2) for row in range(ROWS)],
        "label": [["a"] * (row % 2) for row in range(ROWS)],
    }
    columns = {name: pa.array(rows, pa.list_(pa.string())) for name, rows in lists.items()}
    new = columns | {"label": pa.array([["b"]] * ROWS, pa.list_(pa.string()))}
    statistics = compute_statistics(write(tmp_path, train=columns, eval=new))

    found = find_anomalies(statistics, infer_schema(statistics, labels=["label"]))

    # preprocessing_fn may make a label of that name, so only the transform can refuse it.
    assert [(a.split, a.column, a.kind, a.severity) for a in found] == [
        ("train", "equal", "constant", "warning"),
        ("train", "label", "label_lists", "warning"),
        ("eval", "label", "new_values", "warning"),
    ]
    assert "must hold one value per record" in found[1].message


@pytest.mark.parametrize(
    ("label", "dtype", "computed_from", "decide"),
    [
        # Two thresholds part the classes of the price by what is almost the price as well.
        (
            lambda given: np.digitize(given["price"], [12, 25]),
            "int64",
            "price",
            ["cents", "discounted", "band", "orders"],
        ),
        (lambda given: np.log(given["price"])[:, None], "float32", "price", ["cents"]),
        (lambda given: given["sold"] * 1.0, "float32", "sold", ["copy", "buyer", "paid_at"]),
        (lambda given: np.stack([given["sold"]] * 2, axis=1), "int64", "sold", []),
    ],
)
def test_columns_that_decide_a_label_made_by_the_function_are_found_and_no_others(
    tmp_path: Path, label: Any, dtype: str, computed_from: str, decide: list[str]
) -> None:
    given = table()
    band = np.digitize(given["price"], [12, 25])
    given["band"] = np.array(list("abc"))[band]
    given["orders"] = pa.array([[1.5] * number for number in band], pa.list_(pa.float64()))
    dataset = write(tmp_path, train=given)
    values = label(given).astype(dtype)
    spec = LabelSpec(name="made", dtype=dtype, shape=values.shape[1:], classes=None)
    (tmp_path / "made").mkdir()
    left_out = {"score", "rank", "sold" if computed_from == "price" else "price"}
    served = [column for column in dataset.columns if column.name not in left_out]

    with contextlib.closing(ComputedLabels(tmp_path / "made", [spec])) as made:
        for part in np.array_split(values, 7):
            made.add({"made": part})
    found = made.leaks(
        dataset,
        compute_statistics(dataset),
        computed_from=[column for column in dataset.columns if column.name == computed_from],
        served=served,
    )

    messages = [(leak.column, leak.message) for leak in found]
    said = "alone decides the label 'made' in every row"
    subjects = {"orders": "the length of its list"}
    assert messages == [(name, f"{subjects.get(name, 'it')} {said}") for name in decide]


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


@pytest.mark.parametrize("mark", [1e200, -1e155, np.finfo(np.float64).max, np.inf, 1e-200])
def test_huge_marks_of_missing_values_hide_no_copy_and_end_nothing(
    tmp_path: Path, mark: float
) -> None:
    rng = np.random.default_rng(5)
    is_marked = np.arange(ROWS) % 9 == 0
    label = rng.normal(size=ROWS)
    given = {
        "y": label,
        "noise": np.where(is_marked, mark, rng.normal(size=ROWS)),
        "all": np.full(ROWS, mark),
        "copy": label * 2 if abs(mark) < 1 else np.where(is_marked, mark, label * 2),
    }

    assert leaks(write(tmp_path, train=given), "y") == {"y": ["copy"]}
    given |= {"y": np.where(is_marked, mark, label)}
    assert "all" not in leaks(write(tmp_path, train=given), "y")["y"]


def test_numbers_that_float32_merges_are_found_and_no_others(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    given = {
        "seconds": 1_700_000_000.25 + 10 * rng.integers(0, 80, ROWS),
        "cents": 12_345_678 + rng.integers(0, 100, ROWS) / 100,
        "year": rng.integers(1950, 2026, ROWS) + 0.5,
        "latitude": rng.uniform(52.51, 52.52, ROWS),
        "price": rng.lognormal(3, 1, ROWS).round(2),
        "none": np.full(ROWS, np.nan),
    }
    columns = {name: pa.array(values, pa.float32()) for name, values in given.items()}
    root = tmp_path / "d.parquet"
    pq.write_table(pa.table(columns | {"whole": 1_700_000_000 + rng.integers(0, 9, ROWS)}), root)
    dataset = ingest(IngestConfig(source=str(root)), tmp_path / "out")
    statistics = compute_statistics(dataset)

    found = find_anomalies(statistics, infer_schema(statistics))

    rounded = {each.column: each.message for each in found if each.kind == "rounded"}
    assert rounded.keys() == {"seconds", "cents"}
    assert rounded["cents"] == (
        "float32 has 2 values from 12345678.0 to 12345679.0, 1 apart, and rounds every number to one "
        "of them (whole numbers are not changed)"
    )


@pytest.mark.parametrize("first", [2**23, 12_345_678, 2**24 - 99, -(2**24)])
def test_whole_numbers_with_gaps_that_float32_holds_are_not_rounded(
    tmp_path: Path, first: int
) -> None:
    values = first + np.arange(ROWS) % 90
    is_missing = np.arange(ROWS) % 7 == 0
    source = tmp_path / "d.csv"
    cells = ("" if gap else str(value) for value, gap in zip(values, is_missing, strict=True))
    source.write_text("".join(f"{cell},1\n" for cell in ["id", *cells]))
    dataset = ingest(IngestConfig(source=str(source)), tmp_path / "out")
    statistics = compute_statistics(dataset)
    [numbers] = [each.numbers for each in statistics.splits["train"] if each.name == "id"]

    found = find_anomalies(statistics, infer_schema(statistics))

    assert dataset.column("id").dtype == "float32"
    assert numbers is not None
    assert numbers.max is not None
    assert numbers.max <= 2**24
    assert "rounded" not in {each.kind for each in found}


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


def test_values_that_a_vocabulary_does_not_have_are_counted_of_vectors_each(tmp_path: Path) -> None:
    words = pa.list_(pa.string(), 3)
    train = {"city": ["a", "b\nc", "a", "d"], "code": [1, 2, 2, 3]}
    train["words"] = pa.array([["a", "b", ""]] * 4, words)
    train["lists"] = pa.array([["a"], ["b", "a"], [], []], pa.list_(pa.string()))
    said = pa.array([["x", "y", "z"], ["x", "a", ""], ["", "", ""], ["x", "x", "x"]], words)
    dataset = write(
        tmp_path,
        train=train,
        eval={
            "city": ["a", "", "x", "b\nc"],
            "code": [9, 9, 1, 2],
            "words": said,
            "lists": pa.array([["x"], ["a", "y", ""], [], ["b"]], pa.list_(pa.string())),
        },
    )
    (tmp_path / "cities").write_bytes(b"a\nb\\nc\n")
    (tmp_path / "codes").write_bytes(b"1\n2\n")
    (tmp_path / "all").write_bytes(b"a\nb\n")
    learned = spec(
        ("cities", "city", {}),
        ("codes", "code", {"top_k": 2}),
        ("all", "words", {}),
        ("all", "lists", {}),
    )

    found = vocabulary_losses(dataset, learned, tmp_path)

    assert [(each.column, each.split, each.values, each.lost) for each in found] == [
        ("city", "eval", 3, 1),
        ("code", "train", 4, 1),
        ("code", "eval", 4, 2),
        ("words", "eval", 8, 7),
        ("lists", "eval", 4, 2),
    ]


def anomaly(column: str, kind: str) -> dict[str, Any]:
    return {"column": column, "kind": kind, "message": "it is so"}


def loss(column: str, *, lost: int, values: int = 200) -> dict[str, Any]:
    return asdict(
        VocabularyLoss(vocabulary="v", column=column, split="eval", values=values, lost=lost)
    )


SERVED: dict[str, tuple[int | None, ...]] = {
    "a": (),
    "b": (),
    "c": (),
    "d": (),
    "mask": (8,),
    "list": (None,),
}
LABEL = LabelSpec(name="y", dtype="int64", shape=(), classes=None)


def lines_of(**given: Any) -> list[str]:
    plain: dict[str, Any] = {"anomalies": (), "losses": (), "label_columns": ("y",), "own": False}
    return [
        finding.line()
        for finding in input_findings(**plain | {"served": SERVED, "labels": {"": LABEL}} | given)
    ]


def test_only_columns_that_the_model_sees_are_judged_each_in_one_line_with_the_remedy() -> None:
    lines = lines_of(
        anomalies=[
            anomaly("a", "constant"),
            anomaly("b", "decides_label"),
            anomaly("mask", "constant"),
            anomaly("list", "constant"),
            anomaly("unused", "all_missing"),
        ],
        losses=[loss("c", lost=198), loss("d", lost=20), loss("d", lost=50, values=50)],
    )

    constant, decides, lost = lines
    assert constant.startswith("column 'a' of train: it is so, so the model learns nothing")
    assert decides.startswith(
        "column 'b' of train: it is so. Set data.columns: {exclude: ['b']} if"
    )
    assert lost.startswith("99% of the values of 'c' in eval are not in its vocabulary. Use")
    assert constant.endswith("Set data.columns: {exclude: ['a']}.")
    [by_length] = lines_of(anomalies=[anomaly("list", "decides_label")])
    assert by_length.startswith("column 'list' of train: it is so. Set data.columns: {exclude")
    twice = [anomaly("a", "decides_label")] * 2
    many = [loss("a", lost=150), loss("b", lost=150), loss("b", lost=160)]
    assert [line.split("'")[1] for line in lines_of(anomalies=twice, losses=many)] == ["a", "b"]
    [own] = lines_of(anomalies=[anomaly("a", "all_missing")], own=True, label_columns=("a",))
    assert own.endswith("Leave it out of the elements.")


def test_numbers_that_are_rounded_and_classes_that_look_alike_are_reported_with_the_remedy() -> (
    None
):
    texts = LabelSpec(name="y", dtype="int64", shape=(), classes=("No", "Yes", "yes ", "yes, no"))
    rounded = [anomaly("a", "rounded")]

    numbers, alike = lines_of(anomalies=rounded, labels={"": texts})
    [own] = lines_of(anomalies=rounded, own=True)

    assert numbers.startswith("column 'a' of train: it is so. Subtract an offset in the source; or")
    assert "tf.strings.to_number(inputs['a'], tf.float64)" in numbers
    assert alike.startswith("the label has the classes 'Yes', 'yes ', which differ only in case")
    assert own.endswith("Subtract an offset in the source, in float64.")


def test_a_label_made_only_of_what_the_model_sees_is_a_warning() -> None:
    [line] = lines_of(label_columns=("a", "b"))

    assert line.startswith("the label is computed from columns that the model sees: a, b.")
    assert lines_of(label_columns=("a", "tips")) == []
    # The last place of a window of which the features are the others.
    assert lines_of(label_columns=("mask",)) == lines_of(label_columns=("mask", "a")) == []
    # A picture that is to be restored is its own label.
    of_vectors = LabelSpec(name="y", dtype="float32", shape=(8,), classes=None)
    assert lines_of(label_columns=("mask",), labels={"": of_vectors}) == []
