"""simdjson's reading of small bodies held against the reader that says every error."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from stoker.serve.errors import ServeError
from stoker.serve.rest.json_text import QuickJson, parse_json

TEXTS = [
    b'{"instances": [[1.5, -0.0, -0, 0, 1e5, 1E-7, 123456789012345678]]}',
    b'{"instances": [18446744073709551615, -9223372036854775808, 9223372036854775808]}',
    b'{"instances": [18446744073709551616, 123456789012345678901234567890]}',
    b'{"instances": [NaN, Infinity, -Infinity]}',
    b'{"instances": [1e999]}',
    b'{"instances": [1e-400, 4.9e-324, 2.2250738585072011e-308, 0.1, 1.7976931348623157e308]}',
    b'{"a": 1, "a": 2, "b": {"c": [], "c": {}}, "": null, "t": true, "f": false}',
    '{"text": "Größe \\u00e9 \\ud83d\\ude00 \\n", "ключ": "\\u0000"}'.encode(),
    b'{"lone": "\\ud800"}',
    b'{"lone": "\\udc00\\ud800"}',
    b'{"raw": "\xff\xfe"}',
    b'{"control": "a\x01b"}',
    b'{"newline": "a\nb"}',
    b'\xef\xbb\xbf{"mark": 1}',
    b' {"space": 1} \n',
    b'{"space" : [ 1 ,\t2 ]}\r\n ',
    b'{"tail": 1} x',
    b'{"tail": 1}{"more": 2}',
    b'{"zero": 1}\x00',
    b'{"comma": [1,]}',
    b'{"comma": 1,}',
    b"{'quote': 1}",
    b'{"number": 01}',
    b'{"number": 1.}',
    b'{"number": .5}',
    b'{"number": +1}',
    b'{"number": 0x1}',
    b'{"open": [1, 2',
    b'{"open": "abc',
    b"{",
    b"{}",
    b"[1, 2]",
    b"1",
    b'"text"',
    b"",
    b'{"deep": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"deep": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"deep": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"deep": ' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}",
]


def read(parse: Any, raw: bytes) -> str:
    """What it gives, with the type of every part; or its error."""
    try:
        return repr(parse(raw))
    except ServeError as error:
        return f"{error.code}: {error.message}"


@pytest.mark.parametrize("raw", TEXTS, ids=range(len(TEXTS)))
def test_it_reads_what_the_other_reads_and_refuses_the_same(raw: bytes) -> None:
    quick = QuickJson()

    assert read(quick.parse, raw) == read(parse_json, raw)
    assert quick.parse(b'{"instances": [1.0]}') == {"instances": [1.0]}  # and goes on


def value(chance: random.Random, depth: int) -> Any:
    kinds = ["int", "float", "text", "none", "true"] + ["list", "dict"] * (depth > 0)
    kind = chance.choice(kinds)
    if kind == "list":
        return [value(chance, depth - 1) for _ in range(chance.randrange(5))]
    if kind == "dict":
        return {
            chance.choice("abcé") * chance.randrange(3): value(chance, depth - 1)
            for _ in range(chance.randrange(5))
        }
    return {
        "int": chance.randrange(-(2**66), 2**66) >> chance.randrange(66),
        "float": chance.uniform(-1, 1) * 10.0 ** chance.randrange(-320, 308),
        "text": "".join(chr(chance.randrange(1, 0xD7FF)) for _ in range(chance.randrange(4))),
        "none": None,
        "true": chance.random() < 0.5,
    }[kind]


def test_it_reads_whatever_is_written_and_whatever_is_left_of_it() -> None:
    chance, quick = random.Random(3), QuickJson()
    refused = 0
    for _ in range(3000):
        raw = json.dumps(
            {"instances": value(chance, 4)}, ensure_ascii=chance.random() < 0.5
        ).encode()
        if chance.random() < 0.5:  # a byte of it is another
            place = chance.randrange(len(raw))
            raw = raw[:place] + bytes((chance.choice(b'{}[]",:0eE-.\x00\xff '),)) + raw[place + 1 :]

        wanted = read(parse_json, raw)

        assert read(quick.parse, raw) == wanted
        refused += wanted.startswith("Code") or wanted[0].isdigit()
    assert refused > 300  # or nothing damaged was tried
