"""REST bodies of every form against a reference decoder, which reads them value by value.

The reference follows TensorFlow Serving's rules (`json_tensor.cc`) as plainly as it can: no short cuts, no
NumPy before the last line. What it takes must be read to the same bits by every reader of a body; what it
refuses must be refused, with an error and nothing else.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.core.errors import UserError
from stoker.registry.exported_model import Signature, TensorSpec
from stoker.serve.errors import ServeError
from stoker.serve.rest import decode, numbers
from stoker.serve.rest.json_text import QuickJson, parse_json

EXAMPLES = int(os.environ.get("STOKER_FUZZ_EXAMPLES", "1000"))
"""About 15 s; `make soak` sets more."""

INTEGERS = {
    "int8": (-(2**31), 2**31 - 1),
    "uint8": (-(2**31), 2**31 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}
NARROW = {"int8": (-128, 127), "uint8": (0, 255)}
"""TensorFlow Serving cuts these out of 32 bits; a value that does not fit is refused here."""


class HttpError(Exception):
    """The reference refuses a body."""


def reference(raw: bytes, inputs: Mapping[str, str]) -> dict[str, tuple[str, Any, Any]]:
    """Input name -> dtype, shape, values; by the rules, one after the other."""
    try:
        body = json.loads(raw.decode(), parse_float=in_double, parse_int=whole)
    except (ValueError, RecursionError) as error:
        raise HttpError from error
    if not isinstance(body, dict) or not isinstance(body.get("signature_name", ""), str):
        raise HttpError
    if ("instances" in body) == ("inputs" in body):
        raise HttpError
    if "instances" in body:
        columns = of_rows(body["instances"], inputs)
    else:
        columns = of_columns(body["inputs"], inputs)
    return {name: tensor(value, inputs[name]) for name, value in columns.items()}


def in_double(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError
    return number


def whole(text: str) -> int:
    in_double(text)
    return int(text)


def is_bytes(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["b64"] and isinstance(value["b64"], str)


def is_named(value: Any) -> bool:
    return isinstance(value, dict) and not is_bytes(value)


def of_rows(rows: Any, inputs: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(rows, list) or not rows:
        raise HttpError
    if len({is_named(row) for row in rows}) > 1:
        raise HttpError
    if not is_named(rows[0]):
        if len(inputs) > 1:
            raise HttpError
        return {next(iter(inputs)): rows}
    if any(row.keys() != inputs.keys() for row in rows):
        raise HttpError
    return {name: [row[name] for row in rows] for name in inputs}


def of_columns(value: Any, inputs: Mapping[str, str]) -> dict[str, Any]:
    if not is_named(value):
        if len(inputs) > 1:
            raise HttpError
        return {next(iter(inputs)): value}
    if inputs.keys() - value.keys():
        raise HttpError
    return {name: value[name] for name in inputs}


def tensor(value: Any, dtype: str) -> tuple[str, tuple[int, ...], list[Any]]:
    shape, first = [], value
    while isinstance(first, list):
        shape.append(len(first))
        first = first[0] if first else None
    flat: list[Any] = []
    fill(value, 0, tuple(shape), dtype, flat)
    return dtype, tuple(shape), flat


def fill(value: Any, level: int, shape: tuple[int, ...], dtype: str, flat: list[Any]) -> None:
    if not isinstance(value, list):
        if level != len(shape):
            raise HttpError
        flat.append(scalar(value, dtype))
    elif level >= len(shape) or len(value) != shape[level]:
        raise HttpError
    else:
        for item in value:
            fill(item, level + 1, shape, dtype, flat)


def scalar(value: Any, dtype: str) -> Any:
    if dtype == "string":
        if isinstance(value, str):
            try:
                return value.encode()
            except UnicodeEncodeError as error:
                raise HttpError from error
        if is_bytes(value):
            return unescaped(value["b64"])
        raise HttpError
    if dtype == "bool":
        if isinstance(value, bool):
            return value
        raise HttpError
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise HttpError
    if dtype in ("float32", "float64"):
        return float(value)
    low, high = NARROW.get(dtype, INTEGERS[dtype])
    if not isinstance(value, int) or not low <= value <= high:
        raise HttpError
    return value


def unescaped(text: str) -> bytes:
    """Base64 as Abseil reads it, one character after the other."""
    text = "".join(c for c in text if c not in " \t\n\v\f\r")
    body = text.rstrip("=.")
    padding = len(text) - len(body)
    if not re.fullmatch("[A-Za-z0-9+/]*", body) or len(body) % 4 == 1:
        raise HttpError
    if padding not in (0, -len(body) % 4):
        raise HttpError
    return base64.b64decode(body + "=" * (-len(body) % 4))


def bits(array: np.ndarray[Any, Any]) -> tuple[str, tuple[int, ...], Any]:
    if array.dtype == object:
        return "string", array.shape, array.reshape(-1).tolist()
    return array.dtype.name, array.shape, array.tobytes()


def wanted_bits(found: tuple[str, Any, Any]) -> tuple[str, tuple[int, ...], Any]:
    dtype, shape, flat = found
    if dtype == "string":
        return dtype, shape, flat
    with np.errstate(over="ignore"):
        array = np.array(flat, np.float64 if dtype.startswith("float") else dtype)
        return dtype, shape, array.astype(dtype).tobytes()


NUMBERS = st.one_of(
    st.integers(-300, 300),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(width=32),
    st.sampled_from([0, -0.0, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, 1e39, 1e-46, 5e-324]),
)
TEXTS = st.one_of(
    st.text(max_size=6),
    st.text("ABab01+/=. \n-_", max_size=9),
    st.binary(max_size=5).map(lambda b: base64.b64encode(b).decode()),
)
SCALARS = st.one_of(
    NUMBERS,
    st.booleans(),
    st.none(),
    TEXTS,
    TEXTS.map(lambda text: {"b64": text}),
    st.sampled_from([{"b64": 1}, {"b64": "AA==", "x": 1}, {}, [], [[]], "NaN"]),
)
OF_DTYPE = {
    "string": st.one_of(
        st.text(max_size=6), st.binary(max_size=5).map(lambda b: {"b64": encoded(b)})
    ),
    "bool": st.booleans(),
    "float32": NUMBERS,
    "float64": NUMBERS,
    "int8": st.integers(-128, 127),
    "uint8": st.integers(0, 255),
    "int32": st.sampled_from([0, 1, 2**31 - 1, -(2**31)]),
    "int64": st.sampled_from([0, 1, 2**63 - 1, -(2**63)]),
    "uint32": st.sampled_from([0, 1, 2**32 - 1]),
    "uint64": st.sampled_from([0, 1, 2**64 - 1]),
}
"""Values that a dtype takes."""

ODD = st.one_of(
    SCALARS, st.sampled_from([-129, 128, -1, 256, 2**31, 2**32, 2**63, -(2**63) - 1, 2**64])
)


def encoded(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


@st.composite
def tensors(draw: Any, dtype: str, shape: list[int]) -> Any:
    """A nested list, dense as a rule; now and then a value is of another kind, or too much."""
    odd = draw(st.integers(0, 9)) == 0

    def nested(level: int) -> Any:
        if level == len(shape):
            is_odd = odd and draw(st.integers(0, 3)) == 0
            return draw(ODD if is_odd else OF_DTYPE[dtype])
        ragged = odd and draw(st.integers(0, 9)) == 0
        return [nested(level + 1) for _ in range(shape[level] + ragged)]

    return nested(0)


@st.composite
def bodies(draw: Any) -> tuple[dict[str, str], bytes]:
    """A signature's inputs, and a body for it: right as a rule."""
    names = draw(st.sampled_from([["x"], ["x"], ["x", "y"]]))
    inputs = {name: draw(st.sampled_from(sorted(OF_DTYPE))) for name in names}
    shapes = {name: draw(st.lists(st.integers(1, 3), max_size=2)) for name in names}
    form = draw(st.sampled_from(["rows", "columns", "plain", "plain", "odd"]))
    value: Any
    if form == "rows":
        key, count = "instances", draw(st.integers(1, 3))
        value = [
            {name: draw(tensors(dtype, shapes[name])) for name, dtype in inputs.items()}
            for _ in range(count)
        ]
        if draw(st.integers(0, 9)) == 0:
            value[-1] = draw(SCALARS)
    elif form == "columns":
        key = "inputs"
        value = {name: draw(tensors(dtype, shapes[name])) for name, dtype in inputs.items()}
        if draw(st.integers(0, 9)) == 0:
            value[draw(st.sampled_from(["x", "z"]))] = draw(SCALARS)
    else:
        key = draw(st.sampled_from(["instances", "inputs"]))
        shape = [draw(st.integers(1, 3)), *shapes["x"]]
        value = draw(tensors(inputs["x"], shape) if form == "plain" else SCALARS)
    body = {key: value} | draw(
        st.sampled_from([{}, {}, {}, {"signature_name": "s"}, {"other": [1]}])
    )
    if draw(st.integers(0, 30)) == 0:
        body |= draw(st.sampled_from([{"instances": [1], "inputs": [1]}, {"signature_name": 1}]))
    text = json.dumps(
        body, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1]))
    )
    if draw(st.integers(0, 15)) == 0:  # a character of it is gone, or another
        at = draw(st.integers(0, len(text) - 1))
        text = (
            text[:at]
            + draw(st.sampled_from(["", "0", '"', "]", "}", "e5", "9" * 310]))
            + text[at + 1 :]
        )
    return inputs, text.encode(errors="surrogatepass")


def read(raw: bytes, signature: Signature, parse: Any) -> dict[str, np.ndarray[Any, Any]]:
    return decode.read_inputs(decode.parse_body(raw, parse=parse), signature)


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(bodies())
def test_a_body_is_read_as_the_reference_reads_it_or_refused(
    sent: tuple[dict[str, str], bytes],
) -> None:
    inputs, raw = sent
    specs = {name: TensorSpec(dtype=dtype, shape=None) for name, dtype in inputs.items()}
    signature = Signature(inputs=specs, outputs={}, method="")
    try:
        wanted = {name: wanted_bits(found) for name, found in reference(raw, inputs).items()}
    except HttpError:
        wanted = None
    readers = {"plain": parse_json, "quick": QuickJson().parse}

    for reader, parse in readers.items():
        try:
            found = {name: bits(array) for name, array in read(raw, signature, parse).items()}
        except (UserError, ServeError):
            found = None
        assert found == wanted, reader

    large = raw + b" " * numbers.MIN_BYTES
    quickly = numbers.read_numbers(large)
    arrays = None if quickly is None else quickly.as_inputs(signature)
    if arrays is not None:  # else it is left to the plain reader
        assert {name: bits(array) for name, array in arrays.items()} == wanted
