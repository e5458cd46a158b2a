"""Tensors of requests equal what TensorFlow reads from them, whichever field has their values."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

from stoker.core.errors import UserError
from stoker.serve.tensor_protos import fill, to_array

NAMES = [
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "complex64",
    "complex128",
]


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_a_tensor_are_its_values_in_every_dtype(name: str) -> None:
    dtype = tf.dtypes.as_dtype(name)
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype.as_numpy_dtype)
    proto = tf.make_tensor_proto(values)
    if not proto.tensor_content:
        proto = tensor_pb2.TensorProto(
            dtype=proto.dtype, tensor_shape=proto.tensor_shape, tensor_content=values.tobytes()
        )

    found = to_array(proto, name="x")

    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, tf.make_ndarray(proto))
    proto.tensor_content = proto.tensor_content[:-1]
    with pytest.raises(UserError, match="must hold the values of"):
        to_array(proto, name="x")


@pytest.mark.parametrize("name", NAMES)
def test_an_output_may_go_as_bytes(name: str) -> None:
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(tf.dtypes.as_dtype(name).as_numpy_dtype)
    proto = tensor_pb2.TensorProto()

    fill(proto, values, as_content=True)

    assert proto.tensor_content == values.tobytes()
    np.testing.assert_array_equal(tf.make_ndarray(proto), values)


def test_texts_go_as_values_always() -> None:
    proto = tensor_pb2.TensorProto()

    fill(proto, np.array([b"a", b""], dtype=object), as_content=True)

    assert list(proto.string_val) == [b"a", b""]
