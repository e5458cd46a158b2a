"""Tensors as bytes: the values in C order, little-endian.

A string is preceded by its length in four bytes, as in the Open Inference Protocol.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from stoker.core.errors import Plain, UserError
from stoker.registry.exported_model import shape_text

MAX_RANK = 32
"""Maximum number of axes of a tensor."""

_LENGTH = struct.Struct("<I")

_WHOLE = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_NAMES = ("bool", "float16", "float32", "float64", *_WHOLE)

DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name).newbyteorder("<") for name in _NAMES},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""TensorFlow's name of a dtype -> NumPy's dtype. Strings are not included."""


_MAX_ELEMENTS = 1 << 48
"""Maximum product of the nonzero axes of an empty shape. NumPy refuses some larger shapes, although they are empty."""


def checked_shape(shape: Sequence[int], *, name: str) -> tuple[int, ...]:
    """Check the shape that a client declares, and return it.

    Raises:
        UserError: the shape has too many axes or an axis below 0, or NumPy would refuse it.
    """
    # If a shape is not empty, the caller compares its size with the number of values.
    beyond = 0 in shape and math.prod([size for size in shape if size]) > _MAX_ELEMENTS
    if len(shape) > MAX_RANK or any(size < 0 for size in shape) or beyond:
        raise UserError(
            f"{name!r} must have a complete shape of at most {MAX_RANK} axes",
            got=shape_text(tuple(shape)),
        )
    return tuple(shape)


def from_bytes(
    raw: bytes | memoryview, *, dtype: str, shape: tuple[int, ...], name: str
) -> np.ndarray[Any, Any]:
    """Convert bytes to a tensor.

    Args:
        raw: The bytes.
        dtype: TensorFlow's name of the dtype.
        shape: The complete shape.
        name: The tensor's name, for errors.

    Raises:
        UserError: the bytes do not fill the shape, or the dtype cannot be sent as bytes.
    """
    count = math.prod(shape)
    if dtype == "string":
        return _strings(bytes(raw), count, name).reshape(shape)
    known = DTYPES.get(dtype)
    if known is None:
        raise UserError(f"{name!r} must have a dtype that can be sent as bytes", got=dtype)
    if len(raw) != count * known.itemsize:
        raise UserError(
            f"{name!r} must have {count * known.itemsize:,} bytes: "
            f"{dtype} of shape {shape_text(shape)}",
            got=Plain(f"{len(raw):,} bytes"),
        )
    if dtype == "bool" and raw and max(raw) > 1:
        raise UserError(f"{name!r} must hold truth values, bytes of 0 or 1", got=max(raw))
    return np.frombuffer(raw, dtype=known).reshape(shape)


def to_bytes(array: np.ndarray[Any, Any]) -> bytes:
    """Convert a tensor to bytes.

    Raises:
        UserError: the dtype cannot be sent as bytes.
    """
    if array.dtype == object:
        return b"".join(_LENGTH.pack(len(item)) + item for item in array.reshape(-1).tolist())
    known = DTYPES.get(array.dtype.name)
    if known is None:
        raise UserError("every output must have a dtype that can be sent as bytes", got=array.dtype)
    return np.ascontiguousarray(array).astype(known, copy=False).tobytes()


def _strings(raw: bytes, count: int, name: str) -> np.ndarray[Any, Any]:
    if count > len(raw) // _LENGTH.size:  # checked before the memory is allocated
        raise _unfilled(name, count)
    found = np.empty(count, dtype=object)
    place = 0
    for number in range(count):
        start = place + _LENGTH.size
        if start > len(raw):
            raise _unfilled(name, count)
        place = start + _LENGTH.unpack_from(raw, place)[0]
        if place > len(raw):
            raise _unfilled(name, count)
        found[number] = raw[start:place]
    if place != len(raw):
        raise _unfilled(name, count)
    return found


def _unfilled(name: str, count: int) -> UserError:
    return UserError(
        f"{name!r} must have {count:,} strings, each preceded by its length in 4 bytes",
        got=Plain("other bytes"),
    )
