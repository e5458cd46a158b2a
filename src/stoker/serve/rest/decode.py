"""Decodes JSON bodies: `:predict` to arrays of the signature's dtypes, `:classify` and `:regress` to Examples.

If a `:predict` body is refused, `tf_serving_errors` finds TensorFlow Serving's error message.

Source: TensorFlow Serving, RESTful API, "Predict API". Its `json_tensor` is as strict: a string or a boolean is not a
number, and 2.0 is not an integer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensorflow.core.example import example_pb2, feature_pb2

from stoker.core.errors import Plain, UserError
from stoker.registry.exported_model import Signature, TensorSpec, dtype_name, shape_text
from stoker.serve.errors import ServeError
from stoker.serve.rest.json_text import (
    as_object,
    base64_bytes,
    invalid,
    is_b64,
    json_type,
    parse_json,
    parse_object,
    shown,
)

_MAX_RANK = 32
"""Maximum number of axes of a tensor; NumPy allows 64, TensorFlow 254."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictBody:
    """The outer form of a `:predict` body; its tensors are not decoded yet."""

    signature: str
    """The signature's name; empty: the default signature."""

    rows: bool
    """Whether the body has `instances` (one value per row) instead of `inputs` (one value per tensor)."""

    value: Any
    """The value of `instances` or `inputs`."""


def parse_body(raw: bytes, *, parse: Callable[[bytes], Any] = parse_json) -> PredictBody:
    """Decode the outer form of a `:predict` body.

    Args:
        raw: The body.
        parse: Parses JSON as `parse_json` does.

    Raises:
        ServeError: the body is not JSON, or has neither `instances` nor `inputs`.
    """
    body, signature = as_object(parse(raw))
    if "instances" in body and "inputs" in body:
        raise invalid(
            f"JSON Value: {shown(body)} Not formatted correctly expecting only "
            "one of 'inputs' or 'instances' keys to exist "
        )
    if "inputs" in body:
        return PredictBody(signature=signature, rows=False, value=body["inputs"])
    if "instances" not in body:
        raise invalid("Missing 'inputs' or 'instances' key")
    if not isinstance(body["instances"], list):
        raise invalid(f"JSON Value: {shown(body)} Expecting 'instances' to be an list/array")
    if not body["instances"]:
        raise invalid(f"JSON Value: {shown(body)} No values in 'instances' array")
    return PredictBody(signature=signature, rows=True, value=body["instances"])


def read_inputs(body: PredictBody, signature: Signature) -> dict[str, np.ndarray[Any, Any]]:
    """Return input -> array, read from a body, with the dtypes of the signature.

    Raises:
        UserError: an input, which the message names, is missing, unknown, ragged, null, or of another type.
    """
    if body.rows:
        return read_rows(body.value, signature)
    return _arrays(_columns(body, signature), signature)


def read_rows(rows: list[Any], signature: Signature) -> dict[str, np.ndarray[Any, Any]]:
    """Return input -> array, read from the value of `instances` as by `read_inputs`."""
    return _arrays(_columns_of_rows(rows, signature), signature)


def _arrays(columns: Mapping[str, Any], signature: Signature) -> dict[str, np.ndarray[Any, Any]]:
    return {
        name: to_array(value, name=name, spec=signature.inputs[name])
        for name, value in columns.items()
    }


def to_array(value: Any, *, name: str, spec: TensorSpec) -> np.ndarray[Any, Any]:
    """Return a nested list as an array.

    Args:
        value: JSON scalars in lists; all lists of a level must have the same length.
        name: The input's name, for errors.
        spec: Has the dtype; the caller checks the shape.

    Raises:
        UserError: the lists are ragged, or a value does not fit the dtype.
    """
    shape = _dense_shape(value, name)
    flat = _flattened(value, shape)
    if flat is None:
        flat = []
        _flatten(value, shape, 0, flat, name)  # raises the exact error
    return typed(flat, name=name, dtype=spec.dtype).reshape(shape)


def _columns_of_rows(rows: list[Any], signature: Signature) -> dict[str, Any]:
    if dict not in set(map(type, rows)) or not any(map(_is_named, rows)):
        return {_only_input(signature): rows}
    if not _is_named(rows[0]):
        raise UserError("'instances' must hold objects only or values only")
    for row in rows:
        if not _is_named(row) or row.keys() != signature.inputs.keys():
            raise UserError(
                "each of 'instances' must have the keys " + ", ".join(sorted(signature.inputs))
            )
    return {name: [row[name] for row in rows] for name in signature.inputs}


def _columns(body: PredictBody, signature: Signature) -> dict[str, Any]:
    """Return input -> the values of all rows; names that are not inputs are ignored."""
    if not _is_named(body.value):
        return {_only_input(signature): body.value}
    missing = [name for name in signature.inputs if name not in body.value]
    if missing:
        raise UserError("'inputs' must have the key " + missing[0])
    return {name: body.value[name] for name in signature.inputs}


def _only_input(signature: Signature) -> str:
    if len(signature.inputs) > 1:
        raise UserError("a model with several inputs needs objects with the names of the inputs")
    return next(iter(signature.inputs))


def _is_named(value: Any) -> bool:
    """Return whether a value is an object whose keys name tensors; `{"b64": "..."}` is not."""
    return isinstance(value, dict) and not is_b64(value)


def _dense_shape(value: Any, name: str) -> tuple[int, ...]:
    """Return the shape that the first element of every level implies."""
    shape: list[int] = []
    while isinstance(value, list):
        shape.append(len(value))
        if len(shape) > _MAX_RANK:
            raise UserError(f"input {name!r} must have at most {_MAX_RANK} axes", got=len(shape))
        if not value:
            break
        value = value[0]
    return tuple(shape)


def _flattened(value: Any, shape: tuple[int, ...]) -> list[Any] | None:
    """Return the scalars in order; None if the lists of a level differ in length."""
    if len(shape) < 2:
        flat = value if shape else [value]
    else:
        flat = value
        for size in shape[1:]:
            if set(map(type, flat)) != _LIST or set(map(len, flat)) != {size}:
                return None
            flat = list(itertools.chain.from_iterable(flat))
    return None if list in set(map(type, flat)) else flat


_LIST = {list}


def _flatten(value: Any, shape: tuple[int, ...], level: int, flat: list[Any], name: str) -> None:
    """Append the scalars in order, and raise if a list does not have the length of its level."""
    if level == len(shape):
        if isinstance(value, list):
            raise _ragged(name, shape, "a list where a value stands elsewhere")
        flat.append(value)
        return
    if not isinstance(value, list):
        raise _ragged(name, shape, f"{shown(value)} where a list stands elsewhere")
    if len(value) != shape[level]:
        raise _ragged(name, shape, f"a list of {len(value)} at level {level}")
    if level == len(shape) - 1 and list not in set(map(type, value)):
        flat.extend(value)
        return
    for item in value:
        _flatten(item, shape, level + 1, flat, name)


def _ragged(name: str, shape: tuple[int, ...], got: str) -> UserError:
    return UserError(
        f"input {name!r} must be dense, of shape {shape_text(shape)} as its first elements say",
        got=Plain(got),
    )


def typed(flat: list[Any], *, name: str, dtype: str) -> np.ndarray[Any, Any]:
    """Return JSON scalars as a 1-D array.

    Raises:
        UserError: a value does not fit the dtype.
    """
    if dtype == "string":
        return _strings(flat, name)
    numpy_dtype = _numpy_dtype(dtype, name)
    allowed, found = _ALLOWED[numpy_dtype.kind], set(map(type, flat))
    if found == {float} and sum(map(abs, flat)) <= _LARGEST.get(dtype, -1.0):
        return np.array(flat, dtype=numpy_dtype)  # all values are in range, and none is NaN
    if not found <= allowed:
        odd = next(item for item in flat if type(item) not in allowed)
        raise _wrong_type(name, dtype, odd)
    return (
        _floats(flat, numpy_dtype, name)
        if numpy_dtype.kind in "fV"
        else _whole(flat, numpy_dtype, name)
    )


_LARGEST = {name: float(np.finfo(name).max) for name in ("float32", "float64")}
"""Dtype -> its largest number."""

_ALLOWED: dict[str, set[type]] = {
    "f": {float, int},
    "V": {float, int},  # bfloat16 is a void type to NumPy
    "i": {int},
    "u": {int},
    "b": {bool},
}
"""Kind of dtype -> the JSON types that it accepts."""

_JSON_DTYPES = {name: np.dtype(name) for name in ("bool", "float16", "float32", "float64")} | {
    name: np.dtype(name)
    for name in (f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
}
"""Numeric and boolean dtypes; bfloat16 and strings are handled separately."""


def _numpy_dtype(dtype: str, name: str) -> np.dtype[Any]:
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    found = _JSON_DTYPES.get(dtype)
    if found is None:
        raise UserError(f"input {name!r} has dtype {dtype}, which JSON cannot represent", got=dtype)
    return found


def _whole(flat: list[Any], dtype: np.dtype[Any], name: str) -> np.ndarray[Any, Any]:
    try:
        return np.array(flat, dtype=dtype)
    except OverflowError:
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        odd = next(item for item in flat if not least <= item <= most)
        raise _wrong_type(name, dtype.name, odd) from None


def _floats(flat: list[Any], dtype: np.dtype[Any], name: str) -> np.ndarray[Any, Any]:
    """Return numbers in the dtype's precision.

    As in TensorFlow Serving, numbers are rounded to float64 and then to float32, in which numbers that are too large
    become infinite. TensorFlow Serving does not read 16-bit floats; this server refuses numbers that a 16-bit dtype
    cannot hold.
    """
    wide = np.array(flat, dtype=np.float64)
    if dtype_name(dtype) in ("float32", "float64"):
        with np.errstate(over="ignore"):
            return wide.astype(dtype, copy=False)
    exact = 2 ** {"float16": 11}.get(dtype_name(dtype), 8) - 1
    for item in flat if int in set(map(type, flat)) else ():
        if type(item) is int and abs(item) > exact:
            raise UserError(
                f"input {name!r} is {dtype.name}, which must hold a whole number without loss",
                got=Plain(shown(item)),
                fix="Write the number with a decimal point; it is then rounded.",
            )
    with np.errstate(over="ignore"):
        narrow = wide.astype(dtype)
    lost = np.isfinite(wide) & ~np.isfinite(narrow.astype(np.float64))
    if lost.any():
        raise _wrong_type(name, dtype.name, flat[int(np.argmax(lost))])
    return narrow


def _strings(flat: list[Any], name: str) -> np.ndarray[Any, Any]:
    array = np.empty(len(flat), dtype=object)
    array[:] = list(_encoded(flat, name))
    return array


def _encoded(flat: list[Any], name: str) -> Iterator[bytes]:
    for item in flat:
        if isinstance(item, str):
            yield _utf8(item, name)
        elif is_b64(item):
            yield base64_bytes(item["b64"])
        else:
            raise _wrong_type(name, "string", item)


def _utf8(text: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UserError(f"input {name!r} must be Unicode text", got=text) from None


def _wrong_type(name: str, dtype: str, item: Any) -> UserError:
    return UserError(
        f"input {name!r} must hold values of type {dtype}",
        got=Plain(f"JSON Value: {shown(item)} Type: {json_type(item)}"),
    )


_MAX_INT64, _MAX_UINT64 = 2**63 - 1, 2**64 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ExamplesBody:
    """A decoded `:classify` or `:regress` body."""

    signature: str
    """The signature's name; empty: the default signature."""

    context: bytes
    """A serialized Example whose features are added to every Example; b"": none."""

    examples: Sequence[bytes]
    """The serialized Examples."""


def parse_examples(raw: bytes) -> ExamplesBody:
    """Decode a `:classify` or `:regress` body.

    As in TensorFlow Serving, numbers without a decimal point become int64 features, all others float features.

    Raises:
        ServeError: the body is not JSON, or not of this form.
    """
    body, signature = parse_object(raw)
    context = _example(body["context"]) if "context" in body else b""
    if "examples" not in body:
        raise _form(body, "When method is classify, key 'examples' is expected and was not found")
    examples = body["examples"]
    if not isinstance(examples, list):
        raise _form(body, "Expecting 'examples' value to be an list/array")
    if not examples:
        raise _form(body, "'examples' value is an empty array")
    return ExamplesBody(
        signature=signature, context=context, examples=[_example(item) for item in examples]
    )


def _example(value: Any) -> bytes:
    if not isinstance(value, dict):
        raise invalid(f"Example must be JSON object but got JSON {json_type(value)}")
    features = {name: _feature(content, name) for name, content in value.items()}
    return _serialized(features)


def _serialized(features: Mapping[str, feature_pb2.Feature]) -> bytes:
    try:
        return example_pb2.Example(
            features=feature_pb2.Features(feature=dict(features))
        ).SerializeToString()
    except UnicodeEncodeError:
        raise invalid("The surrogate pair in string is invalid.") from None


def _feature(content: Any, name: str) -> feature_pb2.Feature:
    """Return a feature; all its elements must have the same kind as the first element."""
    items = content if isinstance(content, list) else [content]
    kind, values = "", []
    for item in items:
        found = _kind(item, name)
        if kind not in ("", found):
            raise invalid(f"Unexpected element type in feature: {name} expecting type: {kind}")
        kind = found
        values.append(_VALUE[found](item, name))
    feature = feature_pb2.Feature()
    if kind:
        getattr(feature, f"{kind}_list").value.extend(values)
    return feature


def _kind(item: Any, name: str) -> str:
    if isinstance(item, int) and -_MAX_INT64 - 1 <= item <= _MAX_UINT64:  # includes bool
        return "int64"
    if isinstance(item, int):  # RapidJSON reads whole numbers beyond 64 bits as doubles
        return "float"
    if isinstance(item, float):
        return "float"
    if isinstance(item, str) or is_b64(item):
        return "bytes"
    raise invalid(f"Feature: {name} has element with unexpected JSON type: {json_type(item)}")


def _int64(item: int, name: str) -> int:
    if item > _MAX_INT64:
        raise invalid(f"Feature: {name} has uint64_t element. Only int64_t is supported.")
    return int(item)


def _float(item: float, _name: str) -> float:
    with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite
        return float(np.float32(float(item)))


def _bytes(item: Any, _name: str) -> bytes:
    if isinstance(item, str):
        try:
            return item.encode()
        except UnicodeEncodeError:
            raise invalid("JSON Parse error: The surrogate pair in string is invalid.") from None
    return base64_bytes(item["b64"])


_VALUE = {"int64": _int64, "float": _float, "bytes": _bytes}


def _form(body: Any, reason: str) -> ServeError:
    return invalid(f"JSON Value: {shown(body)} {reason}")
