"""CSV of every form against a reference reader, pandas and PyArrow.

The reference reads byte by byte what RFC 4180 says, and of what it does not say, what all of Python's csv,
pandas and PyArrow do. Every record must come out with its values, or be named with its number.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from stoker.core.errors import DataError
from stoker.data.columns import Column
from stoker.data.ingest import IngestConfig
from stoker.data.sources.columns.text import MISSING
from stoker.data.sources.formats import csv_files
from stoker.data.sources.records import Block, Scan, silent
from stoker.data.sources.source import open_source

ALWAYS_THE_SAME = "STOKER_FUZZ_EXAMPLES" not in os.environ
"""`make soak` draws new examples; a finding there is kept here."""

EXAMPLES = int(os.environ.get("STOKER_FUZZ_EXAMPLES", "150"))
"""About 8 s; `make soak` sets more."""

BOM = b"\xef\xbb\xbf"


def records_of(raw: bytes, delimiter: bytes) -> list[list[bytes]] | None:  # noqa: C901 - a plain automaton
    """The records with their fields, None where a quote is never closed."""
    records, fields, field, state = [], [], bytearray(), "start"
    text, at = raw.removeprefix(BOM), 0
    while at < len(text):
        byte = text[at : at + 1]
        at += 1
        if state == "quoted":
            if byte != b'"':
                field += byte
            elif text[at : at + 1] == b'"':
                field += b'"'
                at += 1
            else:
                state = "plain"
        elif byte == b'"' and state == "start":
            state = "quoted"
        elif byte == delimiter:
            fields.append(bytes(field))
            field, state = bytearray(), "start"
        elif byte in b"\r\n":
            if fields or state != "start":
                records.append([*fields, bytes(field)])
            fields, field, state = [], bytearray(), "start"
        else:
            field += byte
            state = "plain"
    if state == "quoted":
        return None
    if fields or state != "start":
        records.append([*fields, bytes(field)])
    return records


NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|infinity)", re.ASCII | re.IGNORECASE)

UNFIT = {*map(chr, range(32)), "\x7f", "\ufffd"}

REFUSED = object()
"""What a field is in a column that cannot hold it."""


def value_of(raw: bytes, column: Column, how: str) -> Any:
    """What a field is in a column: a number, a text, None where it is missing, or `REFUSED`."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return REFUSED
    if "\0" in text:
        return REFUSED
    if column.dtype == "string":
        return text
    text = text.strip(" \t\n\v\f\r")
    if text in MISSING:
        return None
    if how.startswith("bool"):
        return {"true": 1, "false": 0}.get(text.lower(), REFUSED)
    if not NUMBER.fullmatch(text):
        return REFUSED
    return whole_number(text, column) if how in ("int", "whole") else small(float(text), text)


def small(number: float, text: str) -> Any:
    with np.errstate(over="ignore"):
        found = float(np.float32(number))
    return REFUSED if math.isinf(found) and "inf" not in text.lower() else found


def whole_number(text: str, column: Column) -> Any:
    """An integer, also one that pandas wrote as 3.0; as a float where the column has gaps."""
    if re.fullmatch(r"[+-]?\d+", text, re.ASCII):
        number = int(text) if len(text) < 25 else 10**30
    else:
        as_float = float(text)
        if not as_float.is_integer() or abs(as_float) > 2**53:
            return REFUSED
        number = int(as_float)
    if column.dtype == "int64":
        return number if -(2**63) <= number < 2**63 else REFUSED
    if abs(number) > 2**53:
        return REFUSED
    return float(number) if column.dtype == "float64" else float(np.float32(number))


WORDS = """
    1 -2 +3 0 007 1.5 .5 -7. 1e3 1E-3 1e39 -1e300 1e999 1e-999 16777217 9007199254740993 3.0 1e5 5e-1
    9223372036854775807 -9223372036854775808 9223372036854775808 18446744073709551615 0x1F 1_000 1,5
    NaN nan NA N/A null NULL None <NA> #N/A -nan inf -Infinity +INF infinit 1d5 1e 1e+ . + - -- e5 \u0661
    true false TRUE False yes no t 2026-01-31 12:30 $1 1% ü 日本 🙂 a"b "" a""b \\" \\ ' # %
"""

FIELDS = st.one_of(
    st.sampled_from(
        WORDS.split()
    ).map(str.encode),
    st.sampled_from(
        [
            b"", b" ", b"  1", b"1 ", b"\t", b"a b", b"a\nb", b"a\r\nb", b"a\rb", b"\n", b",", b";",
            b"a,b", b'"', b'a"', b'"a', b'"a"', b"\0", b"a\0b", b"\xff", b"\xc3", b"\xed\xa0\x80", BOM, b"9" * 40,
            b"9" * 5000, b"x" * 300, "\u2028".encode(), "\u00a0".encode(), b"\x1a", b"\x85", b"\v", b"\x0c",
        ]
    ),
    st.binary(max_size=4),
    st.integers().map(lambda n: str(n).encode()),
    st.floats().map(lambda x: repr(x).encode()),
    st.text(max_size=5).map(lambda t: t.encode(errors="surrogatepass")),
)  # fmt: skip


@st.composite
def files(draw: Any) -> tuple[bytes, str]:
    """A CSV file, right as a rule, and its delimiter."""
    delimiter = draw(st.sampled_from([",", ",", ",", ";", "\t", "|", " ", "~", "\x01"]))
    width = draw(st.integers(1, 4))
    names = draw(st.sampled_from([[b"x", b"y", b"z", b"w"], [b"1", b"0", b"NA", "ü".encode()]]))[
        :width
    ]
    pool = draw(st.lists(FIELDS, min_size=1, max_size=4))
    kinds = [
        draw(st.sampled_from([pool, [b"1", b"2", b""], [b"true", b"false"], [b"0.5", b"1e3"]]))
        for _ in names
    ]
    rows = [
        [draw(st.sampled_from(kind)) for kind in kinds] for _ in range(draw(st.integers(0, 12)))
    ]
    if draw(st.integers(0, 5)) == 0 and rows:
        row = rows[draw(st.integers(0, len(rows) - 1))]
        row[:] = draw(st.sampled_from([row[:-1], [*row, b"1"], [*row, b""], [b""]]))
    quoting = draw(st.sampled_from(["needed", "needed", "all", "never", "some"]))
    end = draw(st.sampled_from([b"\n", b"\n", b"\r\n", b"\r", b"\n\n", b"\r\r\n"]))

    def written(field: bytes) -> bytes:
        needs = set(field) & set(b'"\r\n' + delimiter.encode()) or (not field and width == 1)
        if quoting == "never" or (quoting == "needed" and not needs):
            return field
        if quoting == "some" and not needs and draw(st.booleans()):
            return field
        return b'"' + field.replace(b'"', b'""') + b'"'

    lines = [delimiter.encode().join(map(written, row)) for row in [names, *rows]]
    raw = (
        draw(st.sampled_from([b"", b"", BOM])) + end.join(lines) + draw(st.sampled_from([end, b""]))
    )
    if draw(st.integers(0, 4)) == 0:  # a few bytes are gone, or others
        at = draw(st.integers(0, len(raw)))
        put = draw(
            st.sampled_from([b"", b'"', b"\n", b"\r", b" ", b"\0", b",", b'"x', BOM, b"\xff"])
        )
        raw = raw[:at] + put + raw[at + draw(st.integers(0, 3)) :]
    return raw, delimiter


def read(path: Path, **settings_: Any) -> tuple[Scan, list[Block]]:
    opened = open_source(IngestConfig(source=str(path), format="csv", **settings_), labels=())
    scan = opened.scan(silent)
    return scan, list(opened.blocks(scan))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("csv") / "data.csv"


@settings(
    derandomize=ALWAYS_THE_SAME, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck)
)
@given(files(), st.integers(40, 400), st.sampled_from([bytes, bytes, gzip.compress]))
@example((b"x,y\n1,\xff\n\xff\n3,4\n", ","), 40, bytes)  # not UTF-8, and too few fields
@example((b"x,y\n\0end\0,\0end\0\n1,2\n" + b"3,4\n" * 50, ","), 40, bytes)  # as our own last line
@example((b"x,y\n\0c3\0bc,\xe9\n", ","), 40, bytes)
@example((b"x,y\ntrue,1\n,2\nfalse,3\n", ","), 40, bytes)  # true and false with gaps
@example((b'x,y\n"a\r\nb",1\n' + b'"a\r\nb",7\n' * 200, ","), 40, bytes)  # blocks end after \r
@example((b"x,y\r\n" + b"abc,7\r\n" * 200, ","), 40, bytes)
def test_every_record_has_the_values_that_the_reference_reads_or_is_named(
    path: Path, file: tuple[bytes, str], block_bytes: int, pack: Any
) -> None:
    raw, delimiter = file
    path.write_bytes(pack(raw))
    found = records_of(raw, delimiter.encode())
    assume(not found or found[0][0].strip())  # a first column without a name is left out
    longest = max((sum(map(len, record)) + len(record) for record in found or ()), default=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_files, "BLOCK_BYTES", block_bytes + 2 * longest + 20)
        try:
            scan, blocks = read(path, delimiter=delimiter, max_bad_rows=1000)
        except DataError as error:
            check_refused(str(error), raw, found, path)
            return
    assert found is not None
    header, *records = found
    assert [column.name.encode() for column in scan.columns] == header

    wanted, bad = [], set()
    for number, record in enumerate(records, 1):
        values = [
            value_of(field, column, how)
            for field, column, how in zip(record, scan.columns, scan.readings, strict=False)
        ]
        if len(record) != len(header) or REFUSED in values:
            bad.add(number)
        else:
            wanted.append(values)
    rows = [list(row.values()) for block in blocks for row in block.table.to_pylist()]
    assert rows == wanted
    for at, column in enumerate(scan.columns):
        assert column.dtype != "int64" or None not in [row[at] for row in rows]
    assert {fault.row for block in blocks for fault in block.faults} == bad
    assert sum(block.bad for block in blocks) == len(bad)
    check_oracles(raw, delimiter, header, records, scan)


def check_refused(line: str, raw: bytes, found: list[list[bytes]] | None, path: Path) -> None:
    """A file is refused if its records cannot be separated, or if it names no column."""
    assert str(path) in line
    header = found[0] if found else []
    if "a quote that is never closed" in line:
        assert found is None
    elif "must have a different name" in line:
        names = [name.decode(errors="replace") for name in header]
        strange = [name for name in names if not name.strip() or set(name) & UNFIT]
        quoted = b'"' in re.split(rb"[\r\n]", raw.removeprefix(BOM).lstrip(b"\r\n"))[0]
        assert not names or strange or len(set(names)) < len(names) or quoted
    elif "must be split by data.delimiter" in line:
        assert len(header) == 1
    else:
        assert re.search("an empty file|must be CSV text", line)
        assert not raw or raw[0] in b"<{[%PBb\xff\xfe\x1f\x89\x28\xfd" or found == []


def check_oracles(
    raw: bytes, delimiter: str, header: list[bytes], records: list[list[bytes]], scan: Scan
) -> None:
    """pandas and PyArrow read the same records and numbers, where they read the file at all."""
    if any(len(record) != len(header) for record in records):
        return
    columns = list(zip(*records, strict=True)) or [()] * len(header)
    as_texts = pa.csv.read_csv(
        io.BytesIO(raw),
        parse_options=pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        read_options=pa.csv.ReadOptions(column_names=[str(i) for i in range(len(header))]),
        convert_options=pa.csv.ConvertOptions(
            column_types={str(i): pa.binary() for i in range(len(header))}
        ),
    )
    assert [column.to_pylist()[1:] for column in as_texts.columns] == [list(c) for c in columns]

    only_blanks = len(header) == 1 and any(not field.strip() for (field,) in records)
    lone = b"\r" in raw.replace(b"\r\n", b"")
    if b"\0" in raw or lone or not records or only_blanks:
        return  # pandas ends a value at a NUL, skips a line of blanks, and drops one after a lone \r
    how: dict[str, Any] = {"sep": delimiter, "encoding": "latin-1", "index_col": False}
    texts = pd.read_csv(io.BytesIO(raw.removeprefix(BOM)), dtype=str, na_filter=False, **how)
    assert [[t.encode("latin-1") for t in texts[at]] for at in texts] == list(map(list, columns))
    typed = pd.read_csv(
        io.BytesIO(raw.removeprefix(BOM)), keep_default_na=False, na_values=list(MISSING), **how
    )
    for at, column in zip(typed, scan.columns, strict=True):
        if typed[at].dtype.kind in "iuf" and typed[at].abs().max() <= 2.0**53:  # wider ones are ids
            assert column.dtype != "string", typed[at]
