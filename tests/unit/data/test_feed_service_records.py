"""The copy for the tf.data service: what goes in comes out, and damage is seen before TensorFlow."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.datasets import write_dataset

from stoker.core.errors import DataError
from stoker.data.columns import VARYING, Column, to_numpy
from stoker.data.dataset import Dataset
from stoker.data.feed.service.records import FILES, copied, examples, load_copy, parse

COLUMNS = (
    Column(name="whole number", dtype="int64"),
    Column(name="ratio", dtype="float32"),
    Column(name="wide", dtype="float64", whole=True),
    Column(name="text", dtype="string"),
    Column(name="picture", dtype="image"),
    Column(name="pair", dtype="float64", length=2),
    Column(name="words", dtype="string", length=3),
    Column(name="tags", dtype="string", length=VARYING),
    Column(name="clicks", dtype="int64", length=VARYING),
)


def make_dataset(root: Path, rows: int, *, salt: str = "0") -> Dataset:
    number = np.arange(rows)
    table = pa.table(
        {
            "whole number": pa.array(number - 2**40),
            "ratio": pa.array([None if n % 5 == 0 else n / 7 for n in range(rows)], pa.float32()),
            "wide": pa.array([None if n % 7 == 0 else 2.0**53 - n for n in range(rows)]),
            "text": pa.array([("é\n\0" * (n % 4)) for n in range(rows)]),
            "picture": pa.array([bytes([255, n % 256]) * (n % 9) for n in range(rows)]),
            "pair": pa.array([[n / 3, math.nan] for n in range(rows)], pa.list_(pa.float64(), 2)),
            "words": pa.array([["", str(n), "ü"] for n in range(rows)], pa.list_(pa.string(), 3)),
            "tags": pa.array([["", "ü\0"] * (n % 3) for n in range(rows)], pa.list_(pa.string())),
            "clicks": pa.array([[n] * (n % 5) for n in range(rows)], pa.list_(pa.int64())),
        }
    )
    return write_dataset(root, COLUMNS, {"train": [table]}, column_hash=salt)


def arrays_of(dataset: Dataset) -> dict[str, Any]:
    table = dataset.table("train")
    return {column.name: to_numpy(column, table.column(column.name)) for column in COLUMNS}


def same(left: Any, right: Any) -> bool:
    left, right = np.asarray(left), np.asarray(right)
    if left.dtype.kind == "f":
        return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=True)
    return np.array_equal(left, right)


def test_every_record_stands_once_in_the_copy_bit_for_bit(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", rows=1000)

    copy = copied(dataset, "train", tmp_path / "copy", columns=COLUMNS)
    records = [r.numpy() for r in tf.data.TFRecordDataset(copy.paths)]
    raw = parse(tf.constant(records), COLUMNS)

    order = np.argsort(raw["whole number"])
    assert (len(copy.files), copy.rows) == (FILES, 1000)
    for name, wanted in arrays_of(dataset).items():
        assert same(np.asarray(raw[name])[order], wanted), name


def test_each_file_is_a_fair_sample_of_the_split(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", rows=25600)

    copy = copied(dataset, "train", tmp_path / "copy", columns=COLUMNS[:1])

    means = []
    for path in copy.paths[:16]:
        parsed = parse(tf.constant([r.numpy() for r in tf.data.TFRecordDataset(path)]), COLUMNS[:1])
        means.append(float(np.mean(parsed["whole number"].numpy() + 2**40)))
    assert {file.rows for file in copy.files} == {100}
    # Uniform on 0 to 25599: a mean of 100 has a deviation of 739.
    assert max(abs(mean - 12799.5) for mean in means) < 5 * 739


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.floats(width=32), st.binary(max_size=40)),
        min_size=1,
        max_size=8,
    )
)
def test_whatever_the_values_they_come_back(rows: list[tuple[int, float, bytes]]) -> None:
    columns = (COLUMNS[0], COLUMNS[1], COLUMNS[4])
    arrays: dict[str, Any] = {
        "whole number": np.array([row[0] for row in rows]),
        "ratio": np.array([row[1] for row in rows], np.float32),
        "picture": np.array([row[2] for row in rows], object),
    }

    raw = parse(tf.constant(list(examples(arrays, columns))), columns)

    assert all(same(raw[name], arrays[name]) for name in arrays)


def test_a_copy_is_made_once_and_again_for_other_data(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", rows=50)
    first = copied(dataset, "train", tmp_path / "copy", columns=COLUMNS)
    made_ns = (tmp_path / "copy" / "00000.tfrecord").stat().st_mtime_ns

    again = copied(dataset, "train", tmp_path / "copy", columns=COLUMNS)
    other = make_dataset(tmp_path / "other", rows=40, salt="1")
    other_copy = copied(other, "train", tmp_path / "copy", columns=COLUMNS)

    assert again == first
    assert (tmp_path / "copy" / "00000.tfrecord").stat().st_mtime_ns != made_ns
    assert (len(other_copy.files), other_copy.rows) == (40, 40)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".copy.lock", "copy", "data", "other"]


def crafted_header(content: bytes) -> bytes:
    """A length of 64 GiB whose own checksum holds: TensorFlow's reader dies of it."""
    length = struct.pack("<Q", 1 << 36)
    crc = google_crc32c.value(length)
    masked = struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
    return length + masked + content[12:]


DAMAGES = {
    "cut": lambda content: content[:-1],
    "flipped": lambda content: bytes([*content[:30], content[30] ^ 1, *content[31:]]),
    "header of 64 GiB": crafted_header,
    "gone": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_before_tensorflow_opens_it_and_written_again(
    tmp_path: Path, damage: str
) -> None:
    dataset = make_dataset(tmp_path / "data", rows=50)
    whole = copied(dataset, "train", tmp_path / "copy", columns=COLUMNS)
    path, change = tmp_path / "copy" / "00003.tfrecord", DAMAGES[damage]
    path.unlink() if change is None else path.write_bytes(change(path.read_bytes()))

    with pytest.raises(DataError, match=r"00003\.tfrecord must be an intact part"):
        load_copy(tmp_path / "copy", key=dataset.fingerprint_of([c.name for c in COLUMNS]))
    rewritten = copied(dataset, "train", tmp_path / "copy", columns=COLUMNS)

    assert rewritten == whole
    assert len(list(tf.data.TFRecordDataset(rewritten.paths))) == 50
