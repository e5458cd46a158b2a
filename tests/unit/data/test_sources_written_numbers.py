"""Numbers as people write them, ids too wide for numbers, UTF-16, and pandas' index without a name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.core.errors import ConfigError, DataError
from stoker.data.ingest import ingest
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.records import Scan, silent
from stoker.data.sources.source import open_source
from stoker.data.sources.written_numbers import NumberText, guess
from stoker.scaffold import write_experiment


@pytest.mark.parametrize(
    ("example", "texts", "plain"),
    [
        ("1,234.5", ["3,961,229", "12", "-5.25", " 7 "], ["3961229", "12", "-5.25", "7"]),
        (
            "$9.99",
            ["$72.50", "72.50", "-$3", "$-3", "$1,000"],
            ["72.50", "72.50", "-3", "-3", "1000"],
        ),
        ("12%", ["12%", "3.5 %", "0"], ["12", "3.5", "0"]),
        ("857,79", ["857,79", "1.234,5", "12"], ["857.79", "1234.5", "12"]),
        ("1.234,5 €", ["1.234,5 €", "1.234.567€", "5"], ["1234.5", "1234567", "5"]),
        ("1 234,5", ["1 234,5", "1\u202f234\u00a0567"], ["1234.5", "1234567"]),
        ("1'234.5", ["1'234'567.5"], ["1234567.5"]),
        ("1,234", ["1,234"], ["1234"]),
        ("0,123", ["0,123", "1,456", "1.000,5"], ["0.123", "1.456", "1000.5"]),
        # What is not such a number stays what it is.
        (
            "1,234.5",
            [
                "1,23,4",
                "1,2345",
                "abc",
                "$5",
                "",
                "1.2.3",
                "0,123",
                "001,234",
                "(5)",
                "5-",
                "\u22125",
            ],
            None,
        ),
        # Next to 1.500, which is 1500, 1.5 is ambiguous.
        (
            "1.234,5",
            ["1.500", "1.5", "-12.34", ".5", "1.5e3", "1e3", "."],
            ["1500", "?1.5", "?-12.34", "?.5", "?1.5e3", "1e3", "."],
        ),
    ],
)
def test_an_example_says_how_a_column_writes_its_numbers(
    example: str, texts: list[str], plain: list[str] | None
) -> None:
    assert NumberText(number=example).plain(pa.array(texts)).to_pylist() == (plain or texts)


@pytest.mark.parametrize(
    ("texts", "number"),
    [
        (["3,961,229", "12"], "1,234.5"),
        (["1,234", "5,678"], "1,234.5"),
        (["$72.50", "$1,000.25"], "$1,234.5"),
        (["12%", "5%"], "1,234.5%"),
        (["857,79", "3,5"], "1.234,5"),
        (["1.234.567", "12"], "1.234,5"),
        (["1 234", "12"], "1 234.5"),
        (["1 250 000", "850 000"], "1 234.5"),
        (["1 234 567,8", "1 234 568,9"], "1 234,5"),
        (["€1.250.000", "€2.300.000"], "€1.234,5"),
        (["1.234.567.890", "9.876.543.210", "12.345"], "1.234,5"),
        (["0,123", "0,456", "0,789"], "1.234,5"),
        (["0,123", "1,456", "12,789"], "1.234,5"),
        *(
            ([text], None)
            for text in (
                "2020-01-01",
                "1.2.3.4",
                "abc",
                "10:30",
                "12/31",
                "555-1234",
                "1,2,3",
                "+49 170",
                "192.168.001.001",
                "192.168.100.200",
                "555 123 456",
                "555.123.456",
                "0555 123 456",
                "01.02.2024",
                "01,02",
                "007,123",
                "1.2.3",
                "2024 001",
            )
        ),
        (["12%", "$5"], None),
        (["555 123 456", "555123457"], None),
        (["110 001", "560 001"], None),
        (["1,234"] * 500 + ["0,5"], None),
        (["1,234"] * 500 + ["007"], None),
        (["1,234"] * 9 + ["n/k"], None),
    ],
)
def test_what_a_person_would_read_as_a_number_is_guessed_and_nothing_else(
    texts: list[str], number: str | None
) -> None:
    found = guess(texts)

    assert (None if found is None else found.number) == number


def scanned(path: Path, **settings: Any) -> Scan:
    return open_source(IngestConfig(source=str(path), **settings), labels=[]).scan(silent)


PEOPLE = ["3,961,229", "857,799", "1,250", "42"]


def table(path: Path) -> Path:
    rows = [f'{i},"{people}",${i}.50,{10**20 + i},{i % 2}' for i, people in enumerate(PEOPLE * 20)]
    path.write_text("\n".join([",people,price,order,y", *rows]) + "\n", encoding="utf-8")
    return path


def test_each_assumption_names_its_column_and_the_setting_that_changes_it(tmp_path: Path) -> None:
    scan = scanned(table(tmp_path / "d.csv"))

    assert [(column.name, column.dtype) for column in scan.columns] == [
        ("people", "string"),
        ("price", "string"),
        ("order", "string"),
        ("y", "int64"),
    ]
    index, people, price, order = (each.text for each in scan.assumptions)
    assert "the first column has no name" in index
    assert "column 'people'" in people
    assert "'3,961,229' would be 3961229" in people
    assert 'data.types: {people: {number: "1,234.5"}}' in people
    assert 'data.types: {price: {number: "$1,234.5"}}' in price
    assert "column 'order' is read as text, because its whole numbers" in order


def test_numbers_are_read_as_the_example_says_and_what_is_none_is_a_bad_record(
    tmp_path: Path,
) -> None:
    path = table(tmp_path / "d.csv")
    types: dict[str, Any] = {
        "people": NumberText(number="1,234"),
        "price": NumberText(number="$9.99"),
    }

    dataset = ingest(IngestConfig(source=str(path), types=types), tmp_path / "out")

    assert [column.dtype for column in dataset.columns[:2]] == ["int64", "float32"]
    held = [
        value for split in ("train", "eval") for value in dataset.table(split)["people"].to_pylist()
    ]
    assert sorted(held) == sorted([3961229, 857799, 1250, 42] * 20)
    path.write_text(path.read_text() + '9,"12,34",$1.00,5,1\n')
    with pytest.raises(DataError, match="column 'people': '12,34' is not a number"):
        ingest(IngestConfig(source=str(path), types=types), tmp_path / "again")


def test_a_few_numbers_with_marks_in_a_number_column_are_offered_as_such(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("x,y\n" + "7,1\n" * 200 + '"1,234",1\n')

    with pytest.raises(DataError, match=r'\'1,234\' is not a number.*{x: {number: "1,234.5"}}'):
        ingest(IngestConfig(source=str(path)), tmp_path / "out")


@pytest.mark.parametrize("text", ["0,5", "1.234.567,8", "1.234.567", "192.168.100.200"])
def test_a_type_that_would_change_the_plain_numbers_is_not_offered(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "d.csv"
    path.write_text("x,y\n" + "1.250,1\n" * 200 + f'"{text}",1\n')

    with pytest.raises(DataError, match="is not a number") as caught:
        ingest(IngestConfig(source=str(path)), tmp_path / "out")

    assert "{x: string}" in str(caught.value)
    assert "number:" not in str(caught.value)


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_numbers_that_are_none_but_in_text_stay_what_they_are(tmp_path: Path, name: str) -> None:
    rows = [{"p": each, "n": 1000, "t": text} for each, text in [(0.125, "0,5"), (1.5, "1.000")]]
    path = tmp_path / name
    if name == "d.jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    german = NumberText(number="1.234,5")
    config = IngestConfig(source=str(path), types={"p": german, "n": german, "t": german})
    source = open_source(config, labels=[])

    [block] = source.blocks(source.scan(silent))

    assert block.table.to_pydict() == {"p": [0.125, 1.5], "n": [1000, 1000], "t": [0.5, 1000.0]}


def test_where_the_decimal_mark_is_a_comma_a_point_alone_is_a_bad_record(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text('x,y\n"1,5",1\n1.500,1\n1.5,1\n')
    german: dict[str, Any] = {"x": NumberText(number="1.234,5")}

    with pytest.raises(DataError, match=r"column 'x': '1\.5' is not a number"):
        ingest(IngestConfig(source=str(path), types=german), tmp_path / "out")


def test_json_texts_that_are_numbers_are_offered_too(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"p": each, "y": 1}) + "\n" for each in PEOPLE))

    [assumed] = scanned(path).assumptions
    numbers = scanned(path, types={"p": NumberText(number="1,234.5")})

    assert (assumed.column, assumed.number) == ("p", "1,234.5")
    assert [column.dtype for column in numbers.columns] == ["int64", "int64"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
@pytest.mark.parametrize("name", ["d.csv", "d.jsonl"])
def test_text_in_utf_16_is_read(tmp_path: Path, name: str, encoding: str) -> None:
    lines = (
        ["x,y", "日本,1"]
        if name == "d.csv"
        else [json.dumps({"x": "日本", "y": 1}, ensure_ascii=False)]
    )
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / name).write_bytes((mark + "\n".join(lines * 1)).encode(encoding))
    source = open_source(IngestConfig(source=str(tmp_path / name)), labels=[])

    [block] = source.blocks(source.scan(silent))

    assert block.table.to_pylist() == [{"x": "日本", "y": 1}]


@pytest.mark.parametrize(
    "text",
    ["number", "12,34,567", "1.2.3", "(1,234.5)", "1,234-", "\u22125", "1,234 -", "0,123,456"],
)
def test_an_example_that_is_not_a_number_or_hides_a_sign_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r'must be an example.*{number: "1,234.5"}'):
        NumberText(number=text)


def test_init_takes_numbers_as_such_and_says_so(tmp_path: Path) -> None:
    written = write_experiment(tmp_path / "new", table(tmp_path / "d.csv"), label="y")

    settings = (tmp_path / "new" / "stoker.yaml").read_text()
    assert "types: {people: {number: '1,234.5'}, price: {number: '$1,234.5'}}" in settings
    assert "Column 'people' is read as numbers such as 1,234.5." in written.note
