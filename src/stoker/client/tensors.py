"""Converts arrays to TensorFlow's tensor messages, and back."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from stoker.client.signature import DTYPES
from stoker.core.errors import DataError, Plain, UserError

_NUMBERS = {name: number for number, name in DTYPES.items()}

_FIELDS = {
    "float32": "float_val",
    "float64": "double_val",
    **dict.fromkeys(("int8", "int16", "int32", "uint8", "uint16"), "int_val"),
    "int64": "int64_val",
    "uint32": "uint32_val",
    "uint64": "uint64_val",
    "bool": "bool_val",
    "float16": "half_val",
    "bfloat16": "half_val",
    "complex64": "scomplex_val",
    "complex128": "dcomplex_val",
    "string": "string_val",
}
"""Dtype -> the field of TensorProto that holds its values if they are not sent as raw bytes."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype for TensorFlow's name of a dtype; the dtype of strings is object."""
    if name == "string":
        return np.dtype(object)
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def fill_tensor(tensor: Any, array: NDArray[Any]) -> None:
    """Write an array to a TensorProto; numbers are written as raw bytes in the machine's byte order.

    Args:
        tensor: The empty message.
        array: An array of any shape; strings are an object array of `bytes` or `str`, or an array of dtype S or U.

    Raises:
        UserError: TensorFlow Serving does not support this dtype.
    """
    texts = array.dtype.kind in "OSU"
    name = "string" if texts else array.dtype.name
    if name not in _NUMBERS:
        raise UserError("an input must have a dtype that TensorFlow Serving knows", got=Plain(name))
    tensor.dtype = _NUMBERS[name]
    # Set the shape for a scalar too, although it has no axes: without the field, the rank would be unknown.
    tensor.tensor_shape.SetInParent()
    for size in array.shape:
        tensor.tensor_shape.dim.add(size=size)
    if texts:
        tensor.string_val.extend(_encoded(item) for item in array.reshape(-1).tolist())
    else:
        tensor.tensor_content = (
            np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        )


def to_array(tensor: Any) -> NDArray[Any]:
    """Return a TensorProto as an array; strings are `bytes` objects.

    If the message has fewer values than elements, the last value is repeated, as in TensorFlow.

    Raises:
        DataError: the message is not a dense tensor.
    """
    name = DTYPES.get(tensor.dtype)
    shape = tuple(dim.size for dim in tensor.tensor_shape.dim)
    if name is None or tensor.tensor_shape.unknown_rank or min(shape, default=0) < 0:
        raise DataError(
            "an answer must be a dense tensor of a known dtype",
            got=Plain(f"dtype {tensor.dtype}, shape {list(shape)}"),
        )
    values = _values(tensor, name)
    wanted = math.prod(shape)
    if len(values) < wanted and len(values):
        values = np.concatenate([values, np.repeat(values[-1:], wanted - len(values))])
    if len(values) != wanted:
        raise DataError(
            f"an answer of shape {list(shape)} must hold {wanted:,} values", got=len(values)
        )
    return values.reshape(shape)


def _values(tensor: Any, name: str) -> NDArray[Any]:
    dtype = numpy_dtype(name)
    if tensor.tensor_content and name != "string":
        return np.frombuffer(tensor.tensor_content, dtype)
    held = list(getattr(tensor, _FIELDS[name]))
    if name == "string":
        texts = np.empty(len(held), dtype=object)
        texts[:] = held
        return texts
    if name in ("float16", "bfloat16"):
        return np.array(held, np.uint16).view(dtype)
    if name.startswith("complex"):
        return np.array(held, np.float32 if name == "complex64" else np.float64).view(dtype)
    return np.array(held, dtype)


def _encoded(item: Any) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, bytes):
        return item
    raise UserError("an input of strings may hold only strings", got=item)
