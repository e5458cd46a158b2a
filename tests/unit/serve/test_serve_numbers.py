"""Large bodies of numbers: read to the bit as the plain reader reads them, or left to it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import simdjson
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from stoker.core.errors import UserError
from stoker.registry.exported_model import Signature, TensorSpec
from stoker.serve.errors import ServeError
from stoker.serve.rest import numbers, v2
from stoker.serve.rest.decode import parse_body, read_inputs
from stoker.serve.rest.json_text import parse_json
from stoker.serve.rest.numbers import MIN_BYTES, NumberList, read_lists, read_numbers

DTYPES = ["float32", "float64", "int8", "int32", "int64", "uint8", "uint32"]
SHAPES = npst.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=4)


def signature(dtype: str, *names: str) -> Signature:
    spec = TensorSpec(dtype=dtype, shape=None)
    return Signature(inputs=dict.fromkeys(names or ("x",), spec), outputs={}, method="")


@pytest.fixture(autouse=True, scope="module")
def of_any_size() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbers, "MIN_BYTES", 0)
        patch.setattr(numbers, "_MIN_LIST_BYTES", 0)
        yield


def plainly(raw: bytes, dtype: str) -> np.ndarray[Any, Any] | None:
    """What the plain reader makes of a body; None where it refuses it."""
    try:
        return read_inputs(parse_body(raw), signature(dtype))["x"]
    except (UserError, ServeError):
        return None


def quickly(raw: bytes, dtype: str) -> np.ndarray[Any, Any] | None:
    found = read_numbers(raw)
    inputs = None if found is None else found.as_inputs(signature(dtype))
    return None if inputs is None else inputs["x"]


@given(
    st.sampled_from(DTYPES).flatmap(lambda d: npst.arrays(dtype=d, shape=SHAPES)),
    st.sampled_from(["instances", "inputs"]),
    st.sampled_from([None, (",", ":"), (" ,\n", " : ")]),
)
def test_what_is_read_is_what_the_plain_reader_reads(
    array: np.ndarray[Any, Any], key: str, separators: Any
) -> None:
    raw = json.dumps({"signature_name": "s", key: array.tolist()}, separators=separators).encode()
    found, wanted = quickly(raw, array.dtype.name), plainly(raw, array.dtype.name)

    if not np.all(np.isfinite(array)):
        assert found is None
        return
    assert found is not None, "it is plain"
    assert wanted is not None
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.integers(-3, 300), st.floats(-2, 2)
)
ODD = st.recursive(
    NUMBERS | st.booleans() | st.none() | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=10,
)


@given(st.lists(ODD, max_size=4), st.sampled_from([*DTYPES, "string", "bool", "float16"]))
def test_nothing_is_read_that_the_plain_reader_refuses_or_reads_otherwise(
    value: list[Any], dtype: str
) -> None:
    raw = json.dumps({"instances": value}).encode()
    found, wanted = quickly(raw, dtype), plainly(raw, dtype)

    if found is not None:
        assert wanted is not None
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    "body",
    [
        b'{"instances": [1.0], "instances": [2.0]}',
        b'{"instances": [1.0], "inputs": [2.0]}',
        b'{"instances": [1.0], "other": 1}',
        b'{"instances": [1.0], "signature_name": 3}',
        b'{"signature_name": "[s", "instances": [1.0]}',
        b'{"instances": [[1.0], [2.0, 3.0]]}',
        b'{"instances": [[1.0], 2.0]}',
        b'{"instances": [1.0, [2.0]]}',
        b'{"instances": [[1.0, 2.0], []]}',
        b'{"instances": []}',
        b'{"instances": [[]]}',
        b'{"instances": 1.0}',
        b'{"instances": [1e999]}',
        b'{"instances": [NaN]}',
        b'{"instances": [1.0]',
        b'{"instances": [1.0]} x',
        b'\xef\xbb\xbf{"instances": [1.0]}',
        b"[1.0]",
        b"",
        b'{"instances": ' + b"[" * 40 + b"1.0" + b"]" * 40 + b"}",
        b'{"instances": ' + b"[" * 2000 + b"1.0" + b"]" * 2000 + b"}",
    ],
)
def test_what_is_not_plain_is_left_to_the_plain_reader(body: bytes) -> None:
    assert quickly(body, "float32") is None


def test_a_model_of_several_inputs_is_left_to_it_too() -> None:
    found = read_numbers(b'{"inputs": [1.0]}')
    assert found is not None
    assert found.as_inputs(signature("float32", "a", "b")) is None


def test_a_small_body_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "MIN_BYTES", MIN_BYTES)
    body = b'{"instances": [1.0]}'
    assert read_numbers(body) is None
    assert read_numbers(body + b" " * MIN_BYTES) is not None


BIG = json.dumps({"instances": [[float(i), 0.5] for i in range(4000)]}).encode()


def test_a_parser_is_used_again_though_what_it_read_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[simdjson.Parser] = []
    real = simdjson.Parser

    def make() -> simdjson.Parser:
        made.append(real())
        return made[-1]

    monkeypatch.setattr(simdjson, "Parser", make)
    numbers._spare.clear()
    kept = [read_numbers(b'{"inputs": [%d, 2.5]}' % i) for i in range(50)]
    assert read_numbers(b'{"inputs": ["a"]}') is None

    assert len(made) <= 2, "one for all, and one more where an error ended it"
    values = [one.values.wide.tolist() for one in kept if one is not None]
    assert values == [[float(i), 2.5] for i in range(50)]


def test_few_parsers_are_kept_and_none_that_read_a_huge_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers._spare.clear()
    monkeypatch.setattr(numbers, "_MAX_KEPT_BYTES", len(BIG) - 1)
    assert read_numbers(BIG) is not None
    assert not numbers._spare

    inside = threading.Barrier(8)

    def together(document: Any, _raw: bytes) -> int:
        inside.wait(30)
        return len(document)

    found: list[int | None] = []
    run_in_threads(lambda: found.append(numbers._parsed(b"[1, 2]", together)), 8)
    assert found == [2] * 8, "each had a parser of its own"
    assert len(numbers._spare) == numbers._MAX_SPARE


def run_in_threads(call: Callable[[], object], count: int) -> None:
    threads = [threading.Thread(target=call) for _ in range(count)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
        assert not one.is_alive()


def test_threads_that_read_at_once_read_their_own() -> None:
    wrong: list[object] = []
    turn = iter(range(8))

    def read() -> None:
        own = next(turn)
        raw = json.dumps({"inputs": [[own + 0.5] * 3] * 400}).encode()
        for _ in range(100):
            one = quickly(raw, "float32")
            broken = read_numbers(raw[:-9])
            if one is None or broken is not None or not np.all(one == own + 0.5):
                wrong.append(one)

    run_in_threads(read, 8)
    assert wrong == []


def tensor(data: Any, datatype: str = "FP32", shape: Any = None, **more: Any) -> dict[str, Any]:
    """One input; a text as `data` is JSON already."""
    return {"name": "x", "datatype": datatype, "shape": shape or [2], **more, "data": data}


def text_of(*inputs: dict[str, Any]) -> bytes:
    """The JSON of a body, its `data` put in as it is written."""
    said = []
    for one in inputs:
        head = json.dumps({name: value for name, value in one.items() if name != "data"})
        written = one.get("data")
        said.append(head if written is None else f'{head[:-1]}, "data": {written}}}')
    return f'{{"id": "1", "inputs": [{", ".join(said)}], "outputs": []}}'.encode()


def outcome_of(read: Callable[[bytes], Any], raw: bytes, tail: bytes = b"") -> Any:
    """What one of the two ways makes of a body: name -> dtype, shape and bytes; or the error."""
    try:
        found = v2._inputs(v2._object(read(raw), "the body").get("inputs"), memoryview(tail))
        arrays = {one.name: one.array() for one in found}
    except UserError as error:
        return "UserError", error.line()
    except ServeError as error:
        return "ServeError", error.message
    return {name: (str(a.dtype), a.shape, _bits(a)) for name, a in arrays.items()}


def _bits(array: np.ndarray[Any, Any]) -> Any:
    return array.tolist() if array.dtype == object else array.tobytes()


def both(raw: bytes, tail: bytes = b"") -> Any:
    """The answer, which has to be the same by either way."""
    by_lists = outcome_of(lambda text: read_lists(text) or parse_json(text), raw, tail)
    assert by_lists == outcome_of(parse_json, raw, tail)
    return by_lists


WRITTEN = st.one_of(
    NUMBERS.map(json.dumps),
    st.sampled_from(["-0", "-0.0", "1e2", "1E+2", "-1.5e-3", "2.0", "1e-400", "5e-324", "1e39"]),
    st.sampled_from([str(2**n + d) for n in (8, 24, 31, 53, 63, 64) for d in (-1, 0, 1)]),
    st.sampled_from([f"{2**24 + 1}.0", "16777216.0", "1e999", "NaN", "-Infinity", "01", "+1"]),
    st.sampled_from(
        ['"a"', '"]"', "true", "null", "[]", "{}", '{"data": [1]}', ".5", "1.", '"\\u0041"']
    ),
)
PLAIN = st.one_of(
    st.integers(-300, 300).map(str),
    st.floats(-2, 2).map(json.dumps),
    st.sampled_from(["-0", "-0.0", "1e2", "16777215", "255"]),
)


@st.composite
def written_lists(draw: Any, values: Any) -> tuple[str, int]:
    """A list as JSON, flat or of two levels, and how many values it has."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    flat = draw(st.lists(values, min_size=rows * columns, max_size=rows * columns))
    comma = draw(st.sampled_from([",", ", ", " \n,\t"]))
    if draw(st.booleans()):
        return f"[{comma.join(flat)}]", len(flat)
    parts = [comma.join(flat[i : i + columns]) for i in range(0, len(flat), columns)]
    return f"[{comma.join(f'[{part}]' for part in parts)}]", len(flat)


DATATYPES = [
    "FP32",
    "FP64",
    "FP16",
    "BF16",
    "INT8",
    "INT32",
    "INT64",
    "UINT8",
    "UINT64",
    "BOOL",
    "BYTES",
]


@given(
    st.lists(
        st.tuples(
            st.one_of(written_lists(PLAIN), written_lists(WRITTEN)), st.sampled_from(DATATYPES)
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([0, 0, 0, 1]),
    st.booleans(),
)
def test_tensors_in_lists_are_read_or_refused_as_by_the_plain_reader(
    sent: list[tuple[tuple[str, int], str]], odd: int, has_binary: bool
) -> None:
    inputs = [
        tensor(data, datatype, [count + odd], name=f"x{number}")
        for number, ((data, count), datatype) in enumerate(sent)
    ]
    tail = b""
    if has_binary:
        binary = tensor(None, "INT16", [2], name="b", parameters={"binary_data_size": 4})
        inputs.insert(len(inputs) // 2, binary)
        tail = b"\x01\x00\x02\x00"
    both(text_of(*inputs), tail)


@given(written_lists(PLAIN), st.sampled_from(["FP32", "FP64"]))
def test_plain_lists_of_numbers_are_read_quickly(sent: tuple[str, int], datatype: str) -> None:
    data, count = sent
    raw = text_of(tensor(data, datatype, [count]))
    body = read_lists(raw)

    assert body is not None
    assert isinstance(body["inputs"][0]["data"], NumberList)
    assert body["id"] == "1"
    assert isinstance(both(raw), dict), "it is not an error"


@pytest.mark.parametrize(
    "raw",
    [
        text_of(tensor("[[1], [2, 3]]", shape=[3])),
        text_of(tensor("[1, [2]]")),
        text_of(tensor("[[1], 2]")),
        text_of(tensor("[[[1]], [2]]")),
        text_of(tensor("[]", shape=[0])),
        text_of(tensor("[[], [1, 2]]")),
        text_of(tensor("[1, 2] ]")),
        text_of(tensor("[1, 2],")),
        text_of(tensor("[1, 2")),
        text_of(tensor("[1, 2,]")),
        text_of(tensor("[" * 34 + "1" + "]" * 34, shape=[1])),
        text_of(tensor("[" * 33 + "1" + "]" * 33, shape=[1])),
        text_of(tensor("[" * 2000 + "1" + "]" * 2000, shape=[1])),
        text_of(tensor('[1, 2], "data": [3, 4]')),
        text_of(tensor('[1, 2], "data": 5')),
        text_of(tensor('"[1, 2]"')),
        text_of(tensor('"stoker:numbers:0"')),
        text_of(tensor('[1, 2], "note": "stoker:numbers:0"')),
        text_of(tensor('"stoker\\u003anumbers:0", "y": {"data": [1, 2]}')),
        text_of(tensor('[1, 2], "data": "stoker\\u003anumbers:0"')),
        text_of(tensor('[1, 2], "data": "stoker:numbers:0"')),
        text_of(tensor('"stoker:numbers:0"', name="w"), tensor("[1, 2]")),
        text_of(tensor('[1, 2], "x\\"data": [3, 4]')),
        text_of(tensor('[1, 2], "parameters": {"data": [3, 4]}')),
        text_of(tensor('[1, 2], "parameters": {"binary_data_size": 0}')),
        text_of(tensor("[1, 2]"), tensor("[3, 4]")),
        text_of(tensor("[1, 2]", "FP31")),
        text_of(tensor("[1, 2]", shape=[2, 2])),
        text_of(tensor("[1, 2]", shape=[-1])),
        text_of(tensor("[1, 2]", shape=[True])),
        text_of(tensor("[1, 2]", name="")),
        b'{"inputs": {"data": [1, 2]}}',
        b'{"inputs": [[{"data": [1, 2]}]]}',
        b'{"data": [1, 2], "inputs": []}',
        b'[{"data": [1, 2]}]',
        b'{"data": [1, 2]',
        b'\xff{"inputs": [{"data": [1, 2]}]}',
        b"\xef\xbb\xbf" + text_of(tensor("[1, 2]")),
        text_of(tensor("[1, 2]")) + b"x",
        text_of(tensor("[1, 2]")).replace(b'"1"', b'"\xff"'),
        text_of(tensor("[1, 2]")).replace(b'"inputs"', b'"inputs": [], "inputs"'),
        text_of(tensor("[1, 2]")).replace(b'"outputs"', b'"inputs"'),
    ],
)
def test_bodies_of_tensors_that_are_odd_are_read_or_refused_alike(raw: bytes) -> None:
    both(raw)
    both(raw, b"tail")


@pytest.mark.parametrize(
    "raw",
    [
        text_of(tensor('[1, 2], "data": [3, 4]')),
        text_of(tensor('[1, 2], "parameters": {"data": [3, 4]}')),
        text_of(tensor("[1, 2]")).replace(b'"outputs": [', b'"outputs": [{"data": [1, 2]}'),
        text_of(tensor("[1, 2]")).replace(b'"inputs"', b'"data": [1, 2], "inputs"'),
    ],
)
def test_a_list_that_is_not_an_input_leaves_the_body_to_the_plain_reader(raw: bytes) -> None:
    assert read_lists(raw) is None
    both(raw)


def test_a_small_body_of_tensors_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "MIN_BYTES", MIN_BYTES)
    body = text_of(tensor("[1, 2]"))
    assert read_lists(body) is None
    assert read_lists(body + b" " * MIN_BYTES) is not None
