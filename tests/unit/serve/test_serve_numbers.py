"""Large bodies of numbers: read to the bit as the plain reader reads them, or left to it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from stoker.core.errors import UserError
from stoker.export.callpath import Signature, TensorSpec
from stoker.serve.errors import ServeError
from stoker.serve.rest import numbers
from stoker.serve.rest.decode import parse_body, read_inputs
from stoker.serve.rest.numbers import MIN_BYTES, read_numbers

DTYPES = ["float32", "float64", "int8", "int32", "int64", "uint8", "uint32"]
SHAPES = npst.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=4)


def signature(dtype: str, *names: str) -> Signature:
    spec = TensorSpec(dtype=dtype, shape=None)
    return Signature(inputs=dict.fromkeys(names or ("x",), spec), outputs={}, method="")


@pytest.fixture(autouse=True, scope="module")
def of_any_size() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbers, "MIN_BYTES", 0)
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

    largest = {"float32": 2.0**24 - 1, "float64": 2.0**53 - 1}.get(array.dtype.name)
    if largest is None or np.all(np.abs(array) <= largest):
        assert found is not None, "it is plain"
        assert wanted is not None
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        assert found.tobytes() == wanted.tobytes()
    else:
        assert found is None


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
        b'{"instances": [16777217]}',
        b'{"instances": [1e39]}',
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
