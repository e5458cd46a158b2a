"""JSON bodies -> arrays, without a model or a server."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from stoker.core.errors import UserError
from stoker.registry.exported_model import Signature, TensorSpec
from stoker.serve.errors import Code, ServeError
from stoker.serve.rest.decode import PredictBody, parse_body, read_inputs, to_array
from stoker.serve.rest.json_text import parse_json
from stoker.serve.rest.tf_serving_errors import tf_serving_error

SHAPES = npst.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=4)
DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]
DTYPES += ["float16", "float32", "float64"]


def spec(dtype: str) -> TensorSpec:
    return TensorSpec(dtype=dtype, shape=None)


def signature(**inputs: str) -> Signature:
    return Signature(
        inputs={name: spec(dtype) for name, dtype in inputs.items()}, outputs={}, method=""
    )


@given(st.sampled_from(DTYPES).flatmap(lambda d: npst.arrays(dtype=d, shape=SHAPES)))
def test_what_json_can_hold_comes_back_to_the_bit(array: np.ndarray[Any, Any]) -> None:
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), np.nan, array).astype(array.dtype)
    text = json.dumps(array.tolist())

    back = to_array(parse_json(text.encode()), name="x", spec=spec(array.dtype.name))

    assert back.dtype == array.dtype
    assert np.array_equal(back, array, equal_nan=array.dtype.kind == "f")


@given(npst.arrays(dtype="float32", shape=npst.array_shapes(min_dims=2, max_dims=3, min_side=2)))
def test_a_list_that_lost_an_element_is_ragged(array: np.ndarray[Any, Any]) -> None:
    nested = array.tolist()
    nested[-1].pop()

    with pytest.raises(UserError, match="must be dense"):
        to_array(nested, name="x", spec=spec("float32"))


@given(st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"])), min_size=1))
def test_text_becomes_utf8(words: list[str]) -> None:
    back = to_array(words, name="x", spec=spec("string"))

    assert back.tolist() == [word.encode() for word in words]


@given(st.binary(max_size=300))
def test_any_bytes_as_a_body_are_read_or_refused(raw: bytes) -> None:
    said = outcome(raw, "float32")

    assert said == "read" or "\n" not in said


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@settings(max_examples=50)
@given(
    st.sampled_from(["instances", "inputs"]), JSON, st.sampled_from(["float32", "int64", "string"])
)
def test_any_json_under_the_right_key_is_read_or_refused(key: str, value: Any, dtype: str) -> None:
    said = outcome(json.dumps({key: value}).encode(), dtype)

    assert said == "read" or "\n" not in said


def outcome(raw: bytes, dtype: str) -> str:
    """ "read", or the one line of the refusal; any other exception is a bug."""
    try:
        arrays = read_inputs(parse_body(raw), signature(x=dtype))
    except UserError as error:
        return error.line()
    except ServeError as error:
        return error.message if error.code is Code.INVALID_ARGUMENT else f"{error.code}\n"
    assert set(arrays) == {"x"}
    return "read"


@pytest.mark.parametrize("text", ["1e309", "-1e400", "1E+999", "9" * 400 + ".5"])
def test_a_number_beyond_a_double_is_not_read_as_infinity(text: str) -> None:
    with pytest.raises(ServeError, match="Number too big"):
        parse_json(f'{{"inputs": [{text}]}}'.encode())


def test_infinity_by_name_is_read() -> None:
    assert parse_json(b"[Infinity, 1e300]") == [math.inf, 1e300]


@pytest.mark.parametrize("dtype", ["complex64", "qint8", "resource", "variant"])
def test_a_dtype_that_json_has_no_form_for_is_refused(dtype: str) -> None:
    with pytest.raises(UserError, match="JSON cannot represent"):
        to_array([1], name="x", spec=spec(dtype))


def test_bfloat16_is_read_and_its_range_held() -> None:
    assert to_array([0.5, -2], name="x", spec=spec("bfloat16")).tolist() == [0.5, -2.0]
    with pytest.raises(UserError, match="1e\\+39"):
        to_array([1e39], name="x", spec=spec("bfloat16"))


def test_rows_become_columns() -> None:
    raw = {"instances": [{"a": 1, "b": "x"}, {"a": 2, "b": {"b64": "eQ=="}}]}

    arrays = read_inputs(parse_body(json.dumps(raw).encode()), signature(a="int64", b="string"))

    assert {name: array.tolist() for name, array in arrays.items()} == {
        "a": [1, 2],
        "b": [b"x", b"y"],
    }


def test_a_plain_list_does_not_feed_a_model_of_several_inputs() -> None:
    for key in ("instances", "inputs"):
        body = parse_body(json.dumps({key: [1.0]}).encode())
        with pytest.raises(UserError, match="several inputs"):
            read_inputs(body, signature(a="float32", b="float32"))
        said = tf_serving_error(body, signature(a="float32", b="float32"))
        assert said is not None
        assert f"{key} is a plain" in said.message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {"instances": [[1.0], "x"]},
            (
                "Failed to process element: 1 of 'instances' list. Error: INVALID_ARGUMENT: "
                'JSON Value: "x" Type: String is not of expected type: float'
            ),
        ),
        (
            {"instances": [{"x": [1.0]}, {"x": [1.0, 2.0]}]},
            (
                "Failed to process element: 1 key: x of 'instances' list. Error: INVALID_ARGUMENT: "
                "Expecting tensor size: 1 but got: 2"
            ),
        ),
        (
            {"instances": [{"x": [[1.0]]}, {"x": [1.0]}]},
            (
                "Failed to process element: 1 key: x of 'instances' list. Error: INVALID_ARGUMENT: "
                "Expecting shape [1,1] but got: [1]"
            ),
        ),
        (
            {"instances": [{"y": 1.0}]},
            (
                "Failed to process element: 0 key: y of 'instances' list. Error: INVALID_ARGUMENT: "
                "JSON object: does not have named input: y"
            ),
        ),
        (
            {"instances": [{}]},
            (
                "Failed to process element: 0 of 'instances' list. JSON object: {} "
                "keys must be equal to: x"
            ),
        ),
        (
            {"instances": [{"x": 1.0}, [1.0]]},
            "Expecting object but got list at item 1 of input list",
        ),
        (
            {"instances": [[1.0], {"x": 1.0}]},
            "Expecting value/list but got object at item 1 of input list",
        ),
        ({"inputs": {"y": [1.0]}}, "Missing named input: x in 'inputs' object."),
        (
            {"inputs": [[1.0], [1.0, 2.0]]},
            "Encountered list at unexpected size: 2 at level: 1 expected size: 1",
        ),
        (
            {"inputs": [[1.0], 1.0]},
            "JSON Value: 1.0 found at incorrect level: 2 in the JSON DOM. Expected at level: 2",
        ),
        ({"inputs": [1.0, [1.0]]}, "Encountered list at unexpected level: 1 expected < 1"),
        ({"inputs": [None]}, "JSON Value: null Type: Null is not of expected type: float"),
    ],
)
def test_a_refusal_is_in_tensorflow_servings_words(body: Any, words: str) -> None:
    read = parse_body(json.dumps(body).encode())

    with pytest.raises((UserError, ServeError)):
        read_inputs(read, signature(x="float32"))
    said = tf_serving_error(read, signature(x="float32"))

    assert said is not None
    assert said.message == words


@given(JSON, st.sampled_from(["float32", "int64", "string", "bool"]))
def test_what_is_read_is_not_refused_in_words(value: Any, dtype: str) -> None:
    body = parse_body(json.dumps({"inputs": value}).encode())
    try:
        read_inputs(body, signature(x=dtype))
    except (UserError, ServeError):
        return

    assert tf_serving_error(body, signature(x=dtype)) is None


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "JSON Parse error: The document is empty"),
        (b" ", "JSON Parse error: The document is empty. at offset: 1"),
        (b"[", "JSON Parse error: Invalid value. at offset: 1"),
        (b'{"a" 1}', "JSON Parse error: Missing a colon after a name of object member."),
        (b'{"a": 1', "JSON Parse error: Missing a comma or } after an object member."),
        (b"[1 2]", "JSON Parse error: Missing a comma or ] after an array element."),
        (b"{1: 2}", "JSON Parse error: Missing a name for object member. at offset: 1"),
        (b"{} {}", "JSON Parse error: The document root must not be followed by other values."),
        (b'"a', "JSON Parse error: Missing a closing quotation mark in string."),
    ],
)
def test_a_parse_error_is_in_rapidjsons_words(raw: bytes, words: str) -> None:
    with pytest.raises(ServeError) as caught:
        parse_json(raw)

    assert caught.value.message.startswith(words)


def test_a_body_of_very_many_values_is_refused_without_going_through_it() -> None:
    body = PredictBody(signature="", rows=False, value=[[1.0] * 1000] * 1000 + [["x"] * 1000])

    with pytest.raises(UserError, match="float32"):
        read_inputs(body, signature(x="float32"))
    assert tf_serving_error(body, signature(x="float32")) is None


def test_keys_under_inputs_that_are_not_an_input_are_ignored() -> None:
    body = parse_body(b'{"inputs": {"x": [1.0], "other": "y"}}')

    assert read_inputs(body, signature(x="float32"))["x"].tolist() == [1.0]
