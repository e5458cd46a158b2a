"""The gRPC interface, called by TensorFlow Serving's own stubs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2, types_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from stoker.core.errors import UserError
from stoker.serve.process.server import Server
from stoker.serve.tensor_protos import to_array

Stub = prediction_service_pb2_grpc.PredictionServiceStub


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[grpc.Channel]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options) as opened:
        yield opened


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Any:
    return Stub(channel)


def asking(model: str, **inputs: Any) -> predict_pb2.PredictRequest:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    for name, value in inputs.items():
        proto = value if isinstance(value, tensor_pb2.TensorProto) else tf.make_tensor_proto(value)
        request.inputs[name].CopyFrom(proto)
    return request


def tensor(*sizes: int, dtype: Any = 1, **values: Any) -> tensor_pb2.TensorProto:
    proto = tensor_pb2.TensorProto(dtype=dtype, **values)
    for size in sizes:
        proto.tensor_shape.dim.add(size=size)
    return proto


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def test_predict_answers_in_val_fields_with_the_version(stub: Any) -> None:
    answer = stub.Predict(asking("half_plus_two", x=np.array([[1.0], [2.0], [5.0]], np.float32)))

    assert list(answer.outputs["y"].float_val) == [2.5, 3.0, 4.5]
    assert answer.outputs["y"].tensor_content == b""
    assert [dim.size for dim in answer.outputs["y"].tensor_shape.dim] == [3, 1]
    assert answer.model_spec.version.value == 1
    assert answer.model_spec.signature_name == "serving_default"


def test_a_version_and_a_label_are_found(stub: Any) -> None:
    by_version = asking("half_plus_two", x=[[1.0]])
    by_version.model_spec.version.value = 1
    by_label = asking("half_plus_two", x=[[1.0]])
    by_label.model_spec.version_label = "champion"

    for request in (by_version, by_label):
        assert list(stub.Predict(request).outputs["y"].float_val) == [2.5]


def test_output_filter_leaves_the_rest_out(stub: Any) -> None:
    request = asking("two", fare=np.array([1.5], np.float32), place=np.array([[1, 2]], np.int64))
    request.output_filter.append("sum")

    assert list(stub.Predict(request).outputs) == ["sum"]

    request.output_filter.append("nope")
    code, said = refused(lambda: stub.Predict(request))
    assert (code, "nope" in said) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_every_dtype_goes_there_and_back(stub: Any) -> None:
    import ml_dtypes

    dtypes = ["float16", "float64", "int8", "int16", "int32", "uint8", "uint16", "uint32"]
    dtypes += ["uint64", "complex64"]
    sent = {f"a_{d}": np.array([[1, 2, 3], [0, 1, 5]]).astype(d) for d in dtypes}
    sent["a_bfloat16"] = np.array([0.5, -2.0], dtype=ml_dtypes.bfloat16)
    sent["a_bool"] = np.array([True, False])
    sent["a_string"] = np.array([b"\xff\x00", "ö".encode()], dtype=object)

    answer = stub.Predict(asking("everything", **sent))

    for name, array in sent.items():
        back = tf.make_ndarray(answer.outputs[name.replace("a_", "b_")])
        assert back.shape == array.shape, name
        assert back.tolist() == array.tolist(), name


def test_a_message_above_four_mebibytes_passes(stub: Any) -> None:
    many = np.arange(2_000_000, dtype=np.float32).reshape(-1, 1)

    answer = stub.Predict(asking("half_plus_two", x=many))

    assert np.array_equal(np.array(answer.outputs["y"].float_val, np.float32), many[:, 0] / 2 + 2)


def test_one_value_stands_for_all_as_in_tensorflow(stub: Any) -> None:
    answer = stub.Predict(asking("half_plus_two", x=tensor(3, 1, float_val=[4.0])))

    assert list(answer.outputs["y"].float_val) == [4.0, 4.0, 4.0]


@pytest.mark.parametrize(
    "proto",
    [
        tensor(-1, 1, float_val=[1.0]),
        tensor(2, 1),
        tensor(1, 1, float_val=[1.0, 2.0]),
        tensor(1 << 40, 1, float_val=[1.0]),
        tensor(1 << 40, 1 << 40, tensor_content=b"\0\0\0\0"),
        tensor(2, 1, tensor_content=b"\0\0\0\0"),
        tensor(2, 1, tensor_content=b"\0\0\0\0\0"),
        tensor(1, 1, dtype=0, float_val=[1.0]),
        tensor(1, 1, dtype=999, float_val=[1.0]),
        tensor(1, 1, dtype=20, float_val=[1.0]),
        tensor(1, 1, dtype=7, tensor_content=b"1234"),
        tensor(1, 1, dtype=9, int64_val=[1]),
    ],
)
def test_a_tensor_that_is_not_whole_is_refused(stub: Any, proto: tensor_pb2.TensorProto) -> None:
    code, said = refused(lambda: stub.Predict(asking("half_plus_two", x=proto)))

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "'x'" in said


def test_one_long_text_does_not_stand_for_many(stub: Any) -> None:
    proto = tensor(1 << 20, dtype=7, string_val=[b"x" * 1000])

    code, said = refused(lambda: stub.Predict(asking("words", word=proto)))

    assert (code, "'word'" in said) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_refusals_have_tensorflow_servings_codes(stub: Any) -> None:
    signature = asking("half_plus_two", x=[[1.0]])
    signature.model_spec.signature_name = "nope"
    version = asking("half_plus_two", x=[[1.0]])
    version.model_spec.version.value = 7

    assert refused(lambda: stub.Predict(signature)) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        'Serving signature key "nope" not found.',
    )
    assert refused(lambda: stub.Predict(version)) == (
        grpc.StatusCode.NOT_FOUND,
        "Servable not found for request: Specific(half_plus_two, 7)",
    )
    for request, code in (
        (asking("nope", x=[[1.0]]), grpc.StatusCode.NOT_FOUND),
        (asking("", x=[[1.0]]), grpc.StatusCode.INVALID_ARGUMENT),
        (asking("half_plus_two"), grpc.StatusCode.INVALID_ARGUMENT),
        (asking("half_plus_two", z=[[1.0]]), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        assert refused(partial(stub.Predict, request))[0] is code


def test_status_and_metadata(channel: grpc.Channel, stub: Any) -> None:
    status = get_model_status_pb2.GetModelStatusRequest()
    status.model_spec.name = "two"
    found = model_service_pb2_grpc.ModelServiceStub(channel).GetModelStatus(status)
    assert [(s.version, s.state) for s in found.model_version_status] == [
        (1, get_model_status_pb2.ModelVersionStatus.AVAILABLE)
    ]

    wanted = get_model_metadata_pb2.GetModelMetadataRequest()
    wanted.model_spec.name = "two"
    assert refused(lambda: stub.GetModelMetadata(wanted))[0] is grpc.StatusCode.INVALID_ARGUMENT
    wanted.metadata_field.append("signature_def")
    answer = stub.GetModelMetadata(wanted)
    definitions = get_model_metadata_pb2.SignatureDefMap()
    assert answer.metadata["signature_def"].Unpack(definitions)
    assert sorted(definitions.signature_def["serving_default"].inputs) == ["fare", "place"]


def test_rest_and_grpc_give_the_same_numbers(stub: Any, ask: Callable[..., Any]) -> None:
    values = np.random.default_rng(7).normal(size=(1000, 1)).astype(np.float32)

    by_grpc = stub.Predict(asking("half_plus_two", x=values)).outputs["y"].float_val
    by_rest = ask("/v1/models/half_plus_two:predict", {"instances": values.tolist()}).json()

    assert np.array_equal(
        np.array(by_rest["predictions"], np.float32)[:, 0], np.array(by_grpc, np.float32)
    )


def odd_tensor(dims: list[int], **fields: Any) -> tensor_pb2.TensorProto:
    proto = tensor_pb2.TensorProto(dtype=fields.pop("dtype", types_pb2.DT_FLOAT), **fields)
    for size in dims:
        proto.tensor_shape.dim.add(size=size)
    return proto


@pytest.mark.parametrize(
    "tensor",
    [
        odd_tensor([0, 2**62]),
        odd_tensor([2**62, 0]),
        odd_tensor([0, 2**63 - 1]),
        odd_tensor([0, 2**40, 2**40]),
        odd_tensor([1] * 65, float_val=[1.0]),
        odd_tensor([1] * 255, tensor_content=b"\0\0\0\0"),
        odd_tensor([0] * 300),
        odd_tensor([1], dtype=types_pb2.DT_UINT8, int_val=[300]),
        odd_tensor([1], dtype=types_pb2.DT_UINT8, int_val=[-1]),
        odd_tensor([1], dtype=types_pb2.DT_INT8, int_val=[1000]),
        odd_tensor([1], dtype=types_pb2.DT_INT16, int_val=[70000]),
        odd_tensor([1], dtype=types_pb2.DT_UINT16, int_val=[-5]),
        odd_tensor([1], dtype=types_pb2.DT_HALF, half_val=[70000]),
        odd_tensor([1], dtype=types_pb2.DT_HALF, half_val=[-1]),
        odd_tensor([1], dtype=types_pb2.DT_BFLOAT16, half_val=[70000]),
    ],
)
def test_a_tensor_that_no_memory_or_dtype_holds_is_the_clients_fault(
    tensor: tensor_pb2.TensorProto,
) -> None:
    with pytest.raises(UserError) as caught:
        to_array(tensor, name="x")
    assert "\n" not in caught.value.line()
