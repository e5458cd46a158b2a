"""The Open Inference Protocol by gRPC, on a real channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from stoker.serve.grpc.descriptions import OPEN_INFERENCE
from stoker.serve.process.server import Server

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def ask(server: Server) -> Iterator[Ask]:
    channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}")

    def to_server(call: str, **fields: Any) -> Any:
        request = fields.pop("request", None) or OPEN_INFERENCE.messages[f"{call}Request"](**fields)
        method = channel.unary_unary(
            f"/{OPEN_INFERENCE.service}/{call}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=OPEN_INFERENCE.messages[f"{call}Response"].FromString,
        )
        return method(request, timeout=30)

    yield to_server
    channel.close()


def infer(name: str, *tensors: tuple[str, str, list[int]], raw: tuple[bytes, ...] = ()) -> Any:
    request = OPEN_INFERENCE.messages["ModelInferRequest"](model_name=name, id="7")
    for tensor, datatype, shape in tensors:
        request.inputs.add(name=tensor, datatype=datatype, shape=shape)
    request.raw_input_contents.extend(raw)
    return request


def test_server_and_models_are_described(ask: Ask) -> None:
    assert ask("ServerLive").live
    assert ask("ServerReady").ready
    assert ask("ServerMetadata").extensions == ["binary_tensor_data"]
    assert ask("ModelReady", name="two", version="1").ready
    assert not ask("ModelReady", name="two", version="2").ready
    assert not ask("ModelReady", name="none").ready
    found = ask("ModelMetadata", name="two")
    assert (found.platform, list(found.versions)) == ("tensorflow_savedmodel", ["1"])
    inputs = {one.name: (one.datatype, list(one.shape)) for one in found.inputs}
    assert inputs == {"fare": ("FP32", [-1]), "place": ("INT64", [-1, 2])}


def test_raw_tensors_and_typed_ones_are_answered_raw(ask: Ask) -> None:
    fare, place = np.array([1.5, 2.0], "<f4"), np.array([[1, 2], [3, 4]], "<i8")
    tensors = (("fare", "FP32", [2]), ("place", "INT64", [2, 2]))
    request = infer("two", *tensors, raw=(fare.tobytes(), place.tobytes()))
    answer = ask("ModelInfer", request=request)
    assert (answer.model_name, answer.model_version, answer.id) == ("two", "1", "7")
    assert [(one.name, one.datatype, list(one.shape)) for one in answer.outputs] == [
        ("double", "FP32", [2]),
        ("sum", "INT64", [2]),
    ]
    assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == [3.0, 4.0]
    assert np.frombuffer(answer.raw_output_contents[1], "<i8").tolist() == [3, 7]

    typed = infer("two", *tensors)
    typed.inputs[0].contents.fp32_contents.extend(fare.tolist())
    typed.inputs[1].contents.int64_contents.extend(place.reshape(-1).tolist())
    typed.outputs.add(name="sum")
    typed.parameters["signature_name"].string_param = "serving_default"
    assert list(ask("ModelInfer", request=typed).raw_output_contents) == [
        answer.raw_output_contents[1]
    ]


def test_texts_and_every_other_type_come_back(ask: Ask) -> None:
    request = infer("words", ("word", "BYTES", [1]))
    request.inputs[0].contents.bytes_contents.append(b"card")
    answer = ask("ModelInfer", request=request)
    assert list(answer.raw_output_contents) == [b"\x02" + b"\0" * 7, b"\x04\0\0\0card"]


HALF = ("x", "FP32", [1, 1])
ONE = np.float32(1).tobytes()


def both() -> Any:
    request = infer("half_plus_two", HALF, raw=(ONE,))
    request.inputs[0].contents.fp32_contents.append(1.0)
    return request


def wrong_field() -> Any:
    request = infer("half_plus_two", HALF)
    request.inputs[0].contents.fp64_contents.append(1.0)
    return request


@pytest.mark.parametrize(
    ("request_", "code", "said"),
    [
        (infer("half_plus_two", HALF, raw=(ONE, ONE)), "INVALID_ARGUMENT", "one for each of 1"),
        (infer("half_plus_two", HALF, raw=(b"123",)), "INVALID_ARGUMENT", "must have 4 bytes"),
        (infer("half_plus_two", HALF, HALF, raw=(ONE, ONE)), "INVALID_ARGUMENT", "given only once"),
        (infer("half_plus_two", ("x", "FP31", [1, 1])), "INVALID_ARGUMENT", "the datatype of 'x'"),
        (infer("half_plus_two", ("x", "FP16", [1, 1])), "INVALID_ARGUMENT", "raw_input_contents"),
        (infer("half_plus_two", ("x", "FP32", [-1])), "INVALID_ARGUMENT", "a complete shape"),
        (infer("half_plus_two", ("x", "FP32", [2**62, 2**62])), "INVALID_ARGUMENT", "the values"),
        (infer("half_plus_two", HALF), "INVALID_ARGUMENT", "0 values"),
        (infer("half_plus_two"), "INVALID_ARGUMENT", "'x' is missing"),
        (both(), "INVALID_ARGUMENT", "not both"),
        (wrong_field(), "INVALID_ARGUMENT", "fp64_contents"),
        (infer("", HALF), "INVALID_ARGUMENT", "must not be empty"),
        (infer("none", HALF), "NOT_FOUND", "Servable not found"),
    ],
)
def test_wrong_requests_are_errors(ask: Ask, request_: Any, code: str, said: str) -> None:
    with pytest.raises(grpc.RpcError) as error:
        ask("ModelInfer", request=request_)
    assert error.value.code().name == code
    assert said in error.value.details()
