"""Tensors as bytes: values one after the other, little-endian, the last axis first.

A text has its length before it, in four bytes; so the Open Inference Protocol has it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from stoker.core.errors import Plain, UserError
from stoker.registry.callpath import shape_text

MAX_RANK = 32
"""More axes than any tensor has."""

_LENGTH = struct.Struct("<I")

_WHOLE = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_NAMES = ("bool", "float16", "float32", "float64", *_WHOLE)

DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name).newbyteorder("<") for name in _NAMES},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""TensorFlow's name -> how NumPy reads it; strings have no such form."""


_MAX_ELEMENTS = 1 << 48
"""More than any memory holds; NumPy refuses some shapes beyond, though they be empty."""


def checked_shape(shape: Sequence[int], *, name: str) -> tuple[int, ...]:
    """A whole shape, as a client declares it.

    Raises:
        UserError: it has too many axes, one below 0, or is empty and yet beyond any memory.
    """
    # One that is not empty is held against its values.
    beyond = 0 in shape and math.prod([size for size in shape if size]) > _MAX_ELEMENTS
    if len(shape) > MAX_RANK or any(size < 0 for size in shape) or beyond:
        raise UserError(
            f"{name!r} must have a whole shape of at most {MAX_RANK} axes",
            got=shape_text(tuple(shape)),
        )
    return tuple(shape)


def from_bytes(
    raw: bytes | memoryview, *, dtype: str, shape: tuple[int, ...], name: str
) -> np.ndarray[Any, Any]:
    """One tensor.

    Args:
        raw: Its values.
        dtype: TensorFlow's name of their type.
        shape: Its whole shape.
        name: What it is called, for the error.

    Raises:
        UserError: the bytes do not fill the shape, or the dtype has no form in bytes.
    """
    count = math.prod(shape)
    if dtype == "string":
        return _strings(bytes(raw), count, name).reshape(shape)
    known = DTYPES.get(dtype)
    if known is None:
        raise UserError(f"{name!r} must have a dtype that has a form in bytes", got=dtype)
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
    """The values of a tensor.

    Raises:
        UserError: the dtype has no form in bytes.
    """
    if array.dtype == object:
        return b"".join(_LENGTH.pack(len(item)) + item for item in array.reshape(-1).tolist())
    known = DTYPES.get(array.dtype.name)
    if known is None:
        raise UserError("every output must have a dtype that has a form in bytes", got=array.dtype)
    return np.ascontiguousarray(array).astype(known, copy=False).tobytes()


def _strings(raw: bytes, count: int, name: str) -> np.ndarray[Any, Any]:
    if count > len(raw) // _LENGTH.size:  # before so much memory is set aside
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
        f"{name!r} must hold {count:,} texts, each behind its length in 4 bytes",
        got=Plain("other bytes"),
    )
