"""Converts TensorProtos to arrays and back. Every declared size is checked before memory is allocated."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2, types_pb2

from stoker.core.errors import Plain, UserError
from stoker.registry.exported_model import shape_text
from stoker.serve.tensor_bytes import checked_shape

MAX_REPEATED = 1 << 24
"""Maximum number of elements that one repeated value may stand for: 64 MiB of float32."""

_FIELDS = {
    "float32": "float_val",
    "float64": "double_val",
    "int8": "int_val",
    "int16": "int_val",
    "int32": "int_val",
    "uint8": "int_val",
    "uint16": "int_val",
    "uint32": "uint32_val",
    "int64": "int64_val",
    "uint64": "uint64_val",
    "bool": "bool_val",
    "float16": "half_val",
    "bfloat16": "half_val",
    "complex64": "scomplex_val",
    "complex128": "dcomplex_val",
    "string": "string_val",
}
"""Dtype -> the field of a TensorProto that has its values."""


_PLAIN: dict[int, tuple[np.dtype[Any], str]] = {
    tf.dtypes.as_dtype(name).as_datatype_enum: (np.dtype(name), _FIELDS[name])
    for name in ("float32", "float64", "int32", "int64")
}
"""Protobuf's number of a dtype -> NumPy's dtype, and the field of a TensorProto that has its values."""

_AS_BYTES: dict[int, np.dtype[Any]] = {
    tf.dtypes.as_dtype(name).as_datatype_enum: np.dtype(tf.dtypes.as_dtype(name).as_numpy_dtype)
    for name in ("int8", "int16", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16")
} | {number: dtype for number, (dtype, _) in _PLAIN.items()}
"""Protobuf's number of a dtype -> NumPy's dtype, for dtypes whose bytes are always valid values."""


def to_array(proto: tensor_pb2.TensorProto, *, name: str) -> np.ndarray[Any, Any]:
    """Convert one tensor of a request.

    Args:
        proto: The tensor. If it has fewer values than elements, the last value is repeated, as in TensorFlow.
        name: The input's name, for errors.

    Raises:
        UserError: the tensor's dtype is unknown, or its values do not fill its shape.
    """
    shape = checked_shape([dim.size for dim in proto.tensor_shape.dim], name=name)
    if proto.tensor_shape.unknown_rank:
        raise UserError(f"input {name!r} must have a complete shape", got="an unknown rank")
    plain = _plain_array(proto, shape)
    if plain is not None:
        return plain
    dtype = _dtype(proto, name)
    _check_filled(proto, dtype, shape, name)
    if math.prod(shape) == 0:
        return np.empty(shape, dtype=dtype.as_numpy_dtype)
    try:
        return tf.make_ndarray(proto)
    except OverflowError:
        raise UserError(
            f"input {name!r} must hold values of {dtype.name} only", got=Plain("a larger one")
        ) from None


def _plain_array(
    proto: tensor_pb2.TensorProto, shape: tuple[int, ...]
) -> np.ndarray[Any, Any] | None:
    """Return the array of a tensor that has exactly one number for each element; None for other tensors."""
    count, as_bytes = math.prod(shape), _AS_BYTES.get(proto.dtype)
    if as_bytes is None or count == 0:
        return None
    content = proto.tensor_content  # each access copies it
    if content:
        whole = len(content) == count * as_bytes.itemsize
        return np.frombuffer(content, as_bytes).reshape(shape) if whole else None
    if proto.dtype not in _PLAIN:
        return None
    dtype, field = _PLAIN[proto.dtype]
    values = getattr(proto, field)
    return np.fromiter(values, dtype, count).reshape(shape) if len(values) == count else None


def to_proto(array: np.ndarray[Any, Any]) -> tensor_pb2.TensorProto:
    """Convert one tensor of an answer, with the `*_val` fields that TensorFlow Serving's clients read.

    Raises:
        UserError: a TensorProto has no field for the dtype.
    """
    proto = tensor_pb2.TensorProto()
    fill(proto, array)
    return proto


def fill(
    proto: tensor_pb2.TensorProto, array: np.ndarray[Any, Any], *, as_content: bool = False
) -> None:
    """Like `to_proto`, but fill an empty message; with `as_content`, write numbers as bytes (`tensor_content`)."""
    number, name = _number_and_name(array.dtype)
    if name not in _FIELDS:
        raise UserError("every output must have a supported dtype", got=Plain(name))
    proto.dtype = number  # type: ignore[assignment] # an enumeration's number
    for size in array.shape:
        proto.tensor_shape.dim.add(size=size)
    if as_content and name != "string":
        proto.tensor_content = array.tobytes()
        return
    getattr(proto, _FIELDS[name]).extend(_values(array.reshape(-1), name))


@functools.cache
def _number_and_name(dtype: np.dtype[Any]) -> tuple[int, str]:
    found = tf.string if dtype.kind == "O" else tf.dtypes.as_dtype(dtype)
    return found.as_datatype_enum, found.name


def _values(flat: np.ndarray[Any, Any], dtype: str) -> list[Any]:
    if dtype in ("float16", "bfloat16"):
        flat = flat.view(np.uint16)
    if dtype in ("complex64", "complex128"):
        flat = flat.view(np.float32 if dtype == "complex64" else np.float64)
    return flat.tolist()


def _dtype(proto: tensor_pb2.TensorProto, name: str) -> tf.DType:
    if proto.dtype not in types_pb2.DataType.values():
        raise UserError(f"input {name!r} must have a known dtype", got=proto.dtype)
    label = types_pb2.DataType.Name(proto.dtype)
    found = None if proto.dtype == types_pb2.DT_INVALID else tf.dtypes.as_dtype(proto.dtype)
    if found is None or found.name not in _FIELDS:
        raise UserError(f"input {name!r} must have a supported dtype", got=Plain(label))
    return found


def _check_filled(
    proto: tensor_pb2.TensorProto, dtype: tf.DType, shape: tuple[int, ...], name: str
) -> None:
    wanted = math.prod(shape)
    if proto.tensor_content:
        found = len(proto.tensor_content) / dtype.size if dtype.name != "string" else -1.0
        filled = found == wanted
    else:
        found = len(getattr(proto, _FIELDS[dtype.name]))
        found = found // 2 if dtype.name.startswith("complex") else found
        last = len(proto.string_val[-1]) if dtype.name == "string" and found else 4
        repeated = 0 < found < wanted and max(last, 4) * wanted <= 4 * MAX_REPEATED
        filled = found == wanted or repeated
    if not filled:
        raise UserError(
            f"input {name!r} must hold the values of {dtype.name} of shape {shape_text(shape)}",
            got=Plain(f"{found:g} values of {wanted:,}"),
        )
