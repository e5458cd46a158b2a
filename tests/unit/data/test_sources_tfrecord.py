"""TFRecord of tf.train.Example: what each feature becomes, and agreement with TensorFlow's writer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.core.errors import ConfigError, DataError
from stoker.data.columns import VARYING, Column
from stoker.data.ingest import IngestConfig, describe_source
from stoker.data.sources.formats.framing import read_frames
from stoker.data.sources.formats.tfrecord_files import Example
from stoker.data.sources.records import Block, Scan, silent
from stoker.data.sources.source import open_source

Packing = Literal["", "GZIP", "ZLIB"]
KINDS = {int: "int64_list", float: "float_list", bytes: "bytes_list"}


def example(features: dict[str, list[Any]]) -> bytes:
    made = tf.train.Example()
    for name, values in features.items():
        held = made.features.feature[name]
        if values:
            getattr(held, KINDS[type(values[0])]).value.extend(values)
    return bytes(made.SerializeToString())


def write(path: Path, records: list[bytes], packing: Packing = "") -> Path:
    with tf.io.TFRecordWriter(str(path), packing) as writer:
        for record in records:
            writer.write(record)
    return path


def read(
    folder: Path, records: list[dict[str, list[Any]]], label: str | None = None, **settings_: Any
) -> tuple[Scan, list[Block]]:
    source = write(folder / "data.tfrecord", [example(record) for record in records])
    opened = open_source(
        IngestConfig(source=str(source), **settings_), labels=[] if label is None else [label]
    )
    scan = opened.scan(silent)
    return scan, list(opened.blocks(scan))


def values(blocks: list[Block], name: str = "x") -> list[Any]:
    return [value for block in blocks for value in block.table[name].to_pylist()]


def faults(blocks: list[Block]) -> list[tuple[int, str, str]]:
    return [(f.row, f.column, f.reason) for block in blocks for f in block.faults]


def column(dtype: Any, *, whole: bool = False, length: int | None = None) -> Column:
    return Column(name="x", dtype=dtype, whole=whole, length=length)


@pytest.mark.parametrize(
    ("given_", "expected", "wanted"),
    [
        ([[1], [-(2**63)]], column("int64"), [1, -(2**63)]),
        ([[1], []], column("float32", whole=True), [1.0, None]),
        ([[2**24 + 1], []], column("float64", whole=True), [2.0**24 + 1, None]),
        ([[0.5], [float("nan")], []], column("float32"), [0.5, None, None]),
        ([[float("inf")]], column("float32"), [float("inf")]),
        ([[b"a"], ["ü".encode()], [b""], []], column("string"), ["a", "ü", "", ""]),
        ([[1, 2], [3, 4]], column("int64", length=2), [[1, 2], [3, 4]]),
        ([[0.5, 1.5], []], column("float32", length=2), [[0.5, 1.5], [None, None]]),
        ([[b"a", b""], []], column("string", length=2), [["a", ""], ["", ""]]),
        ([[], []], column("string"), ["", ""]),
        ([[1], [2, 3], []], column("int64", length=VARYING), [[1], [2, 3], []]),
        (
            [[0.5], [float("nan"), 1.5], []],
            column("float32", length=VARYING),
            [[0.5], [None, 1.5], []],
        ),
        ([[b"a"], [b"", b"b", b""], []], column("string", length=VARYING), [["a"], ["", "b"], []]),
    ],
)
def test_each_feature_has_its_column(
    tmp_path: Path, given_: list[Any], expected: Column, wanted: list[Any]
) -> None:
    scan, blocks = read(tmp_path, [{"x": each, "z": [1]} for each in given_])

    assert scan.columns[0] == expected
    assert values(blocks) == wanted
    assert faults(blocks) == []


def test_a_feature_that_some_records_do_not_name_is_missing_there(tmp_path: Path) -> None:
    scan, blocks = read(tmp_path, [{"z": [1], "x": [5]}, {"z": [2]}, {"z": [3], "x": [7]}])

    assert scan.columns == (column("float32", whole=True), Column(name="z", dtype="int64"))
    assert values(blocks) == [5.0, None, 7.0]


def test_a_vector_of_whole_numbers_cannot_be_missing(tmp_path: Path) -> None:
    _, blocks = read(tmp_path, [{"x": [1, 2]}, {"x": [], "z": [1]}], max_bad_rows=1)

    assert faults(blocks) == [(2, "x", "the vector is missing")]
    assert values(blocks) == [[1, 2]]


@pytest.mark.parametrize(
    ("given_", "override", "dtype", "wanted"),
    [
        ([[7], [8]], "string", "string", ["7", "8"]),
        ([[7], []], "float", "float32", [7.0, None]),
        ([[7.0], [8.0]], "int", "int64", [7, 8]),
        ([[b"7"], [b"NA"]], "float", "float32", [7.0, None]),
        ([[b"7", b"8"]], "int", "int64", [[7, 8]]),
    ],
)
def test_data_types_overrides_the_features_kind(
    tmp_path: Path, given_: list[Any], override: str, dtype: str, wanted: list[Any]
) -> None:
    scan, blocks = read(tmp_path, [{"x": each, "z": [1]} for each in given_], types={"x": override})

    assert scan.columns[0].dtype == dtype
    assert values(blocks) == wanted


def test_data_types_of_an_unknown_feature_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'fare'"):
        read(tmp_path, [{"fare": [1]}], types={"far": "int"})


def test_encoded_images_are_an_image_column_and_bad_ones_are_named(tmp_path: Path) -> None:
    good = cv2.imencode(".png", np.full((4, 6, 3), 7, np.uint8))[1].tobytes()
    given_ = [good, good[:-5], b"<html>", good, b""]

    scan, blocks = read(tmp_path, [{"x": [each], "z": [1]} for each in given_], max_bad_rows=3)

    assert scan.columns[0] == column("image")
    assert scan.image == (4, 6, 3)
    assert values(blocks) == [good, good]
    reasons = faults(blocks)
    assert [row for row, _, _ in reasons] == [2, 3, 5]
    parts = ["is truncated", "it holds text instead of an image", "the image is missing"]
    assert all(part in fault[2] for part, fault in zip(parts, reasons, strict=True))


def test_digits_are_vectors_and_classes(sample_data: Path) -> None:
    described = describe_source(IngestConfig(source=str(sample_data / "mnist.tfrecord")))

    assert [each.column for each in described.columns] == [
        Column(name="image_class", dtype="int64"),
        Column(name="image_floats", dtype="float32", length=784),
    ]
    assert (described.format, described.rows, described.bad) == ("tfrecord", 1000, 0)


@pytest.mark.parametrize("packing", ["", "GZIP", "ZLIB"])
def test_what_tensorflow_writes_is_read(tmp_path: Path, packing: Packing) -> None:
    records = [bytes([index % 251]) * (index * 37 % 5000) for index in range(3000)]
    path = write(tmp_path / "data", records, packing)

    frames = list(read_frames(path, location="data"))

    assert [payload for each in frames for payload in each.payloads] == records
    assert [row for each in frames for row in each.rows] == list(range(1, 3001))
    assert not any(each.damages for each in frames)


def test_format_is_needed_where_the_names_say_nothing(tmp_path: Path) -> None:
    for part in range(2):
        write(tmp_path / f"train-{part:05d}-of-00002", [example({"x": [part]})])

    with pytest.raises(ConfigError, match=r"Set data\.format"):
        open_source(IngestConfig(source=str(tmp_path)), labels=())
    opened = open_source(IngestConfig(source=str(tmp_path), format="tfrecord"), labels=())

    assert values(list(opened.blocks(opened.scan(silent)))) == [0, 1]


def test_a_record_of_100_000_names_ends_in_one_line(tmp_path: Path) -> None:
    wide = {f"f{index}": [1] for index in range(100_001)}

    with pytest.raises(DataError, match="must have at most 100,000 different column names"):
        read(tmp_path, [wide])


names = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=5).filter(str.strip)
lists = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40),
    st.lists(st.floats(width=32, allow_nan=False), max_size=40),
    st.lists(st.binary(max_size=5), max_size=40),
)


@given(st.dictionaries(names, lists, max_size=4))
@settings(max_examples=60)
def test_the_message_is_tensorflows_own(features: dict[str, list[Any]]) -> None:
    theirs = example(features)

    ours = Example.FromString(theirs)

    assert set(ours.features.feature) == set(features)
    for name, wanted in features.items():
        held = ours.features.feature[name]
        kind = held.WhichOneof("kind")
        assert (list(getattr(held, kind).value) if kind else []) == wanted
    assert tf.train.Example.FromString(ours.SerializeToString()) == tf.train.Example.FromString(
        theirs
    )


@given(
    st.integers(1, 50).flatmap(
        lambda length: st.lists(
            st.lists(st.floats(width=32, allow_nan=False), min_size=length, max_size=length),
            min_size=1,
            max_size=10,
        )
    )
)
@settings(max_examples=40)
def test_float_lists_of_any_length_come_back_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory, given_: list[list[float]]
) -> None:
    _, blocks = read(tmp_path_factory.mktemp("floats"), [{"x": each} for each in given_])

    wanted = given_ if len(given_[0]) > 1 else [each[0] for each in given_]
    assert values(blocks) == wanted


def test_reading_tfrecord_does_not_load_tensorflow() -> None:
    script = (
        "import sys; from stoker.data.sources.source import open_source; "
        "import stoker.data.ingest; sys.exit('tensorflow' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", script], timeout=300).returncode == 0
