"""The dataset at the seam: every damage to a shard or the manifest is found and named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.core.errors import DataError
from stoker.core.files import sha256_file
from stoker.data.columns import Column, to_numpy
from stoker.data.dataset import (
    BadRow,
    Dataset,
    ImageShape,
    Shard,
    load_dataset,
    write_manifest,
)

COLUMNS = (Column(name="i", dtype="int64"), Column(name="s", dtype="string"))


def shard_of(root: Path, file: str, rows: range) -> Shard:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"i": list(rows), "s": [f"text {row}" for row in rows]})
    pq.write_table(table, path, write_page_checksum=True, compression="none")
    return Shard(
        file=file, rows=len(rows), size_bytes=path.stat().st_size, sha256=sha256_file(path)
    )


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    made = Dataset(
        root=tmp_path,
        columns=COLUMNS,
        splits={
            "train": (
                shard_of(tmp_path, "train/shard-00000.parquet", range(10)),
                shard_of(tmp_path, "train/shard-00001.parquet", range(10, 15)),
            ),
            "eval": (shard_of(tmp_path, "eval/shard-00000.parquet", range(15, 20)),),
        },
        column_hashes={"train": {"i": "1", "s": "2"}, "eval": {"i": "3", "s": "4"}},
        image=ImageShape(height=1, width=2, channels=3),
        bad_rows=(BadRow(file="data.csv", row=7, column="i", reason="'x' is not a number"),),
    )
    write_manifest(made)
    return made


def test_a_manifest_says_all_that_the_dataset_says(dataset: Dataset) -> None:
    assert load_dataset(dataset.root) == dataset


def test_batches_come_in_order_across_shards_and_are_not_larger_than_requested(
    dataset: Dataset,
) -> None:
    batches = list(dataset.batches("train", columns=["i"], rows=4))

    assert [row for batch in batches for row in batch["i"].to_pylist()] == list(range(15))
    assert max(batch.num_rows for batch in batches) <= 4
    assert batches[0].schema.names == ["i"]
    assert dataset.rows("train") == 15


def test_a_table_has_the_columns_in_the_requested_order(dataset: Dataset) -> None:
    assert dataset.table("eval", columns=["s", "i"]).schema.names == ["s", "i"]


def test_the_fingerprint_of_some_columns_ignores_the_others(dataset: Dataset) -> None:
    other = Dataset(
        root=dataset.root / "elsewhere",
        columns=dataset.columns,
        splits=dataset.splits,
        column_hashes={"train": {"i": "1", "s": "changed"}, "eval": {"i": "3", "s": "4"}},
        image=dataset.image,
    )

    assert other.fingerprint_of(["i"]) == dataset.fingerprint_of(["i"])
    assert other.fingerprint_of(["s"]) != dataset.fingerprint_of(["s"])
    assert other.fingerprint != dataset.fingerprint


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[:-1])
    elif how == "grown":
        path.write_bytes(data + b"\0")
    else:
        path.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])


@pytest.mark.parametrize("how", ["missing", "cut", "grown", "flipped"])
def test_a_damaged_shard_is_named_by_reading_and_by_verifying(dataset: Dataset, how: str) -> None:
    damage(dataset.root / "train" / "shard-00001.parquet", how)

    with pytest.raises(DataError, match="shard-00001"):
        dataset.verify()
    with pytest.raises(DataError, match="shard-00001"):
        list(dataset.batches("train"))
    assert list(dataset.batches("eval"))


def test_a_page_that_decays_under_a_right_hash_is_still_found(dataset: Dataset) -> None:
    path = dataset.root / "eval" / "shard-00000.parquet"
    data = path.read_bytes()
    at = data.index(b"text 17")
    path.write_bytes(data[:at] + b"T" + data[at + 1 :])
    renewed = Shard(
        file="eval/shard-00000.parquet", rows=5, size_bytes=len(data), sha256=sha256_file(path)
    )
    forged = Dataset(
        root=dataset.root,
        columns=dataset.columns,
        splits={"eval": (renewed,)},
        column_hashes=dataset.column_hashes,
    )

    with pytest.raises(DataError, match="undamaged Parquet"):
        list(forged.batches("eval"))


def test_a_shard_with_fewer_rows_than_the_manifest_says_is_found(dataset: Dataset) -> None:
    short = shard_of(dataset.root, "train/shard-00001.parquet", range(10, 13))
    lied = Shard(file=short.file, rows=5, size_bytes=short.size_bytes, sha256=short.sha256)
    forged = Dataset(
        root=dataset.root,
        columns=dataset.columns,
        splits={"train": (lied,)},
        column_hashes=dataset.column_hashes,
    )

    with pytest.raises(DataError, match="3 records"):
        list(forged.batches("train"))


def test_a_folder_without_a_manifest_is_not_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"manifest\.json must exist"):
        load_dataset(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"fingerprint": 1}', "null"])
def test_a_manifest_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)

    with pytest.raises(DataError, match=r"manifest\.json must"):
        load_dataset(tmp_path)


def test_a_manifest_whose_hashes_were_edited_is_found(dataset: Dataset) -> None:
    path = dataset.root / "manifest.json"
    raw = json.loads(path.read_text())
    raw["column_hashes"]["train"]["i"] = "edited"
    path.write_text(json.dumps(raw))

    with pytest.raises(DataError, match="must match its own fingerprint"):
        load_dataset(dataset.root)


def test_missing_values_become_nan_and_strings_become_bytes() -> None:
    floats = to_numpy(Column(name="x", dtype="float32"), pa.array([1.5, None], pa.float32()))
    texts = to_numpy(Column(name="s", dtype="string"), pa.chunked_array([["ü"], [""]]))
    images = to_numpy(Column(name="p", dtype="image"), pa.array([b"\xff\x00"]))
    whole = to_numpy(Column(name="i", dtype="int64"), pa.chunked_array([[2**53 + 1], [1]]))

    assert floats.dtype == np.float32
    assert floats[0] == 1.5
    assert np.isnan(floats[1])
    assert texts.tolist() == ["ü".encode(), b""]
    assert images.tolist() == [b"\xff\x00"]
    assert whole.tolist() == [2**53 + 1, 1]
