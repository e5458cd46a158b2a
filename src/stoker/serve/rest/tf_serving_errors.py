"""Finds TensorFlow Serving's error message for a `:predict` body that `decode` refuses.

`decode` checks whole levels at once, and finds out only that something is wrong. This module checks the body again in
TensorFlow Serving's order, value by value, up to the first error.

Source: TensorFlow Serving, `json_tensor.cc`.
"""

from __future__ import annotations

import math
from typing import Any

from stoker.registry.exported_model import Signature, TensorSpec
from stoker.serve.errors import ServeError
from stoker.serve.rest.decode import PredictBody
from stoker.serve.rest.json_text import base64_bytes, invalid, is_b64, json_type, shown

_INTEGERS = {
    "int8": (-(2**31), 2**31 - 1),
    "int16": (-(2**31), 2**31 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "uint8": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}
"""Dtype -> the range that TensorFlow Serving accepts. Narrow dtypes share a field of 32 bits, so they share its
range."""

_MAX_VALUES = 200_000
"""Maximum number of values that are checked. Each takes 1 us, during which the GIL is held."""


class _TooManyError(Exception):
    """The body is too large to check value by value."""


_FLOATS = ("float32", "float64")
_NAMES = {"float32": "float", "float64": "double", "float16": "half"}


def tf_serving_error(body: PredictBody, signature: Signature) -> ServeError | None:
    """Return TensorFlow Serving's error for a body.

    Args:
        body: The body, with its outer form decoded.
        signature: The called signature.

    Returns:
        The error; None if TensorFlow Serving would accept the body, or if the body is too large to check.
    """
    try:
        if body.rows:
            _read_rows(body.value, signature)
        else:
            _read_columns(body.value, signature)
    except ServeError as error:
        return error
    except _TooManyError:
        return None
    except RecursionError:
        return invalid("JSON Parse error: nested too deeply")
    return None


def _read_rows(rows: list[Any], signature: Signature) -> None:
    if not isinstance(rows[0], dict) and len(signature.inputs) > 1:
        raise invalid(
            "instances is a plain list, but expecting list of objects as multiple "
            "input tensors required as per tensorinfo_map"
        )
    named = _is_named(rows[0])
    shapes: dict[str, tuple[int, ...]] = {}
    for number, row in enumerate(rows):
        if named and not _is_named(row):
            raise invalid(f"Expecting object but got list at item {number} of input list")
        if not named and _is_named(row):
            raise invalid(f"Expecting value/list but got object at item {number} of input list")
        if named:
            _read_named_row(row, number, signature, shapes)
            continue
        try:
            _read_item(row, min(signature.inputs), signature, shapes, number=number)
        except ServeError as error:
            raise invalid(
                f"Failed to process element: {number} of 'instances' list. Error: {error}"
            ) from error


def _read_named_row(
    row: dict[str, Any], number: int, signature: Signature, shapes: dict[str, tuple[int, ...]]
) -> None:
    for name, item in row.items():
        try:
            _read_item(item, name, signature, shapes, number=number)
        except ServeError as error:
            raise invalid(
                f"Failed to process element: {number} key: {shown(name)[1:-1]} of 'instances' "
                f"list. Error: {error}"
            ) from error
    if row.keys() != signature.inputs.keys():
        raise invalid(
            f"Failed to process element: {number} of 'instances' list. JSON object: {shown(row)} "
            f"keys must be equal to: {','.join(sorted(signature.inputs))}"
        )


def _read_item(
    item: Any,
    name: str,
    signature: Signature,
    shapes: dict[str, tuple[int, ...]],
    *,
    number: int,
) -> None:
    if name not in signature.inputs:
        raise invalid(f"JSON object: does not have named input: {shown(name)[1:-1]}")
    shape = _checked_shape(item, times=number + 1)
    _read_values(item, 0, signature.inputs[name], shape)
    before = shapes.setdefault(name, shape)
    if math.prod(before) != math.prod(shape):
        raise invalid(f"Expecting tensor size: {math.prod(before)} but got: {math.prod(shape)}")
    if before != shape:
        raise invalid(f"Expecting shape {_text(before)} but got: {_text(shape)}")


def _read_columns(value: Any, signature: Signature) -> None:
    if _is_named(value):
        for name, spec in sorted(signature.inputs.items()):
            if name not in value:
                raise invalid(f"Missing named input: {name} in 'inputs' object.")
            try:
                _read_values(value[name], 0, spec, _checked_shape(value[name]))
            except (
                ServeError
            ) as error:  # add the input's name, which TensorFlow Serving's message lacks
                raise invalid(f"{error.message} Input {name!r} must be {spec}.") from error
        return
    if len(signature.inputs) > 1:
        raise invalid(
            "inputs is a plain value/list, but expecting an object as multiple "
            "input tensors required as per tensorinfo_map"
        )
    _read_values(value, 0, next(iter(signature.inputs.values())), _checked_shape(value))


def _read_values(value: Any, level: int, spec: TensorSpec, shape: tuple[int, ...]) -> None:
    if not isinstance(value, list):
        if level != len(shape):
            raise invalid(
                f"JSON Value: {shown(value)} found at incorrect level: {level + 1} "
                f"in the JSON DOM. Expected at level: {len(shape)}"
            )
        _read_value(value, spec.dtype)
        return
    if level >= len(shape):
        raise invalid(f"Encountered list at unexpected level: {level} expected < {len(shape)}")
    if len(value) != shape[level]:
        raise invalid(
            f"Encountered list at unexpected size: {len(value)} at level: {level} "
            f"expected size: {shape[level]}"
        )
    for item in value:
        _read_values(item, level + 1, spec, shape)


def _read_value(value: Any, dtype: str) -> None:
    if isinstance(value, dict) and dtype == "string":
        if not is_b64(value):
            raise invalid(f"JSON Value: {shown(value)} not formatted correctly for base64 data")
        base64_bytes(value["b64"])
    elif not _is_of_type(value, dtype):
        raise invalid(
            f"JSON Value: {shown(value)} Type: {json_type(value)} is not of expected type: "
            f"{_NAMES.get(dtype, dtype)}"
        )


def _is_of_type(value: Any, dtype: str) -> bool:
    if dtype in _INTEGERS:
        low, high = _INTEGERS[dtype]
        return type(value) is int and low <= value <= high
    if dtype in _FLOATS:
        return type(value) in (int, float)
    if dtype == "string":
        return isinstance(value, str)
    return isinstance(value, bool) if dtype == "bool" else True


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and not is_b64(value)


def _checked_shape(value: Any, *, times: int = 1) -> tuple[int, ...]:
    """Return the shape of a value that occurs `times` times.

    Raises:
        _TooManyError: there are too many values to check.
    """
    shape = _shape(value)
    if math.prod(shape) * times > _MAX_VALUES:
        raise _TooManyError
    return shape


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape that the first element of every level implies."""
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return tuple(shape)


def _text(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
