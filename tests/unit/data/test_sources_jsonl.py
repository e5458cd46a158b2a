"""JSON Lines: what the values of a key become, and each bad line named."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.core.errors import ConfigError, DataError
from stoker.data.columns import VARYING, Column
from stoker.data.ingest import IngestConfig
from stoker.data.sources.config import ColumnsConfig
from stoker.data.sources.formats import jsonl_files
from stoker.data.sources.records import Block, Scan, silent
from stoker.data.sources.source import open_source


def read(
    folder: Path, text: str | bytes, *, name: str = "data.jsonl", **settings_: Any
) -> tuple[Scan, list[Block]]:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    opened = open_source(IngestConfig(source=str(folder / name), **settings_), labels=())
    scan = opened.scan(silent)
    return scan, list(opened.blocks(scan))


def lines(*values_: Any) -> str:
    return "".join(json.dumps({"x": value}) + "\n" for value in values_)


def values(blocks: list[Block], name: str = "x") -> list[Any]:
    return [value for block in blocks for value in block.table[name].to_pylist()]


def faults(blocks: list[Block]) -> list[tuple[int, str, str]]:
    return [(f.row, f.column, f.reason) for block in blocks for f in block.faults]


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ([3, None], "a whole number of the list is missing"),
        ([None, None], "a whole number of the list is missing"),
        (3, "it holds a single value instead of a list"),
        (["a"], "it holds text instead of a whole number"),
        ([[3]], "it holds an object or a list of lists instead of a whole number"),
        ([-(2**63)], "-9223372036854775808 means a missing value"),
        ([2**64], "'18446744073709551616' does not fit in 64 bits"),
        (
            [0] * 1_000_000,
            "a list of more than 65,536 values; cut it when the records are written",
        ),
    ],
)
def test_a_bad_list_is_named_and_its_neighbors_are_kept(
    tmp_path: Path, given_: Any, said: str
) -> None:
    rows = [[1] * (row % 3) for row in range(400)]

    _, blocks = read(tmp_path, lines(*rows, given_), max_bad_rows=1)

    assert [(row, reason) for row, _, reason in faults(blocks)] == [(401, said)]
    assert values(blocks) == rows


def test_lists_are_taken_for_lists_of_varying_length_with_a_word(tmp_path: Path) -> None:
    text = lines(*[[1] * (row % 3) for row in range(300)])

    scan, _ = read(tmp_path, text)
    confirmed, _ = read(tmp_path, text, columns=ColumnsConfig(lists=("x",)))

    (assumed,) = scan.assumptions
    assert assumed.text == (
        "column 'x' is read as lists of varying length: 1 to 2 values, most often 1 (in 100 of 200 "
        "records). Set data.columns: {lists: ['x']} to confirm this"
    )
    assert confirmed.columns == scan.columns
    assert not confirmed.assumptions


def test_lists_of_one_length_vary_where_the_configuration_says_so(tmp_path: Path) -> None:
    lists = ColumnsConfig(lists=("x",))

    scan, blocks = read(tmp_path, lines([5], [6], [], [7]), columns=lists)

    assert scan.columns == (column("int64", length=VARYING),)
    assert values(blocks) == [[5], [6], [], [7]]
    with pytest.raises(
        ConfigError, match=r"data\.columns\.lists must name columns that hold lists"
    ):
        read(tmp_path, lines(5, 6), columns=lists)
    with pytest.raises(ConfigError, match=r"data\.columns\.lists must name columns of the data"):
        read(tmp_path, lines([5]), columns=ColumnsConfig(lists=("y",)))


def column(dtype: Any, *, whole: bool = False, length: int | None = None) -> Column:
    return Column(name="x", dtype=dtype, whole=whole, length=length)


@pytest.mark.parametrize(
    ("text", "expected", "wanted"),
    [
        (lines(1, -(2**63)), column("int64"), [1, -(2**63)]),
        (lines(1, None), column("float32", whole=True), [1.0, None]),
        (lines(1, 2.5, None), column("float32"), [1.0, 2.5, None]),
        (lines(True, False), column("int64"), [1, 0]),
        (lines("a", "ü", None, ""), column("string"), ["a", "ü", "", ""]),
        (lines([1, 2], [3, 4]), column("int64", length=2), [[1, 2], [3, 4]]),
        (lines([1, 2.5], None), column("float32", length=2), [[1.0, 2.5], [None, None]]),
        (lines([1.5, None]), column("float32", length=2), [[1.5, None]]),
        (lines(["a", None], ["b", "c"]), column("string", length=2), [["a", ""], ["b", "c"]]),
        (lines([5], [6]), column("int64"), [5, 6]),
        (lines([1], [2, 3], [], None), column("int64", length=VARYING), [[1], [2, 3], [], []]),
        (
            lines([1, 2.5], [None, 4, 5], [None], [3]),
            column("float32", length=VARYING),
            [[1.0, 2.5], [None, 4.0, 5.0], [], [3.0]],
        ),
        (lines(["a"], ["", "b", None]), column("string", length=VARYING), [["a"], ["", "b"]]),
        (lines([True], [False, True]), column("int64", length=VARYING), [[1], [0, 1]]),
        (lines([], []), column("string"), ["", ""]),
        (lines(None, None), column("string"), ["", ""]),
        (lines(1e20, 10**20), column("float32"), [pytest.approx(1e20), pytest.approx(1e20)]),
        ('{"x":1}\n\n  \n{"x":2}', column("int64"), [1, 2]),
        ('\ufeff{"x":1}\r\n{"x":2}\r\n', column("int64"), [1, 2]),
    ],
)
def test_each_key_has_its_column(
    tmp_path: Path, text: str, expected: Column, wanted: list[Any]
) -> None:
    scan, blocks = read(tmp_path, text)

    assert scan.columns == (expected,)
    assert values(blocks) == wanted
    assert faults(blocks) == []


def test_a_key_that_a_line_does_not_have_is_missing_there(tmp_path: Path) -> None:
    scan, blocks = read(tmp_path, '{"y":"a","x":1}\n{"y":"b"}\n{"x":3,"y":"c"}\n')

    assert [each.name for each in scan.columns] == ["y", "x"]
    assert values(blocks) == [1.0, None, 3.0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"x": 2', "it is not JSON: Expecting ',' delimiter, at character 8"),
        (b'{"x": NaN}', "NaN is not a JSON value; use null for a missing number"),
        (b'{"x": 1, "x": 2}', "key 'x' occurs twice"),
        (b'{"x": "\xff"}', "byte 8 of the line is not UTF-8"),
        (b'{"x": "a\x00b"}', "it is not JSON: Invalid control character"),
        (b"{}", "it is not a JSON object with at least one key"),
        (b"7", "it is not a JSON object with at least one key"),
        (b'{"x": ' + b"[" * 100_000, "it is nested too deeply"),
        (b'{"x": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b'{"x": "7"}', "it holds text instead of a number"),
        (b'{"x": true}', "it holds true or false instead of a number"),
        (b'{"x": {"y": 1}}', "it holds an object or a list of lists instead of a number"),
        (b'{"x": [1, 2]}', "it holds 2 values instead of one"),
        (b'{"x": 1e999}', "does not fit in a 32-bit float"),
        (b'{"x": ' + b"9" * 400 + b"}", "does not fit in a 32-bit float"),
    ],
)
def test_a_bad_line_is_named_and_its_neighbors_are_kept(
    tmp_path: Path, line: bytes, said: str
) -> None:
    text = b'{"x": 0.5}\n' * 2 + line + b"\n" + b'{"x": 1.5}\n'

    _, blocks = read(tmp_path, text, max_bad_rows=1)

    ((row, _, reason),) = faults(blocks)
    assert row == 3
    assert said in reason
    assert values(blocks) == [0.5, 0.5, 1.5]


@pytest.mark.parametrize(
    ("value", "said"), [(r"\ud800", "is not UTF-8"), (r"a\u0000b", "holds a NUL byte")]
)
def test_an_escape_that_is_not_a_character_is_named(tmp_path: Path, value: str, said: str) -> None:
    _, blocks = read(tmp_path, f'{{"x":"good"}}\n{{"x":"{value}"}}\n')

    ((row, name, reason),) = faults(blocks)
    assert (row, name) == (2, "x")
    assert said in reason


def test_a_last_line_that_is_cut_is_named(tmp_path: Path) -> None:
    _, blocks = read(tmp_path, lines(1, 2, 3)[:-4])

    assert [row for row, _, _ in faults(blocks)] == [3]
    assert values(blocks) == [1, 2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "an empty file"),
        (b"\n\n", "an empty file"),
        (b'[{"x": 1}]', "a JSON array"),
        (b"PAR1....", "Parquet"),
        (b"PK\x03\x04rest", "a zip archive"),
    ],
)
def test_a_file_that_is_not_json_lines_is_named(tmp_path: Path, text: bytes, said: str) -> None:
    with pytest.raises(DataError, match=rf"data\.jsonl must hold one JSON object.*{said}"):
        read(tmp_path, text, max_bad_rows=1000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (lines({"a": 1}, {"a": 2}), r"an object or a list of lists, in 2 records"),
        (lines(1, 2, [1, 2]), r"2 values, each a number, in 1 record \(first data.jsonl record 3"),
        (lines([[1]], [[1], [2]]), r"2 values, each an object or a list of lists, in 1 record"),
        (
            lines([1, "a"], [1], [2, 3]),
            r"2 values, each a list of values of different types, in 1 record",
        ),
        (lines([1, "a"]), r"a list of values of different types"),
        (lines(1, "a", 2, "b"), r"a number, in 2 records .* text, in 2 records"),
    ],
)
def test_a_key_whose_values_no_column_can_hold_is_one_error(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(
        DataError, match=rf"column 'x' must hold the same kind of value in every record.*{said}"
    ):
        read(tmp_path, text)


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz", "data.ndjson"])
def test_the_first_bytes_say_whether_it_is_gzip(tmp_path: Path, name: str) -> None:
    for text in (lines(1, 2).encode(), gzip.compress(lines(1, 2).encode())):
        _, blocks = read(tmp_path, text, name=name)
        assert values(blocks) == [1, 2]


def test_gzip_that_is_cut_is_named_even_between_two_lines(tmp_path: Path) -> None:
    _, blocks = read(tmp_path, gzip.compress(lines(1, 2).encode())[:-2])

    assert values(blocks) == [1, 2]
    ((row, _, reason),) = faults(blocks)
    assert row == 3
    assert "is truncated" in reason


def test_a_line_without_end_is_an_error_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl_files, "MAX_LINE_BYTES", 1 << 20)

    with pytest.raises(DataError, match=r"must end within 1 MiB.*line 2"):
        read(tmp_path, lines(1) + '{"x": "' + "a" * (3 << 20))


def test_a_key_that_one_file_lacks_is_named_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1, "y": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"x": 1, "z": 2}\n')
    opened = open_source(IngestConfig(source=str(tmp_path)), labels=())

    with pytest.raises(DataError, match=r"b\.jsonl .*no 'y' and additional 'z'"):
        opened.scan(silent)


def test_data_types_overrides_and_must_name_a_key(tmp_path: Path) -> None:
    scan, blocks = read(tmp_path, lines(7, 8), types={"x": "string"})

    assert scan.columns == (column("string"),)
    assert values(blocks) == ["7", "8"]
    with pytest.raises(ConfigError, match="Did you mean 'fare'"):
        read(tmp_path, '{"fare": 1}', types={"far": "int"})


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@given(
    rows=st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.floats(width=32, allow_nan=False), texts),
        min_size=1,
        max_size=30,
    ),
    block_lines=st.integers(1, 40),
    ascii_=st.booleans(),
)
@settings(max_examples=50)
def test_what_json_writes_comes_back_however_it_is_cut_into_blocks(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[int, float, str]],
    block_lines: int,
    ascii_: bool,
) -> None:
    rows = [(i, f if math.isfinite(f) else 0.0, t) for i, f, t in rows]
    text = "\n".join(
        json.dumps(dict(zip("ift", row, strict=True)), ensure_ascii=ascii_) for row in rows
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl_files, "BLOCK_LINES", block_lines)
        _, blocks = read(tmp_path_factory.mktemp("jsonl"), text)

    for at, name in enumerate("ift"):
        assert values(blocks, name) == [row[at] for row in rows]
