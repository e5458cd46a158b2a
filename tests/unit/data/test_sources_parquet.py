"""Parquet: what each Arrow type becomes, and damage that is named."""

from __future__ import annotations

import datetime as dt
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.core.errors import ConfigError, DataError
from stoker.data.columns import Column
from stoker.data.ingest import IngestConfig
from stoker.data.sources.records import Block, Scan, silent
from stoker.data.sources.source import open_source


def read(
    source: Path | str, *, label: str | None = None, **settings_: Any
) -> tuple[Scan, list[Block]]:
    opened = open_source(
        IngestConfig(source=str(source), **settings_), labels=[] if label is None else [label]
    )
    scan = opened.scan(silent)
    return scan, list(opened.blocks(scan))


def write(folder: Path, columns: dict[str, Any], name: str = "data.parquet", **how: Any) -> Path:
    pq.write_table(pa.table(columns), folder / name, **how)
    return folder / name


def values(blocks: list[Block], name: str = "x") -> list[Any]:
    return [value for block in blocks for value in block.table[name].to_pylist()]


def faults(blocks: list[Block]) -> list[tuple[int, str, str]]:
    return [(f.row, f.column, f.reason) for block in blocks for f in block.faults]


UTC = dt.UTC
INT64 = ("int64", False)
WHOLE = ("float32", True)
FLOAT = ("float32", False)
STRING = ("string", False)


@pytest.mark.parametrize(
    ("array", "expected", "wanted"),
    [
        (pa.array([1, 2], pa.int8()), INT64, [1, 2]),
        (pa.array([1, 2**63 - 1], pa.uint64()), INT64, [1, 2**63 - 1]),
        (pa.array([1, None], pa.int32()), WHOLE, [1.0, None]),
        (pa.array([2**24 + 1, None], pa.int32()), ("float64", True), [2.0**24 + 1, None]),
        (pa.array([True, False]), INT64, [1, 0]),
        (pa.array([1.5, None, float("nan")], pa.float64()), FLOAT, [1.5, None, None]),
        (pa.array([1.5, float("inf")], pa.float16()), FLOAT, [1.5, float("inf")]),
        (pa.array([Decimal("1.50"), None]), FLOAT, [1.5, None]),
        (pa.array(["a", None]), STRING, ["a", ""]),
        (pa.array(["ü"], pa.large_string()), STRING, ["ü"]),
        (
            pa.array(["long enough for a view", None], pa.string_view()),
            STRING,
            ["long enough for a view", ""],
        ),
        (pa.array(["a", "b", "a"]).dictionary_encode(), STRING, ["a", "b", "a"]),
        (pa.array([5, 5, 7]).dictionary_encode(), INT64, [5, 5, 7]),
        (pa.array([None, None]), STRING, ["", ""]),
        (pa.array([dt.date(1970, 1, 2)]), INT64, [86_400]),
        (pa.array([dt.datetime(1970, 1, 1, 1, tzinfo=UTC)]), INT64, [3600]),
        (pa.array([-1, 1999], pa.timestamp("ms")), INT64, [-1, 1]),
        (pa.array([-1], pa.timestamp("ns", tz="Europe/Berlin")), INT64, [-1]),
    ],
)
def test_each_arrow_type_has_its_column(
    tmp_path: Path, array: pa.Array, expected: tuple[str, bool], wanted: list[Any]
) -> None:
    scan, blocks = read(write(tmp_path, {"x": array}))

    assert (scan.columns[0].dtype, scan.columns[0].whole) == expected
    assert values(blocks) == wanted
    assert faults(blocks) == []


@pytest.mark.parametrize(
    "array",
    [pa.array([[[1]]]), pa.array([[b"x"]]), pa.array([{"a": 1}]), pa.array([1], pa.duration("s"))],
)
def test_a_type_that_no_column_can_have_is_named(tmp_path: Path, array: pa.Array) -> None:
    kind = re.escape(str(array.type).partition("<")[0])

    with pytest.raises(DataError, match=rf"column 'x' must hold .*Received: {kind}"):
        read(write(tmp_path, {"x": array}))


@pytest.mark.parametrize(
    ("array", "override", "expected", "wanted"),
    [
        (pa.array([7, 8]), "string", STRING, ["7", "8"]),
        (pa.array([7, 8]), "float", FLOAT, [7.0, 8.0]),
        (pa.array([7.0, None]), "int", WHOLE, [7.0, None]),
        (pa.array(["7", "NA"]), "int", WHOLE, [7.0, None]),
        (pa.array(["7.5", ""]), "float", FLOAT, [7.5, None]),
    ],
)
def test_data_types_overrides_the_files_type(
    tmp_path: Path, array: pa.Array, override: str, expected: tuple[str, bool], wanted: list[Any]
) -> None:
    scan, blocks = read(write(tmp_path, {"x": array}), types={"x": override})

    assert (scan.columns[0].dtype, scan.columns[0].whole) == expected
    assert values(blocks) == wanted


@pytest.mark.parametrize(
    ("array", "override", "fault"),
    [
        (pa.array([0.5, 1e300]), {}, (2, "x", "1e+300 does not fit in a 32-bit float")),
        (pa.array([1, 2**63], pa.uint64()), {}, (2, "x", f"{2**63} does not fit in 64 bits")),
        (pa.array(["1", "abc"]), {"x": "int"}, (2, "x", "'abc' is not a number")),
        (pa.array([1.0, 1.5]), {"x": "int"}, (2, "x", "1.5 is not a whole number")),
        (pa.array(["ok", "a\0b"]), {}, (2, "x", r"'a\x00b' holds a NUL byte")),
    ],
)
def test_a_value_that_cannot_be_stored_is_named_with_its_row(
    tmp_path: Path, array: pa.Array, override: dict[str, Any], fault: tuple[int, str, str]
) -> None:
    _, blocks = read(write(tmp_path, {"x": array}), types=override)

    assert faults(blocks) == [fault]


def test_a_string_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    offsets = pa.array([0, 2, 3], pa.int32()).buffers()[1]
    broken = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ok\xff"))

    _, blocks = read(write(tmp_path, {"x": broken}))

    ((row, column, reason),) = faults(blocks)
    assert (row, column) == (2, "x")
    assert "is not UTF-8" in reason


def test_a_missing_label_is_a_bad_record_and_the_column_stays_whole(tmp_path: Path) -> None:
    path = write(tmp_path, {"x": [1, 2, 3], "y": pa.array([0, None, 1])})

    scan, blocks = read(path, label="y")

    assert scan.columns[1] == Column(name="y", dtype="int64")
    assert faults(blocks) == [(2, "y", "the label is missing")]
    assert values(blocks) == [1, 3]


def test_files_are_read_together_and_int_and_float_make_float(tmp_path: Path) -> None:
    write(tmp_path, {"x": [1, 2], "y": ["a", "b"]}, "a.parquet")
    write(tmp_path, {"y": ["c", "d"], "x": [0.5, None]}, "b.parquet")

    scan, blocks = read(tmp_path)

    assert scan.columns[0] == Column(name="x", dtype="float32")
    assert values(blocks) == [1.0, 2.0, 0.5, None]
    assert values(blocks, "y") == ["a", "b", "c", "d"]
    assert scan.rows == 4


def test_files_whose_types_do_not_fit_are_both_named(tmp_path: Path) -> None:
    write(tmp_path, {"x": [1]}, "a.parquet")
    write(tmp_path, {"x": ["a"]}, "b.parquet")

    with pytest.raises(DataError, match=r"int in a\.parquet, string in b\.parquet"):
        read(tmp_path)


def test_a_file_with_other_columns_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"x": [1], "y": [2]}, "a.parquet")
    write(tmp_path, {"x": [1], "z": [2]}, "b.parquet")

    with pytest.raises(DataError, match=r"b\.parquet .*no 'y' and additional 'z'"):
        read(tmp_path)


def test_data_types_of_an_unknown_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'fare'"):
        read(write(tmp_path, {"fare": [1]}), types={"far": "int"})


def spoiled(data: bytes, how: str) -> bytes:
    return {
        "no_footer": data[: len(data) // 2],
        "footer_magic": data[:-4] + b"XXXX",
        "footer_length": data[:-8] + b"\xff\xff\xff\x7f" + data[-4:],
        "empty": b"",
        "csv": b"x,y\n1,2\n",
    }[how]


@pytest.mark.parametrize("how", ["no_footer", "footer_magic", "footer_length", "empty", "csv"])
def test_a_damaged_file_is_named(tmp_path: Path, how: str) -> None:
    path = write(tmp_path, {"x": list(range(1000))})
    path.write_bytes(spoiled(path.read_bytes(), how))

    with pytest.raises(DataError, match=r"data\.parquet must be a complete, readable Parquet file"):
        read(path)


def test_a_flipped_bit_in_a_page_with_a_checksum_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"x": [f"value {index}" for index in range(1000)]},
        write_page_checksum=True,
        compression="none",
        use_dictionary=False,
    )
    data = path.read_bytes()
    at = data.index(b"value 500")
    path.write_bytes(data[:at] + b"V" + data[at + 1 :])

    with pytest.raises(DataError, match=r"data\.parquet must be a complete, readable Parquet file"):
        read(path)


def png(height: int, width: int) -> bytes:
    return cv2.imencode(".png", np.full((height, width, 3), 7, np.uint8))[1].tobytes()


def test_binary_values_are_images_and_bad_ones_are_named(tmp_path: Path) -> None:
    good = png(4, 6)
    path = write(tmp_path, {"picture": [good, good[:-5], None, b"text", good], "y": list("abcde")})

    scan, blocks = read(path)

    assert scan.columns[0] == Column(name="picture", dtype="image")
    assert scan.image == (4, 6, 3)
    assert values(blocks, "picture") == [good, good]
    assert values(blocks, "y") == ["a", "e"]
    assert [(row, column) for row, column, _ in faults(blocks)] == [
        (2, "picture"),
        (3, "picture"),
        (4, "picture"),
    ]
    parts = ["is truncated", "is missing", "of an unknown format"]
    assert all(part in fault[2] for part, fault in zip(parts, faults(blocks), strict=True))
