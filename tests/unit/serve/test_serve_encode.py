"""Arrays -> the JSON text of an answer."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as npst

from stoker.core.errors import UserError
from stoker.serve.rest.encode import columns, number_texts, predictions

FLOATS = npst.arrays(
    dtype="float32", shape=npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)
)


@given(FLOATS)
def test_a_float_reads_back_as_the_same_float(array: np.ndarray[Any, Any]) -> None:
    back = np.array(json.loads(columns({"y": array}))["outputs"], dtype=np.float32)

    assert np.array_equal(back.reshape(array.shape), array, equal_nan=True)


@given(npst.arrays(dtype="float64", shape=5))
def test_a_double_reads_back_as_the_same_double(array: np.ndarray[Any, Any]) -> None:
    back = np.array(json.loads(columns({"y": array}))["outputs"], dtype=np.float64)

    assert np.array_equal(back, array, equal_nan=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.2, "0.2"),
        (2.0, "2.0"),
        (-0.0, "-0.0"),
        (9_000_000.0, "9e+06"),
        (0.00003, "3e-05"),
        (1 / 3, "0.333333343"),
        (16777216.0, "16777216.0"),
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        (float("-inf"), "-Infinity"),
    ],
)
def test_float_text_is_tensorflow_servings(value: float, text: str) -> None:
    assert number_texts(np.array([value], np.float32)) == [text]


def test_half_precision_and_bfloat16_are_numbers() -> None:
    assert number_texts(np.array([0.5, -2.0], np.float16)) == ["0.5", "-2.0"]
    assert number_texts(np.array([0.5, -2.0], ml_dtypes.bfloat16)) == ["0.5", "-2.0"]


def test_one_output_is_bare_and_several_are_named() -> None:
    one = {"y": np.array([[1], [2]])}
    several = {**one, "z_bytes": np.array([b"a", b"\xff"], dtype=object)}

    assert predictions(one) == '{"predictions": [[1], [2]]}'
    assert columns(one) == '{"outputs": [[1], [2]]}'
    assert json.loads(predictions(several)) == {
        "predictions": [
            {"y": [1], "z_bytes": {"b64": "YQ=="}},
            {"y": [2], "z_bytes": {"b64": "/w=="}},
        ]
    }


def test_strings_are_escaped_and_bytes_that_are_not_text_come_as_base64() -> None:
    array = np.array([b'"\n', "ö".encode(), b"\xff"], dtype=object)

    assert json.loads(columns({"y": array}))["outputs"] == ['"\n', "ö", {"b64": "/w=="}]


@pytest.mark.parametrize(
    "outputs", [{"y": np.float32(1.0).reshape(())}, {"y": np.zeros(2), "z": np.zeros(3)}]
)
def test_outputs_without_common_rows_ask_for_columns(outputs: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="Send 'inputs'"):
        predictions(outputs)


def test_a_complex_output_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="complex64, output 'y'"):
        columns({"y": np.zeros(1, np.complex64)})
