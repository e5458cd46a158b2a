"""JSON Lines of every form against Python's json module line by line, pandas and PyArrow.

Every line must come out with its values, or be named with its number.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Never

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.json
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stoker.core.errors import DataError
from stoker.data.columns import Column
from stoker.data.ingest import IngestConfig
from stoker.data.sources.columns.named_columns import NUMBER, TEXT, TRUTH, WHOLE_NUMBER
from stoker.data.sources.formats import jsonl_files
from stoker.data.sources.records import Block, Scan, silent
from stoker.data.sources.source import open_source

ALWAYS_THE_SAME = "STOKER_FUZZ_EXAMPLES" not in os.environ
"""`make soak` draws new examples; a finding there is kept here."""

EXAMPLES = int(os.environ.get("STOKER_FUZZ_EXAMPLES", "150"))
"""About 8 s; `make soak` sets more."""

BOM = b"\xef\xbb\xbf"

REFUSED = object()
"""What a value is in a column that cannot hold it."""

Record = dict[str, Any]


def record_of(line: bytes) -> Record | None:
    """One line's object, None where it is none that can be used."""
    try:
        found = json.loads(line.decode(), object_pairs_hook=unlike, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found else None


def unlike(pairs: list[tuple[str, Any]]) -> Record:
    if len(dict(pairs)) < len(pairs):
        raise ValueError
    return dict(pairs)


def no_constant(text: str) -> Never:
    raise ValueError(text)


def records_of(raw: bytes) -> list[Record | None]:
    """Each line's record, {} for one without content."""
    lines = raw.removeprefix(BOM).split(b"\n")
    return [record_of(line) if line.strip() else {} for line in lines]


def value_of(value: Any, column: Column, kind: str, *, as_text: bool) -> Any:
    """What a value is in a column: as the shard holds it, or `REFUSED`."""
    given = value if isinstance(value, list) else [value]
    length = column.length or 1
    if value is None or value == []:
        if column.length is not None and column.dtype == "int64":
            return REFUSED
        given = [None] * length
    if len(given) != length:
        return given_nothing(given, kind)
    found = [item_of(item, column, kind, as_text=as_text) for item in given]
    gap = column.length is not None and column.dtype == "int64" and None in found
    if REFUSED in found or gap:
        return REFUSED
    return found if column.length is not None else found[0]


def given_nothing(given: list[Any], kind: str) -> Any:
    """A list of nulls in a column that has no value at all is missing, however long it is."""
    return "" if not kind and set(given) == {None} else REFUSED


def item_of(item: Any, column: Column, kind: str, *, as_text: bool) -> Any:
    if item is None:
        return "" if column.dtype == "string" else None
    if as_text and isinstance(item, int | float) and not math.isinf(item_size(item)):
        item = str(int(item) if isinstance(item, bool) else item).removesuffix(".0")
    if kind == TEXT and isinstance(item, str):
        return REFUSED if "\0" in item or not is_utf8(item) else item
    if kind == TRUTH and isinstance(item, bool):
        return int(item)
    is_number = isinstance(item, int | float) and not isinstance(item, bool)
    return number_of(item, column) if kind in (NUMBER, WHOLE_NUMBER) and is_number else REFUSED


def item_size(item: float) -> float:
    return item if isinstance(item, float) else 0.0


def is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def number_of(item: float, column: Column) -> Any:
    if column.dtype == "int64":
        return item if -(2**63) <= item < 2**63 else REFUSED
    if column.whole and abs(item) > 2**53:
        return REFUSED
    if abs(item) > 2**1000:
        return REFUSED
    if column.dtype == "float64":
        return float(item)
    with np.errstate(over="ignore"):
        small = float(np.float32(float(item)))
    return REFUSED if math.isinf(small) else small


NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        [2**24 + 1, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64, 10**20, 10**400, 0.5, -0.0]
    ),
)
TEXTS = st.one_of(
    st.sampled_from(
        [
            "",
            "a",
            "1",
            "NaN",
            "null",
            "2026-01-31",
            "2026-01-31T00:00:00Z",
            "a\0b",
            "\ud800",
            "\U0001f600",
        ]
    ),
    st.text(max_size=6),
)
ODD = st.one_of(
    NUMBERS,
    TEXTS,
    st.booleans(),
    st.none(),
    st.sampled_from(
        [
            [],
            [None],
            [None, None],
            {},
            {"a": 1},
            {"a": {"b": [1]}},
            [[1]],
            [1, "a"],
            [1, 2, 3],
            [True, None],
        ]
    ),
)
OF_KIND = [
    st.integers(-5, 5),
    st.integers(2**53 - 2, 2**53 + 2),
    st.integers(2**63 - 2, 2**63 + 2),
    NUMBERS,
    st.booleans(),
    TEXTS,
    st.lists(st.integers(0, 9), min_size=2, max_size=2),
    st.lists(st.none() | st.floats(-9, 9), min_size=2, max_size=2),
    st.lists(TEXTS | st.none(), min_size=3, max_size=3),
    st.none(),
]
BROKEN = st.sampled_from(
    [
        b"", b'"', b"\n", b"\r", b"\r\n", b"}", b"{", b"[", b",", b":", b"\0", b"\xff", b"\xed\xa0\x80", BOM, b"NaN",
        b"Infinity", b"-Infinity", b"1e400", b"01", b"1.", b"+1", b"\\u0000", b"\\ud800", b"//", b"{}\n", b"7\n",
        b"\n\n  \n", b'{"x":1}', b"9" * 5000, b"[" * 5000, b"\t", b"\x0c", b"true", b"nul", b'"x":1,', b"\xe2\x80\xa8",
    ]
)  # fmt: skip


@st.composite
def files(draw: Any) -> bytes:
    """Lines of JSON, right as a rule."""
    names = draw(
        st.lists(
            st.sampled_from(["x", "y", "z", "ü", "a b", "0"]), min_size=1, max_size=3, unique=True
        )
    )
    kinds = {name: draw(st.sampled_from(OF_KIND)) for name in names}
    ascii_, space = draw(st.booleans()), draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    lines = []
    for _ in range(draw(st.integers(1, 10))):
        record = {}
        for name, kind in kinds.items():
            how = draw(st.integers(0, 19))
            if how:  # else the key is not there
                record[name] = draw(ODD if how == 1 else kind)
        if record or draw(st.booleans()):
            lines.append(json.dumps(record, ensure_ascii=ascii_, separators=space))
    end = draw(st.sampled_from(["\n", "\n", "\r\n", "\n\n"]))
    raw = (end.join(lines) + draw(st.sampled_from([end, ""]))).encode(errors="surrogatepass")
    raw = draw(st.sampled_from([b"", b"", BOM])) + raw
    if draw(st.integers(0, 3)) == 0:  # a few bytes are gone, or others
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(BROKEN) + raw[at + draw(st.integers(0, 3)) :]
    return raw


def read(path: Path, **settings_: Any) -> tuple[Scan, list[Block]]:
    opened = open_source(IngestConfig(source=str(path), max_bad_rows=1000, **settings_), labels=())
    scan = opened.scan(silent)
    return scan, list(opened.blocks(scan))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jsonl") / "data.jsonl"


@settings(
    derandomize=ALWAYS_THE_SAME, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck)
)
@given(files(), st.integers(1, 12), st.sampled_from([bytes, bytes, gzip.compress]), st.booleans())
@example(b'{"x":18446744073709551615}\n{"x":1}\n', 1, bytes, False)
@example(b'{"x":18446744073709551615}\n{"x":null}\n', 9, bytes, False)
@example(b'{"x":18446744073709551615}\n{"x":1}\n', 9, bytes, True)
@example(b'{"x":1.5}\n{"x":1e400}\n{"x":2}\n', 9, bytes, True)
@example(b'{"x":[1.5,2]}\n{"x":[null,null,null]}\n{"x":[null]}\n{"x":[3,4]}\n', 9, bytes, False)
@example(b'{"x":1}\n{"x":[null,null]}\n', 9, bytes, False)
@example(b'{"x":4343084762333916}\n{"x":1.5}\n{"x":"a"}\n', 9, bytes, True)
@example(b'{"x":[1,"a"]}\n{"x":[null,0.0]}\n', 1, bytes, True)
@example(b'{"x":[1,{}]}\n{"x":["a",true]}\n', 9, bytes, True)
def test_every_line_has_the_values_that_the_reference_reads_or_is_named(
    path: Path, raw: bytes, block_lines: int, pack: Callable[[bytes], bytes], as_text: bool
) -> None:
    path.write_bytes(pack(raw))
    found = records_of(raw)
    names = list(dict.fromkeys(name for record in found if record for name in record))
    texts = {names[0]: "string"} if as_text and names else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl_files, "BLOCK_LINES", block_lines)
        try:
            scan, blocks = read(path, types=texts)
        except DataError as error:
            check_refused(str(error), raw, path)
            return
    assert [column.name for column in scan.columns] == names

    wanted, bad = [], set()
    for number, record in enumerate(found, 1):
        if record is None:
            bad.add(number)
        elif record:
            values = [
                value_of(record.get(column.name), column, kind, as_text=column.name in texts)
                for column, kind in zip(scan.columns, scan.kinds, strict=True)
            ]
            if REFUSED in values:
                bad.add(number)
            else:
                wanted.append(values)
    rows = [list(row.values()) for block in blocks for row in block.table.to_pylist()]
    assert rows == wanted
    assert {fault.row for block in blocks for fault in block.faults} == bad
    assert sum(block.bad for block in blocks) == len(bad)
    check_oracles(raw, found)


def check_refused(line: str, raw: bytes, path: Path) -> None:
    """A file is refused if it is not JSON Lines, or its lines do not have the same keys."""
    assert str(path) in line or f"{path.name} record" in line
    if "must hold one JSON object per line" in line:
        assert (
            not raw.removeprefix(BOM).strip()
            or raw.removeprefix(BOM).strip()[:1] in b"[<PB%\xff\xfe"
        )
    else:
        assert (
            "must hold the same kind of value in every record" in line
            or "must have a different name" in line
        )


def check_oracles(raw: bytes, found: list[Record | None]) -> None:
    """pandas and PyArrow read the same, where they read the file at all."""
    records = [record for record in found if record]
    if None in found or not records:
        return
    sent = raw.removeprefix(BOM)
    readings: list[Any] = []
    with contextlib.suppress(ValueError):  # more than 64 bits; half of a surrogate pair
        frame = pd.read_json(
            io.BytesIO(sent), lines=True, dtype=False, precise_float=True, convert_axes=False
        )
        # pandas reads -2**64 as 0.
        long = [name for record in records for name in record if is_long(record[name])]
        readings.append(frame.drop(columns=[*{*long}]).to_dict("records"))
    with contextlib.suppress(pa.ArrowException, LookupError, UnicodeDecodeError, SystemError):
        table = pa.json.read_json(io.BytesIO(sent))
        # PyArrow 26 takes some texts for times, and mixes up where the nulls of a list are.
        lists = [name for record in records for name in record if has_null(record[name])]
        times = [field.name for field in table.schema if "timestamp" in str(field.type)]
        readings.append(table.drop_columns([*{*times, *lists}]).to_pylist())
    for reading in readings:
        assert len(reading) == len(records)
        for got, record in zip(reading, records, strict=True):
            assert all(alike(value, record.get(name)) for name, value in got.items())


def is_long(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(is_long, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**64


def has_null(value: Any) -> bool:
    return isinstance(value, list) and (None in value or any(map(has_null, value)))


def alike(got: Any, value: Any) -> bool:
    """Whether another reader's value is the reference's, of objects aside."""
    if isinstance(got, list) and isinstance(value, list):
        return len(got) == len(value) and all(map(alike, got, value))
    if isinstance(got, dict) or isinstance(value, dict):
        return True
    if isinstance(value, str) and not is_utf8(value):
        return True
    if got is None or got != got:
        return value is None
    if isinstance(got, int | float) and isinstance(value, int | float):
        return abs(value) > 2**1000 or math.isclose(got, value)
    return got == value
