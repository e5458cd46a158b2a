"""Vectors: what goes in comes back, by every seam; a record that does not fit is named."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.core.errors import DataError
from stoker.data.columns import PADDING, VARYING, Column, Dtype, list_lengths, to_numpy
from stoker.data.dataset import Dataset, load_dataset
from stoker.data.features.analysis.anomalies import find_anomalies
from stoker.data.features.analysis.measure import compute_statistics
from stoker.data.features.analysis.report import render_report
from stoker.data.features.analysis.statistics import infer_schema
from stoker.data.ingest import IngestConfig, describe_source, ingest
from stoker.data.ingest.assign import SplitRule
from stoker.data.ingest.shards import ColumnHash
from stoker.data.sources.config import ColumnsConfig
from stoker.data.sources.records import Block, Scan, silent
from stoker.data.sources.source import open_source

ITEMS: dict[Dtype, st.SearchStrategy[Any]] = {
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.one_of(st.none(), st.floats(width=32)),
    "string": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
}
ARROW = {"int64": pa.int64(), "float32": pa.float32(), "string": pa.string()}


@st.composite
def vectors(draw: st.DrawFn) -> tuple[Column, list[list[Any]]]:
    """A column of vectors and some rows of it."""
    dtype = draw(st.sampled_from(sorted(ITEMS)))
    length = draw(st.integers(1, 5))
    row = st.lists(ITEMS[dtype], min_size=length, max_size=length)
    column = Column(name="x", dtype=dtype, length=length)
    return column, draw(st.lists(row, min_size=30, max_size=40))


@st.composite
def lists(draw: st.DrawFn) -> tuple[Column, list[list[Any]]]:
    """A column of lists of varying length and some rows of it."""
    dtype: Dtype = draw(st.sampled_from(sorted(ITEMS)))
    items = ITEMS[dtype]
    if dtype == "int64":
        items = st.integers(-(2**63) + 1, 2**63 - 1)
    if dtype == "float32":  # JSON has no infinity and no NaN
        items = st.one_of(st.none(), st.floats(width=32, allow_nan=False, allow_infinity=False))
    column = Column(name="x", dtype=dtype, length=VARYING)
    rows = st.lists(st.lists(items, max_size=4), min_size=29, max_size=39)
    # One row with a value, or JSON does not say what the lists hold.
    return column, [[{"int64": 1, "float32": 1.5, "string": "a"}[dtype]], *draw(rows)]


def as_array(column: Column, rows: list[list[Any]]) -> np.ndarray[Any, Any]:
    """What `to_numpy` must give."""
    if column.dtype == "string":
        return np.array([[item.encode() for item in row] for row in rows], dtype=object)
    filled = [[np.nan if item is None else item for item in row] for row in rows]
    return np.array(filled, dtype=column.dtype)


def read(source: Path | str, **settings: Any) -> tuple[Scan, list[Block]]:
    opened = open_source(IngestConfig(source=str(source), **settings), labels=())
    scan = opened.scan(silent)
    return scan, list(opened.blocks(scan))


def faults(blocks: list[Block]) -> list[tuple[int, str, str]]:
    return [(f.row, f.column, f.reason) for block in blocks for f in block.faults]


def whole(dataset: Dataset) -> np.ndarray[Any, Any]:
    """The column x of all splits, sorted by the record's number."""
    tables = [dataset.table(split) for split in dataset.splits]
    table = pa.concat_tables(tables).sort_by("n")
    return to_numpy(dataset.column("x"), table.column("x"))


@given(drawn=vectors(), form=st.sampled_from(["list", "large_list", "fixed_size_list"]))
@settings(max_examples=12)  # each one fsyncs a whole dataset
def test_vectors_come_back_through_shards_and_manifest(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Column, list[list[Any]]], form: str
) -> None:
    column, rows = drawn
    folder = tmp_path_factory.mktemp("vectors")
    item = ARROW[column.dtype]
    kinds = {
        "list": pa.list_(item),
        "large_list": pa.large_list(item),
        "fixed_size_list": pa.list_(item, column.length),
    }
    numbers = list(range(len(rows)))
    table = pa.table({"n": numbers, "x": pa.array(rows, kinds[form])})
    pq.write_table(table, folder / "data.parquet")

    halves = {"train": 0.5, "eval": 0.5}  # of 30 records neither is empty
    source = str(folder / "data.parquet")
    ingest(IngestConfig(source=source, shard_rows=7, splits=halves), folder / "out")
    dataset = load_dataset(folder / "out")

    assert dataset.column("x") == column
    np.testing.assert_array_equal(whole(dataset), as_array(column, rows))
    dataset.verify()


@given(
    drawn=st.one_of(vectors(), lists()),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    other=st.integers(0, 11),
)
def test_the_hash_goes_by_values_and_length_and_not_by_pieces(
    drawn: tuple[Column, list[list[Any]]], cuts: list[int], other: int
) -> None:
    column, rows = drawn
    values = pa.array(rows, column.arrow_type)

    def digest(of: Column, *parts: pa.Array) -> str:
        found = ColumnHash(of)
        for part in parts:
            found.add(pa.chunked_array([part]))
        return found.hexdigest()

    bounds = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    parts = [values.slice(a, b - a) for a, b in itertools.pairwise(bounds)]
    changed = [list(row) for row in rows]
    changed[other][-1:] = [{"int64": 4, "float32": 4.5, "string": "four"}[column.dtype]]
    single = Column(name="x", dtype=column.dtype)

    assert digest(column, *parts) == digest(column, values)
    if changed != rows:
        assert digest(column, pa.array(changed, column.arrow_type)) != digest(column, values)
    assert digest(single, values.flatten()) != digest(column, values)


@pytest.mark.parametrize(
    ("column", "values", "begins"),
    [
        (Column(name="x", dtype="float32"), pa.array([1.5, None], pa.float32()), "7290af6cda20"),
        (Column(name="x", dtype="string"), pa.array(["a", ""]), "9eb70947730c"),
        (
            Column(name="x", dtype="float32", whole=True),
            pa.array([1.0, None], pa.float32()),
            "7e5e53a0bb45",
        ),
    ],
)
def test_hashes_of_single_values_never_change(
    column: Column, values: pa.Array, begins: str
) -> None:
    """The figures are those of the release before vectors: what was cached stays so."""
    found = ColumnHash(column)
    found.add(pa.chunked_array([values]))

    assert found.hexdigest().startswith(begins)


@given(drawn=st.one_of(vectors(), lists()), start=st.integers(0, 11))
def test_a_records_split_follows_from_its_vector_alone(
    drawn: tuple[Column, list[list[Any]]], start: int
) -> None:
    column, rows = drawn
    rule = SplitRule({"train": 0.5, "eval": 0.5}, seed=0, split_by=None)
    table = pa.table({"x": pa.array(rows, column.arrow_type)})

    together = rule.assign(table, [column])

    np.testing.assert_array_equal(rule.assign(table.slice(start), [column]), together[start:])


def test_the_order_inside_a_vector_counts_for_its_split() -> None:
    column = Column(name="x", dtype="int64", length=2)
    rule = SplitRule({"train": 0.5, "eval": 0.5}, seed=0, split_by=None)
    pairs = [[a, b] for a in range(30) for b in range(a)]
    straight = pa.table({"x": pa.array(pairs, column.arrow_type)})
    turned = pa.table({"x": pa.array([pair[::-1] for pair in pairs], column.arrow_type)})

    same = rule.assign(straight, [column]) == rule.assign(turned, [column])

    assert 0.4 < same.mean() < 0.6


def test_a_missing_list_and_one_of_another_length_are_named(tmp_path: Path) -> None:
    rows = [[1.0, 2.0], None, [3.0], [4.0, 5.0], [6.0, 7.0, 8.0], [9.0, None], *[[1.0, 2.0]] * 16]
    pq.write_table(pa.table({"x": pa.array(rows)}), tmp_path / "a.parquet")

    scan, blocks = read(tmp_path / "a.parquet", max_bad_rows=9)

    assert scan.columns == (Column(name="x", dtype="float32", length=2),)
    found = [v for b in blocks for v in b.table["x"].to_pylist()]
    assert found == [[1, 2], [4, 5], [9, None], *[[1, 2]] * 16]
    assert faults(blocks) == [
        (2, "x", "the vector is missing"),
        (3, "x", "a vector of length 1 instead of 2"),
        (5, "x", "a vector of length 3 instead of 2"),
    ]


def test_ingest_stops_at_a_vector_of_another_length_and_leaves_nothing(tmp_path: Path) -> None:
    rows = [[1.0, 2.0]] * 200 + [[3.0]]
    pq.write_table(pa.table({"n": range(201), "x": pa.array(rows)}), tmp_path / "a.parquet")

    with pytest.raises(DataError, match=r"a\.parquet row 201, column 'x': a vector of length 1 "):
        ingest(IngestConfig(source=str(tmp_path / "a.parquet")), tmp_path / "out")

    assert not list(tmp_path.glob("out/**/*.parquet"))


def test_a_bad_value_in_a_vector_is_shown_and_its_neighbors_stay(tmp_path: Path) -> None:
    table = {
        "whole": pa.array([[1, 2], [3, None], [5, 6], [7, 8]]),
        "text": pa.array([["a", "b"], ["c", "d"], ["e", "f\0"], [None, "h"]]),
        "wide": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 1e300]]),
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")

    _, blocks = read(tmp_path / "a.parquet", max_bad_rows=9)

    found = faults(blocks)
    assert blocks[0].table.to_pylist() == [{"whole": [1, 2], "text": ["a", "b"], "wide": [1, 2]}]
    assert [(row, column) for row, column, _ in found] == [(2, "whole"), (3, "text"), (4, "wide")]
    assert "a whole number of the vector is missing" in found[0][2]
    assert "f\\x00" in found[1][2]
    assert "1e+300" in found[2][2]


@pytest.mark.parametrize(
    ("rows", "kind", "wanted"),
    [
        ([[1], [1, 2], [1, 2, 3], [2]], pa.int64(), [[1], [1, 2], [1, 2, 3], [2]]),
        ([[], [], [1]], pa.int64(), [[], [], [1]]),
        ([None, [], None], pa.int64(), [[], [], []]),
        ([None, None], pa.null(), [[], []]),
        ([["a"], [None, "b", None], None], pa.string(), [["a"], ["", "b"], []]),
    ],
)
def test_lists_without_a_common_length_are_a_column_too(
    tmp_path: Path, rows: list[Any], kind: pa.DataType, wanted: list[Any]
) -> None:
    pq.write_table(pa.table({"x": pa.array(rows, pa.list_(kind))}), tmp_path / "a.parquet")

    scan, blocks = read(tmp_path / "a.parquet")

    dtype: Dtype = "int64" if kind == pa.int64() else "string"
    assert scan.columns == (Column(name="x", dtype=dtype, length=VARYING),)
    assert [v for b in blocks for v in b.table["x"].to_pylist()] == wanted
    assert faults(blocks) == []


@pytest.mark.parametrize(("odd", "length"), [(1, 3), (10, 3), (11, VARYING), (40, VARYING)])
def test_max_bad_rows_leaves_out_few_records_of_another_length_and_never_many(
    odd: int, length: int, tmp_path: Path
) -> None:
    rows = [[1.0, 2.0, 3.0]] * (100 - odd) + [[1.0]] * odd
    pq.write_table(pa.table({"x": rows, "y": [1.5] * 100}), tmp_path / "a.parquet")

    scan, blocks = read(tmp_path / "a.parquet", max_bad_rows=90)

    assert scan.columns[0].length == length
    assert sum(block.bad for block in blocks) == (odd if length != VARYING else 0)


def test_both_readings_of_lists_of_which_few_differ_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [[1.0, 2.0]] * 58 + [[1.0]] * 2}), tmp_path / "a.parquet")
    scan, _ = read(tmp_path / "a.parquet")
    [assumed] = scan.assumptions
    assert assumed.text.endswith(
        "Set data.columns: {lists: ['x']} to confirm this, or data.max_bad_rows: 2 to leave out 2 records "
        "and read vectors of length 2"
    )

    pq.write_table(pa.table({"x": [[1.0, 2.0]] * 598 + [[1.0]] * 2}), tmp_path / "a.parquet")
    config = IngestConfig(source=str(tmp_path / "a.parquet"))
    with pytest.raises(
        DataError, match=r"or set data\.columns: \{lists: \['x'\]\} to read lists of"
    ):
        ingest(config, tmp_path / "out")


def test_a_bad_value_in_a_list_is_shown_and_its_neighbors_stay(tmp_path: Path) -> None:
    rows = {
        "whole": [[1], [3, None], [5, 6], [], [7]],
        "text": [["a"], [], ["f\0", "g"], ["c", "d"], ["e"]],
        "wide": [[], [1.0], [2.0, 3.0], [4.0, 1e300], [5.0]],
        "long": [[1], [], [1, 2], [3], [0] * 65_537],
    }
    table = {name: pa.array(values) for name, values in rows.items()}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")

    _, blocks = read(
        tmp_path / "a.parquet", max_bad_rows=4, columns=ColumnsConfig(lists=tuple(rows))
    )

    found = faults(blocks)
    assert [row for block in blocks for row in block.table.to_pylist()] == [
        {"whole": [1], "text": ["a"], "wide": [], "long": [1]}
    ]
    assert [(row, name) for row, name, _ in found] == [
        (2, "whole"),
        (3, "text"),
        (4, "wide"),
        (5, "long"),
    ]
    assert found[0][2] == "a whole number of the list is missing"
    assert "f\\x00" in found[1][2]
    assert "1e+300" in found[2][2]
    assert "more than 65,536 values" in found[3][2]


@given(drawn=lists())
@settings(max_examples=6)  # each one fsyncs two whole datasets
def test_lists_come_back_alike_from_parquet_and_json_lines(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Column, list[list[Any]]]
) -> None:
    column, rows = drawn
    folder = tmp_path_factory.mktemp("lists")
    table = pa.table({"n": range(len(rows)), "x": pa.array(rows, column.arrow_type)})
    pq.write_table(table, folder / "a.parquet")
    records = ({"n": n, "x": row} for n, row in enumerate(rows))
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    made = [
        ingest(
            IngestConfig(
                source=str(folder / f"a.{form}"),
                shard_rows=7,
                splits={"train": 0.5, "eval": 0.5},
                columns=ColumnsConfig(lists=("x",)),
            ),
            folder / form,
        )
        for form in ("parquet", "jsonl")
    ]

    assert made[0].fingerprint == made[1].fingerprint
    dataset = load_dataset(made[0].root)
    assert dataset.column("x") == column
    found = whole(dataset)
    longest = max(map(len, rows))
    padding = [None if column.dtype == "float32" else PADDING[column.dtype]] * longest
    if column.dtype == "string":
        padding = [""] * longest
    wanted = as_array(column, [[*row, *padding][:longest] for row in rows])
    np.testing.assert_array_equal(found, wanted[:, : found.shape[1]])
    assert list_lengths(column, wanted).max() == found.shape[1]


def test_the_length_of_a_list_is_that_without_missing_values_at_its_end() -> None:
    def lengths(dtype: Dtype, *rows: list[Any]) -> list[int]:
        column = Column(name="x", dtype=dtype, length=VARYING)
        padded = to_numpy(column, pa.array(rows, column.arrow_type))
        return list_lengths(column, padded).tolist()

    assert lengths("int64", [0, 0], [], [5]) == [2, 0, 1]
    assert lengths("float32", [None, 1.0, None], [None], []) == [2, 0, 0]
    assert lengths("string", ["", "a"], ["a", "", ""], [""]) == [2, 1, 0]
    assert lengths("string", [], []) == [0, 0]


def test_files_with_vectors_and_with_single_values_do_not_go_together(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([[1.0]])}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": pa.array([1.0])}), tmp_path / "b.parquet")

    with pytest.raises(DataError, match=r"vectors in a\.parquet, single values in b\.parquet"):
        read(tmp_path)


def test_files_may_hold_the_same_vectors_as_lists_of_other_kinds(tmp_path: Path) -> None:
    kinds = [pa.list_(pa.int32()), pa.list_(pa.float64(), 2), pa.null()]
    for name, kind in zip("abc", kinds, strict=True):
        rows = [None] if kind == pa.null() else [[1, 2], [3, 4]]
        pq.write_table(pa.table({"x": pa.array(rows, kind)}), tmp_path / f"{name}.parquet")

    scan, blocks = read(tmp_path, max_bad_rows=9)

    assert scan.columns == (Column(name="x", dtype="float32", length=2),)
    assert [v for b in blocks for v in b.table["x"].to_pylist()] == [[1, 2], [3, 4]] * 2
    assert faults(blocks) == [(1, "x", "the vector is missing")]


def test_data_types_reads_the_values_of_vectors_otherwise(tmp_path: Path) -> None:
    rows = pa.array([["1", "2"], ["3", "x"], ["4", "NA"]])
    pq.write_table(pa.table({"x": rows}), tmp_path / "a.parquet")

    scan, blocks = read(tmp_path / "a.parquet", types={"x": "int"}, max_bad_rows=9)

    assert scan.columns == (Column(name="x", dtype="int64", length=2),)
    assert [v for b in blocks for v in b.table["x"].to_pylist()] == [[1, 2]]
    assert [row for row, _, _ in faults(blocks)] == [2, 3]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """300 records of vectors of each type, without chance."""
    folder = tmp_path_factory.mktemp("dataset")
    rng = np.random.default_rng(3)
    floats = rng.normal(size=(300, 4)).round(3)
    rows = [[None if value > 1.5 else float(value) for value in row] for row in floats]
    table = {
        "f.x": pa.array(rows, pa.list_(pa.float32(), 4)),
        "i": pa.array(rng.integers(0, 9, (300, 3)).tolist()),
        "s": pa.array(rng.choice(["red", "blue", ""], (300, 2)).tolist()),
        "l": pa.array([row[: number % 4] for number, row in enumerate(rows)]),
    }
    pq.write_table(pa.table(table), folder / "data.parquet")
    return ingest(IngestConfig(source=str(folder / "data.parquet")), folder / "out")


def test_statistics_are_those_of_all_values(dataset: Dataset) -> None:
    statistics = compute_statistics(dataset)
    for name in ("f.x", "i", "s"):
        column = dataset.column(name)
        values = to_numpy(column, dataset.table("train").column(name)).ravel()
        found = statistics.column("train", name)
        present = values[~np.isnan(values)] if column.dtype == "float32" else values[values != b""]

        assert found.length == column.length
        assert (found.count, found.missing) == (len(present), len(values) - len(present))
        assert found.distinct == len(set(present.tolist()))
        if found.numbers is not None:
            numbers = present.astype(np.float64)
            assert found.numbers.mean == pytest.approx(numbers.mean())
            assert found.numbers.std == pytest.approx(numbers.std())
            assert (found.numbers.min, found.numbers.max) == (numbers.min(), numbers.max())
            assert sum(found.numbers.histogram) == len(numbers)
            median = np.sort(numbers)[len(numbers) * 5 // 10]
            assert found.numbers.quantiles[4] == pytest.approx(median)
    assert "float32 [4]" in render_report(statistics, infer_schema(statistics), [])


def test_statistics_of_lists_are_those_of_their_values_and_their_lengths(dataset: Dataset) -> None:
    statistics = compute_statistics(dataset)
    found = statistics.column("train", "l")
    rows = dataset.table("train").column("l").to_pylist()
    values = [value for row in rows for value in row if value is not None]
    lengths = [len(row) for row in rows]

    assert found.length == VARYING
    assert found.count == len(values)
    assert found.missing == sum(lengths) - len(values) + lengths.count(0)
    assert found.distinct == len(set(values))
    assert found.numbers is not None
    assert found.numbers.mean == pytest.approx(np.mean(values))
    assert found.list_lengths is not None
    assert found.list_lengths.mean == pytest.approx(np.mean(lengths))
    assert (found.list_lengths.min, found.list_lengths.max) == (0, 3)
    written = json.loads(json.dumps(asdict(statistics)))
    assert written["splits"]["train"][3]["list_lengths"] == json.loads(
        json.dumps(asdict(found.list_lengths))
    )
    schema = infer_schema(statistics)
    report = render_report(statistics, schema, [])
    assert "float32 [varying]" in report
    assert "values in a list" in report
    fixed = replace(schema, columns=(*schema.columns[:3], replace(schema.columns[3], length=2)))
    assert {
        a.message
        for a in find_anomalies(statistics, fixed)
        if (a.column, a.kind) == ("l", "length")
    } == {"it holds lists of varying length, but the schema says vectors of length 2"}


def test_another_length_is_an_anomaly(dataset: Dataset, tmp_path: Path) -> None:
    rows = pa.array([[float(n), 1.0, 2.0] for n in range(60)], pa.list_(pa.float32(), 3))
    columns = {name: dataset.table("train").column(name).slice(0, 60) for name in ("i", "s", "l")}
    pq.write_table(pa.table({"f.x": rows} | columns), tmp_path / "data.parquet")
    other = ingest(IngestConfig(source=str(tmp_path / "data.parquet")), tmp_path / "out")

    schema = infer_schema(compute_statistics(dataset))
    found = [a for a in find_anomalies(compute_statistics(other), schema) if a.kind == "length"]

    assert {(a.column, a.severity) for a in found} == {("f.x", "error")}
    assert (
        found[0].message == "it holds vectors of length 3, but the schema says vectors of length 4"
    )


def test_vectors_are_packed_as_well_as_single_values(dataset: Dataset) -> None:
    group = pq.read_metadata(dataset.paths("train")[0]).row_group(0)

    chunks = [group.column(index) for index in range(group.num_columns)]

    assert chunks[0].path_in_schema == "f.x.list.element"
    assert {chunk.compression for chunk in chunks} == {"LZ4"}
    for chunk in chunks:
        assert ("RLE_DICTIONARY" in chunk.encodings) == (chunk.physical_type != "FLOAT")
    assert chunks[3].path_in_schema == "l.list.element"


def test_a_description_counts_the_values_in_vectors(dataset: Dataset) -> None:
    source = dataset.root.parent / "data.parquet"

    described = {
        c.column.name: c for c in describe_source(IngestConfig(source=str(source))).columns
    }

    assert described["s"].column == Column(name="s", dtype="string", length=2)
    assert described["s"].distinct == 3
    assert described["f.x"].missing > 0
    assert described["i"].missing == 0
    assert {name: each.lengths for name, each in described.items()} == {
        "f.x": 1,
        "i": 1,
        "s": 1,
        "l": 4,
    }
