"""CSV: types by inference, and every fault of a file named with file, row and column."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.core.errors import ConfigError, DataError
from stoker.data.columns import Column
from stoker.data.ingest import IngestConfig
from stoker.data.sources.formats import csv_files
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


def rows_of(blocks: list[Block]) -> list[dict[str, Any]]:
    return pa.concat_tables([block.table for block in blocks]).to_pylist()


def faults_of(blocks: list[Block]) -> list[tuple[int, str, str]]:
    return [(f.row, f.column, f.reason) for block in blocks for f in block.faults]


def write(folder: Path, content: str | bytes, name: str = "data.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def column(folder: Path, values: list[str], **settings_: Any) -> tuple[Column, list[Any]]:
    """The values of a column of these texts, next to a column without gaps."""
    path = folder / "column.csv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["x", "row"])
        writer.writerows([value, index] for index, value in enumerate(values))
    scan, blocks = read(path, **settings_)
    assert faults_of(blocks) == []
    return scan.columns[0], [row["x"] for row in rows_of(blocks)]


@pytest.mark.parametrize(
    ("texts", "expected", "values"),
    [
        (["1", "-2", "+3"], ("int64", False), [1, -2, 3]),
        (["9223372036854775807", "-9223372036854775808"], ("int64", False), [2**63 - 1, -(2**63)]),
        (["1", "", "3"], ("float32", True), [1.0, None, 3.0]),
        (["16777216", "NA"], ("float32", True), [16777216.0, None]),
        (["16777217", "null"], ("float64", True), [16777217.0, None]),
        (["1.5", "2", "1e3", ".5", "-7."], ("float32", False), [1.5, 2.0, 1000.0, 0.5, -7.0]),
        (["1.5", "nan", "N/A", " 2.5 "], ("float32", False), [1.5, None, None, 2.5]),
        (["1.5", "inf", "-Infinity"], ("float32", False), [1.5, float("inf"), float("-inf")]),
        (["true", "False", "TRUE"], ("int64", False), [1, 0, 1]),
        (["true", "", "FALSE"], ("float32", True), [1.0, None, 0.0]),
        (["a", "", "NA"], ("string", False), ["a", "", "NA"]),
        (["", "", ""], ("string", False), ["", "", ""]),
        (["0x1F", "0x2A"], ("string", False), ["0x1F", "0x2A"]),
        (["1", "2", "three"], ("string", False), ["1", "2", "three"]),
        (["ü", "日本", "🙂"], ("string", False), ["ü", "日本", "🙂"]),
    ],
)
def test_a_column_takes_the_type_that_all_its_values_suggest(
    tmp_path: Path, texts: list[str], expected: tuple[str, bool], values: list[Any]
) -> None:
    found, read_values = column(tmp_path, texts)

    assert (found.dtype, found.whole) == expected
    assert read_values == values


@pytest.mark.parametrize(
    ("override", "texts", "expected", "values"),
    [
        ("string", ["01", "02"], ("string", False), ["01", "02"]),
        ("float", ["1", "2"], ("float32", False), [1.0, 2.0]),
        ("int", ["1.0", "", "3.0"], ("float32", True), [1.0, None, 3.0]),
        ("int", ["20000001.0", ""], ("float64", True), [20000001.0, None]),
        ("int", ["true", "false"], ("int64", False), [1, 0]),
        ("int", ["true", "NA"], ("float32", True), [1.0, None]),
    ],
)
def test_data_types_overrides_what_the_values_suggest(
    tmp_path: Path, override: str, texts: list[str], expected: tuple[str, bool], values: list[Any]
) -> None:
    found, read_values = column(tmp_path, texts, types={"x": override})

    assert (found.dtype, found.whole) == expected
    assert read_values == values


def test_an_extra_missing_text_is_missing_in_numbers_and_a_value_in_strings(tmp_path: Path) -> None:
    path = write(tmp_path, "n,s\n1,?\n?,a\n")

    _, blocks = read(path, missing_values=("?",))

    assert rows_of(blocks) == [{"n": 1.0, "s": "?"}, {"n": None, "s": "a"}]


def test_a_label_column_whose_gaps_are_bad_records_stays_whole(tmp_path: Path) -> None:
    path = write(tmp_path, "x,y\n1,0\n2,\n3,1\n")

    scan, blocks = read(path, label="y")

    assert scan.columns[1] == Column(name="y", dtype="int64")
    assert rows_of(blocks) == [{"x": 1, "y": 0}, {"x": 3, "y": 1}]
    assert faults_of(blocks) == [(2, "y", "the label is missing")]


@pytest.mark.parametrize("gap", ["", "NaN", "nan"])
def test_a_nan_label_is_a_bad_record(tmp_path: Path, gap: str) -> None:
    path = write(tmp_path, f"x,y\na,0.5\nb,{gap}\n")

    _, blocks = read(path, label="y")

    assert faults_of(blocks) == [(2, "y", "the label is missing")]


def test_text_in_row_12000_of_a_number_column_is_named_and_the_column_stays_a_number(
    tmp_path: Path,
) -> None:
    lines = [f"{index},{index}.5" for index in range(1, 15_001)]
    lines[11_999] = "abc,0.5"
    path = write(tmp_path, "x,y\n" + "\n".join(lines) + "\n")

    scan, blocks = read(path)

    assert scan.columns[0].dtype == "int64"
    assert faults_of(blocks) == [(12_000, "x", "'abc' is not a number")]
    assert blocks[0].faults[0].file == "data.csv"
    assert len(rows_of(blocks)) == 14_999


def test_rows_are_counted_rightly_after_bad_rows_blank_lines_and_quoted_newlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_files, "BLOCK_BYTES", 48)
    good = [f"{index},v" for index in range(5, 200)]
    content = "\n".join(
        ["x,y", "1,a", "2", '3,"b', 'c"', "", "4,d,e", *good, "x200,v", "201", "202,w"]
    )
    path = write(tmp_path, content)

    _, blocks = read(path, types={"x": "int"}, max_bad_rows=9)

    assert faults_of(blocks) == [
        (2, "", "too few fields: 1, but the header has 2"),
        (4, "", "too many fields: 3, but the header has 2"),
        (200, "x", "'x200' is not a number"),
        (201, "", "too few fields: 1, but the header has 2"),
    ]
    assert [row["x"] for row in rows_of(blocks)] == [1, 3, *range(5, 200), 202]
    assert rows_of(blocks)[1]["y"] == "b\nc"


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_every_line_ending_is_a_line_ending_and_the_last_one_may_be_missing(
    tmp_path: Path, ending: str
) -> None:
    path = write(tmp_path, ending.join(["x,y", "1,a", "2,b"]))

    assert rows_of(read(path)[1]) == [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}]


def test_an_integer_beyond_64_bits_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "x,y\n1,1\n9223372036854775808,1\n" + "9" * 5000 + ",1\n")

    scan, blocks = read(path, types={"x": "int"})

    assert scan.columns[0].dtype == "int64"
    assert [(row, name) for row, name, _ in faults_of(blocks)] == [(2, "x"), (3, "x")]
    assert all("does not fit in 64 bits" in reason for _, _, reason in faults_of(blocks))


def test_a_whole_number_with_gaps_that_no_float_holds_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "x,y\n9007199254740993,1\n,1\n9007199254740992,1\n")

    _, blocks = read(path)

    ((row, name, reason),) = faults_of(blocks)
    assert (row, name) == (1, "x")
    assert "2^53" in reason
    assert [row["x"] for row in rows_of(blocks)] == [None, 2.0**53]


@pytest.mark.parametrize("value", ["1e39", "-1e300", "1e999"])
def test_a_finite_number_that_would_become_infinite_is_named(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, f"x,y\n0.5,1\n{value},1\n1e38,1\n")

    _, blocks = read(path)

    assert faults_of(blocks) == [(2, "x", f"'{value}' does not fit in a 32-bit float")]


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, b"x,y\n1,ok\n2,\xff\xfe\n3,\xc3\xbc\n")

    _, blocks = read(path)

    assert faults_of(blocks) == [(2, "y", r"'\xff\xfe' is not UTF-8")]
    assert [row["y"] for row in rows_of(blocks)] == ["ok", "ü"]


def test_a_nul_byte_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, b"x,y\n1,ok\n2,a\x00b\n")

    ((row, name, reason),) = faults_of(read(path)[1])

    assert (row, name) == (2, "y")
    assert "NUL" in reason


def test_a_byte_order_mark_is_not_part_of_the_first_name(tmp_path: Path) -> None:
    scan, _ = read(write(tmp_path, b"\xef\xbb\xbfx,y\n1,2\n"))

    assert [each.name for each in scan.columns] == ["x", "y"]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "an empty file"),
        (b"\n\n", "Received: []"),
        (b"x,x\n1,2\n", "'x' twice"),
        (b"x,,z\n1,2,3\n", "no name for column 2 of 3"),
        (b"x,\xff\n1,2\n", "in UTF-8"),
        (b"x,a\x00b\n1,2\n", "control characters"),
        (b'x,"y\n1,2\n', "unexpected end of data"),
        (b"x;y\n1;2\n", "Set data.delimiter to ';'"),
        (b"\xff\xfex\x00,\x00y\x00\n\x00\x00\xd8", "complete, undamaged UTF-16"),
        (b"PK\x03\x04rest", "a zip archive"),
        (b"PAR1rest", "Parquet"),
        (b"<!DOCTYPE html><p>404", "HTML"),
    ],
)
def test_a_file_without_a_usable_header_is_named_with_what_it_is(
    tmp_path: Path, content: bytes, part: str
) -> None:
    path = write(tmp_path, content)

    with pytest.raises(DataError) as caught:
        read(path)

    assert str(path) in str(caught.value)
    assert part in str(caught.value)


def test_another_delimiter_splits_the_fields(tmp_path: Path) -> None:
    path = write(tmp_path, "x\ty\n1\ta,b\n", "data.tsv")

    assert rows_of(read(path, delimiter="\t")[1]) == [{"x": 1, "y": "a,b"}]


@pytest.mark.parametrize("text", ['x,y\n1,"a\n2,b\n3,c\n', 'x,y\n1,a\n2,"b', 'x,y\n1,"a\n2\n'])
def test_a_quote_that_is_never_closed_is_an_error_and_not_one_long_value(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(DataError, match="a quote that is never closed"):
        read(write(tmp_path, text))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_no_record_is_lost_wherever_a_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, pack: Callable[[bytes], bytes]
) -> None:
    text = ending.join(["x,y", *(f"{index},v" for index in range(60))]) + ending
    path = write(tmp_path, pack(text.encode()))

    # More different sizes than a record has bytes: a block ends at each of its bytes.
    for block_bytes in range(40, 80):
        monkeypatch.setattr(csv_files, "BLOCK_BYTES", block_bytes)
        assert [row["x"] for row in rows_of(read(path)[1])] == list(range(60))


def test_a_record_longer_than_a_block_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_files, "BLOCK_BYTES", 1000)

    with pytest.raises(DataError, match="a longer record"):
        read(write(tmp_path, f"x,y\n1,{'a' * 5000}\n2,b\n"))


@pytest.mark.parametrize("name", ["data.csv", "data.csv.gz"])
def test_gzip_is_read_whatever_the_name_says(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, gzip.compress(b"x,y\n1,a\n"), name)

    assert rows_of(read(path)[1]) == [{"x": 1, "y": "a"}]


def test_plain_text_named_gz_is_read(tmp_path: Path) -> None:
    assert rows_of(read(write(tmp_path, "x,y\n1,a\n", "data.csv.gz"))[1]) == [{"x": 1, "y": "a"}]


@pytest.mark.parametrize("cut", [1, 8, 100, 2000])
def test_a_cut_gzip_is_an_error(tmp_path: Path, cut: int) -> None:
    whole = gzip.compress(b"x,y\n" + b"".join(b"%d,%d\n" % (i, i * i) for i in range(5000)))
    path = write(tmp_path, whole[:-cut], "data.csv.gz")

    with pytest.raises(DataError, match=r"data\.csv\.gz must be a complete, readable CSV file"):
        read(path)


def test_a_flipped_bit_in_gzip_is_an_error(tmp_path: Path) -> None:
    damaged = bytearray(gzip.compress(b"x,y\n" + b"1,2\n" * 1000))
    damaged[-6] ^= 1

    with pytest.raises(DataError, match="must be a complete, readable CSV file"):
        read(write(tmp_path, bytes(damaged), "data.csv.gz"))


def test_reordered_columns_are_put_in_the_order_of_the_first_file(tmp_path: Path) -> None:
    write(tmp_path, "x,y\n1,a\n", "a.csv")
    write(tmp_path, "y,x\nb,2\n", "b.csv")

    assert rows_of(read(tmp_path)[1]) == [{"x": 1, "y": "a"}, {"x": 2, "y": "b"}]


@pytest.mark.parametrize(
    ("header", "parts"),
    [("x", ["no 'y'"]), ("x,y,z", ["additional 'z'"]), ("x,why", ["no 'y'", "additional 'why'"])],
)
def test_missing_extra_and_renamed_columns_are_listed_with_the_file(
    tmp_path: Path, header: str, parts: list[str]
) -> None:
    write(tmp_path, "x,y\n1,a\n", "a.csv")
    write(tmp_path, f"{header}\n", "b.csv")

    with pytest.raises(DataError) as caught:
        read(tmp_path)

    assert all(part in str(caught.value) for part in ["b.csv", *parts])


def test_a_type_is_found_over_all_files_together(tmp_path: Path) -> None:
    write(tmp_path, "x\n" + "1\n" * 10, "a.csv")
    write(tmp_path, "x\n1.5\n", "b.csv")

    scan, blocks = read(tmp_path)

    assert scan.columns[0].dtype == "float32"
    assert len(rows_of(blocks)) == 11


def test_text_in_a_later_file_of_a_number_column_names_both_files(tmp_path: Path) -> None:
    write(tmp_path, "x,y\n" + "1,0\n" * 300, "a.csv")
    write(tmp_path, "x,y\n" + "2,yes\n" * 20, "b.csv")

    with pytest.raises(DataError, match=r"column 'y'.*numbers in .*a\.csv, text in .*b\.csv"):
        read(tmp_path)
    scan, _ = read(tmp_path, types={"y": "string"})
    assert [column.dtype for column in scan.columns] == ["int64", "string"]


def test_data_types_of_an_unknown_column_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'fare'"):
        read(write(tmp_path, "fare,tips\n1,2\n"), types={"fair": "float"})


def test_only_so_many_faults_are_listed_but_all_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, "x,y\n" + "1\n" * 1000 + "abc,2\n" * 1000)

    _, blocks = read(path, types={"x": "int"})

    assert sum(block.bad for block in blocks) == 2000
    assert sum(len(block.faults) for block in blocks) == 5


cells = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@given(st.lists(st.tuples(cells, cells), min_size=1, max_size=30), st.integers(400, 2000))
@settings(max_examples=30, deadline=None)
def test_every_text_that_a_csv_writer_writes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, table: list[tuple[str, str]], block_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("round") / "data.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, quoting=csv.QUOTE_ALL)
        writer.writerow(["a", "b"])
        writer.writerows(table)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_files, "BLOCK_BYTES", block_bytes)
        _, blocks = read(path, types={"a": "string", "b": "string"})

    assert [(row["a"], row["b"]) for row in rows_of(blocks)] == table
