"""Ingest: nothing lost, nothing twice, each record in the split of its content, faults named."""

from __future__ import annotations

import csv
import logging
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.core.errors import ConfigError, DataError
from stoker.data.columns import Column
from stoker.data.dataset import BadRow, Dataset, ImageShape, load_dataset
from stoker.data.ingest import IngestConfig, describe_source, ingest
from stoker.data.ingest.assign import SplitRule
from stoker.data.ingest.shards import ShardOutput, SplitWriter
from stoker.data.sources.formats import csv_files

SHARES = {"train": 0.8, "eval": 0.2}


def write_csv(path: Path, rows: list[tuple[Any, ...]], header: tuple[str, ...]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def numbered(path: Path, count: int) -> Path:
    return write_csv(path, [(i, f"name {i}", i / 4) for i in range(count)], ("id", "name", "x"))


def rows_by_split(dataset: Dataset) -> dict[str, list[dict[str, Any]]]:
    return {
        split: [row for batch in dataset.batches(split) for row in batch.to_pylist()]
        for split in dataset.splits
    }


shares = st.lists(st.integers(1, 9), min_size=2, max_size=4).map(
    lambda parts: {
        name: part / sum(parts)
        for name, part in zip(["train", "eval", "test", "a"], parts, strict=False)
    }
)


@given(
    count=st.integers(60, 200),
    shard_rows=st.integers(1, 250),
    splits=shares,
    block_bytes=st.integers(60, 4000),
    seed=st.integers(),
)
@settings(max_examples=10, deadline=None)
def test_no_row_is_lost_or_doubled_and_the_order_is_kept(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    shard_rows: int,
    splits: dict[str, float],
    block_bytes: int,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("ingest")
    source = numbered(folder / "data.csv", count)
    config = IngestConfig(source=str(source), splits=splits, shard_rows=shard_rows, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_files, "BLOCK_BYTES", block_bytes)
        try:
            dataset = ingest(config, folder / "out")
        except DataError as error:
            rule = error.rule
            dataset = None
    if dataset is None:
        assert rule.endswith("must hold at least one record")  # a small share gave none
        return

    found = rows_by_split(dataset)

    assert sorted(row["id"] for rows in found.values() for row in rows) == list(range(count))
    for split, rows in found.items():
        ids = [row["id"] for row in rows]
        assert ids == sorted(ids)
        assert all(shard.rows == shard_rows for shard in dataset.splits[split][:-1])
        assert dataset.rows(split) == len(rows)


@given(st.permutations(range(5)), st.integers(0, 3))
@settings(max_examples=6, deadline=None)
def test_a_rows_split_does_not_depend_on_the_order_of_files_or_columns(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("order")
    for place, part in enumerate(order):
        rows = [(i, f"name {i}") for i in range(part * 40, part * 40 + 40)]
        write_csv(folder / "a" / f"{part}.csv", rows, ("id", "name"))
        write_csv(folder / "b" / f"{place}.csv", [(name, i) for i, name in rows], ("name", "id"))

    one, other = (
        ingest(IngestConfig(source=str(folder / name), seed=seed), folder / f"{name}-out")
        for name in "ab"
    )

    for split in SHARES:
        ids = [sorted(row["id"] for row in rows_by_split(each)[split]) for each in (one, other)]
        assert ids[0] == ids[1]


@given(
    st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1),
            st.one_of(st.none(), st.floats(width=32, allow_nan=False)),
            st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6),
        ),
        min_size=30,
        max_size=60,
        unique_by=lambda row: row[0],
    )
)
@settings(max_examples=10, deadline=None)
def test_values_come_back_as_they_went_in(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, float | None, str]]
) -> None:
    folder = tmp_path_factory.mktemp("values")
    texts = [(i, "" if x is None else repr(x), name) for i, x, name in rows]
    source = write_csv(folder / "data.csv", texts, ("i", "x", "name"))
    config = IngestConfig(
        source=str(source),
        types={"x": "float", "name": "string"},
        splits={"train": 0.5, "eval": 0.5},
    )

    dataset = ingest(config, folder / "out")

    found = {
        row["i"]: (row["x"], row["name"]) for s in rows_by_split(dataset).values() for row in s
    }
    assert found == {i: (x, name) for i, x, name in rows}
    assert [column.dtype for column in dataset.columns] == ["int64", "float32", "string"]


def test_shares_are_kept_and_another_seed_deals_otherwise(tmp_path: Path) -> None:
    source = str(numbered(tmp_path / "data.csv", 5000))
    splits = {"train": 0.7, "eval": 0.2, "test": 0.1}

    first = ingest(IngestConfig(source=source, splits=splits), tmp_path / "first")
    other = ingest(IngestConfig(source=source, splits=splits, seed=1), tmp_path / "other")

    for split, share in splits.items():
        assert first.rows(split) == pytest.approx(5000 * share, rel=0.1)
    assert first.fingerprint != other.fingerprint


def test_the_split_of_known_rows_never_changes() -> None:
    table = pa.table(
        {
            "i": pa.array([0, 1, -1, 2**62, 7, 8, 9, 10]),
            "x": pa.array([0.5, None, -0.0, 3.0, 1e30, -2.5, 7.0, 8.0], pa.float32()),
            "s": ["", "a", "ü", "🙂", "b", "c", "d", "e"],
        }
    )
    columns = [
        Column(name="i", dtype="int64"),
        Column(name="x", dtype="float32"),
        Column(name="s", dtype="string"),
    ]
    rule = SplitRule({"train": 0.5, "eval": 0.25, "test": 0.25}, seed=3, split_by=None)

    assert [rule.names[at] for at in rule.assign(table, columns)] == [
        "test",
        "eval",
        "eval",
        "test",
        "eval",
        "train",
        "eval",
        "eval",
    ]


def test_a_gap_elsewhere_in_a_column_changes_no_rows_split() -> None:
    rule = SplitRule(SHARES, seed=0, split_by=None)
    ints = pa.table({"x": pa.array(range(500))})
    gapped = pa.table({"x": pa.array(range(500), pa.float32())})

    assert np.array_equal(
        rule.assign(ints, [Column(name="x", dtype="int64")]),
        rule.assign(gapped, [Column(name="x", dtype="float32", whole=True)]),
    )


def test_a_key_never_stands_in_two_splits(tmp_path: Path) -> None:
    rows = [(i, f"patient {i % 97}") for i in range(2000)]
    source = write_csv(tmp_path / "data.csv", rows, ("id", "patient"))

    dataset = ingest(IngestConfig(source=str(source), split_by="patient"), tmp_path / "out")

    keys = {s: {row["patient"] for row in rows} for s, rows in rows_by_split(dataset).items()}
    assert keys["train"].isdisjoint(keys["eval"])
    assert len(keys["train"] | keys["eval"]) == 97


def test_an_unknown_split_by_names_the_nearest_column(tmp_path: Path) -> None:
    source = numbered(tmp_path / "data.csv", 10)

    with pytest.raises(ConfigError, match="Did you mean 'name'"):
        ingest(IngestConfig(source=str(source), split_by="nam"), tmp_path / "out")


def test_the_fingerprint_goes_by_rows_and_not_by_shards_or_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(numbered(tmp_path / "data.csv", 500))
    whole = ingest(IngestConfig(source=source), tmp_path / "whole")
    monkeypatch.setattr(csv_files, "BLOCK_BYTES", 200)
    monkeypatch.setattr("stoker.data.ingest.shards.GROUP_ROWS", 13)
    cut = ingest(IngestConfig(source=source, shard_rows=37), tmp_path / "cut")

    assert len(cut.splits["train"]) > len(whole.splits["train"])
    assert cut.column_hashes == whole.column_hashes
    assert load_dataset(tmp_path / "cut").fingerprint == whole.fingerprint


def write_split(
    root: Path, columns: Sequence[Column], tables: Iterable[pa.Table], *, shard_rows: int
) -> SplitWriter:
    with ThreadPoolExecutor(2) as pool:
        writer = SplitWriter(
            "train",
            ShardOutput(
                root=root,
                columns=columns,
                shard_rows=shard_rows,
                pool=pool,
                finished=lambda *_: None,
            ),
        )
        for table in tables:
            writer.add(table)
        writer.close()
    return writer


def test_one_changed_value_changes_the_hash_of_its_column_only(tmp_path: Path) -> None:
    columns = (Column(name="a", dtype="string"), Column(name="b", dtype="float32"))
    hashes = []
    for index, (texts, numbers) in enumerate(
        [
            (["ab", "c"], [1.0, None]),
            (["a", "bc"], [1.0, None]),
            (["ab", "c"], [1.0, 2.0]),
        ]
    ):
        table = pa.table({"a": texts, "b": pa.array(numbers, pa.float32())})
        writer = write_split(tmp_path / str(index), columns, [table], shard_rows=9)
        hashes.append(writer.hashes())

    assert hashes[0]["a"] != hashes[1]["a"]
    assert hashes[0]["b"] == hashes[1]["b"]
    assert hashes[0]["a"] == hashes[2]["a"]
    assert hashes[0]["b"] != hashes[2]["b"]


def test_a_shard_ends_at_its_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.data.ingest.shards.GROUP_BYTES", 1000)
    monkeypatch.setattr("stoker.data.ingest.shards.SHARD_BYTES", 4000)
    tables = [pa.table({"s": [f"{index:0200d}"]}) for index in range(100)]

    writer = write_split(tmp_path, [Column(name="s", dtype="string")], tables, shard_rows=10_000)

    assert len(writer.shards) > 3
    assert sum(shard.rows for shard in writer.shards) == 100


def test_shards_have_checksums_and_a_page_index(tmp_path: Path) -> None:
    dataset = ingest(
        IngestConfig(source=str(numbered(tmp_path / "data.csv", 100))), tmp_path / "out"
    )

    with pq.ParquetFile(dataset.paths("train")[0]) as shard:
        column = shard.metadata.row_group(0).column(0)
        assert column.has_offset_index
        assert column.compression == "LZ4"


def fail_naming(config: IngestConfig, out: Path, *parts: str, label: str | None = None) -> None:
    with pytest.raises(DataError) as caught:
        ingest(config, out, label=label)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert [path for path in out.rglob("*") if path.is_file()] == []


def test_a_number_column_with_text_in_row_12000_stops_ingest_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    rows: list[tuple[Any, ...]] = [(i, i * 0.5) for i in range(15_000)]
    rows[11_999] = ("abc", 1.0)
    source = write_csv(tmp_path / "taxi.csv", rows, ("id", "fare"))

    fail_naming(
        IngestConfig(source=str(source)),
        tmp_path / "out",
        "taxi.csv row 12000, column 'id': 'abc' is not a number",
        "1 bad record",
        "data.types: {id: string}",
        "--set data.max_bad_rows=1",
    )


def test_a_row_with_too_few_fields_stops_ingest_and_leaves_nothing(tmp_path: Path) -> None:
    source = numbered(tmp_path / "data.csv", 100)
    source.write_text(source.read_text() + "100\n")

    fail_naming(IngestConfig(source=str(source)), tmp_path / "out", "row 101: too few fields: 1")


def test_a_nan_label_stops_ingest_and_leaves_nothing(tmp_path: Path) -> None:
    rows = [(i, "NaN" if i == 70 else i) for i in range(100)]
    source = write_csv(tmp_path / "data.csv", rows, ("x", "y"))

    fail_naming(
        IngestConfig(source=str(source)),
        tmp_path / "out",
        "row 71, column 'y': the label is missing",
        label="y",
    )


def test_many_bad_rows_are_counted_and_the_first_named(tmp_path: Path) -> None:
    source = numbered(tmp_path / "data.csv", 100)
    source.write_text(source.read_text() + "100\n" * 1234)

    fail_naming(
        IngestConfig(source=str(source), max_bad_rows=7),
        tmp_path / "out",
        "row 101:",
        "row 105:",
        "and 1,229 more",
        "1,234 bad records",
    )


def test_the_first_record_of_each_kind_of_fault_is_named(tmp_path: Path) -> None:
    lines = [("a", 1)] * 500 + [("", 1)] * 7 + [("a", "soon"), ("", 1)]
    source = write_csv(tmp_path / "a.csv", lines, ("kind", "x"))

    with pytest.raises(DataError) as caught:
        ingest(IngestConfig(source=str(source), max_bad_rows=8), tmp_path / "out", label="kind")

    for part in (
        "a.csv row 501, column 'kind': the label is missing",
        "a.csv row 508, column 'x': 'soon' is not a number",
        "and 4 more",
    ):
        assert part in caught.value.line()


def test_max_bad_rows_permits_and_lists_them_and_keeps_their_neighbors(tmp_path: Path) -> None:
    source = numbered(tmp_path / "data.csv", 100)
    lines = source.read_text().splitlines()
    lines[50] = "only one"
    source.write_text("\n".join(lines))

    dataset = ingest(IngestConfig(source=str(source), max_bad_rows=1), tmp_path / "out")

    ids = {row["id"] for rows in rows_by_split(dataset).values() for row in rows}
    assert ids == set(range(100)) - {49}
    assert load_dataset(tmp_path / "out").bad_rows == (
        BadRow(
            file="data.csv", row=50, column="", reason="too few fields: 1, but the header has 3"
        ),
    )


def test_an_empty_split_is_named_with_its_share(tmp_path: Path) -> None:
    source = numbered(tmp_path / "data.csv", 50)
    splits = {"train": 0.9999, "eval": 0.0001}

    fail_naming(
        IngestConfig(source=str(source), splits=splits),
        tmp_path / "out",
        "split 'eval' must hold at least one record",
        "a share of 0.0001 of 50 records",
    )


def test_one_row_or_none_is_an_error(tmp_path: Path) -> None:
    none = numbered(tmp_path / "none.csv", 0)
    one = numbered(tmp_path / "one.csv", 1)

    fail_naming(IngestConfig(source=str(none)), tmp_path / "out", "at least one record")
    fail_naming(IngestConfig(source=str(one)), tmp_path / "out", "split", "of 1 records")


def test_a_source_that_changes_meanwhile_is_an_error(tmp_path: Path) -> None:
    source = numbered(tmp_path / "data.csv", 100)

    def edit(done: int, total: int | None) -> None:
        if total is None:
            source.write_text(source.read_text() + "100,late,1\n")

    with pytest.raises(DataError, match="must not change while it is read"):
        ingest(IngestConfig(source=str(source)), tmp_path / "out", progress=edit)

    assert not any(path.is_file() for path in (tmp_path / "out").rglob("*"))


def test_a_copied_file_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = numbered(tmp_path / "in" / "part-1.csv", 50)
    (tmp_path / "in" / "part-9.csv").write_bytes(first.read_bytes())

    with caplog.at_level(logging.WARNING):
        twice = ingest(IngestConfig(source=str(tmp_path / "in")), tmp_path / "out")

    [line] = twice.warnings
    assert line.endswith(
        "part-9.csv is a copy of part-1.csv, so its records count twice; set "
        "data.duplicates: drop to leave them out"
    )
    assert caplog.messages == [line]
    assert load_dataset(twice.root).warnings == (line,)
    assert sum(twice.rows(split) for split in twice.splits) == 100
    caplog.clear()
    once = IngestConfig(source=str(tmp_path / "in"), duplicates="drop")
    dropped = ingest(once, tmp_path / "once")
    assert (dropped.copies_dropped, dropped.warnings) == (50, ())
    assert caplog.text == ""


def test_progress_ends_at_the_number_of_rows(tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []

    ingest(
        IngestConfig(source=str(numbered(tmp_path / "data.csv", 100))),
        tmp_path / "out",
        progress=lambda done, total: seen.append((done, total)),
    )

    assert seen[-1] == (100, 100)
    assert seen[0] == (100, None)


def image_folder(root: Path, count: int) -> Path:
    for index in range(count):
        pixels = np.full((5, 4), index, np.uint8)
        path = root / f"class {index % 3}" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cv2.imencode(".png", pixels)[1].tobytes())
    return root


def test_a_folder_of_images_becomes_a_dataset(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "images", 60)

    dataset = ingest(IngestConfig(source=str(root)), tmp_path / "out", label="label")

    rows = [row for rows in rows_by_split(dataset).values() for row in rows]
    assert load_dataset(tmp_path / "out").image == ImageShape(height=5, width=4, channels=1)
    assert {row["path"] for row in rows} == {
        p.relative_to(root).as_posix() for p in root.rglob("*.png")
    }
    assert all(row["image"] == (root / row["path"]).read_bytes() for row in rows)
    assert all(row["label"] == row["path"].partition("/")[0] for row in rows)


def test_the_same_image_under_two_names_is_in_one_split(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "images", 60)
    for path in list(root.rglob("*.png")):
        (root / "class 0" / f"copy of {path.name}").write_bytes(path.read_bytes())

    found = rows_by_split(ingest(IngestConfig(source=str(root)), tmp_path / "out"))

    content = {split: {row["image"] for row in rows} for split, rows in found.items()}
    assert content["train"].isdisjoint(content["eval"])


def test_an_unreadable_image_stops_ingest_and_leaves_nothing(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "images", 30)
    bad = root / "class 1" / "1.png"
    bad.write_bytes(bad.read_bytes()[:-20])

    fail_naming(IngestConfig(source=str(root)), tmp_path / "out", "class 1/1.png", "is truncated")


@pytest.mark.parametrize("seed", range(30))
def test_a_flipped_byte_anywhere_in_a_shard_is_found(
    damaged_dataset: tuple[Path, bytes], seed: int
) -> None:
    root, whole = damaged_dataset
    path = root / "train" / "shard-00000.parquet"
    at = random.Random(seed).randrange(len(whole))
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])

    with pytest.raises(DataError, match="shard-00000"):
        list(load_dataset(root).batches("train"))


@pytest.fixture(scope="module")
def damaged_dataset(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("damage")
    source = numbered(folder / "data.csv", 2000)
    dataset = ingest(IngestConfig(source=str(source)), folder / "out")
    return dataset.root, dataset.paths("train")[0].read_bytes()


def test_a_table_is_described_without_writing_anything(tmp_path: Path) -> None:
    rows = [(i, i % 3, "" if i % 4 else "x") for i in range(2000)]
    source = write_csv(tmp_path / "data.csv", [*rows, ("bad", 1)], ("id", "kind", "note"))

    found = describe_source(IngestConfig(source=str(source)))

    assert (found.format, found.rows, found.bad, found.classes) == ("csv", 2000, 1, {})
    assert [
        (each.column.name, each.column.dtype, each.distinct, each.missing) for each in found.columns
    ] == [
        ("id", "int64", None, 0),
        ("kind", "int64", 3, 0),
        ("note", "string", 2, 1500),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.csv"]


def test_a_folder_of_images_is_described_by_its_classes(tmp_path: Path) -> None:
    found = describe_source(IngestConfig(source=str(image_folder(tmp_path, 31))))

    assert found.format == "images"
    assert found.classes == {"class 0": 11, "class 1": 10, "class 2": 10}
    assert [each.column.name for each in found.columns] == ["image", "label", "path"]
