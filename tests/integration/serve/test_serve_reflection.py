"""Reflection: a client without generated code finds the services, builds its stubs and is answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2

from stoker.serve.process.server import Server

REFLECTION = ["grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"]
SERVICES = {
    "tensorflow.serving.PredictionService": {
        "Predict",
        "Classify",
        "Regress",
        "MultiInference",
        "GetModelMetadata",
    },
    "tensorflow.serving.ModelService": {"GetModelStatus", "HandleReloadConfigRequest"},
    "inference.GRPCInferenceService": {
        "ServerLive",
        "ServerReady",
        "ServerMetadata",
        "ModelReady",
        "ModelMetadata",
        "ModelInfer",
    },
    "grpc.health.v1.Health": {"Check", "Watch"},
    "tensorflow.ProfilerService": {"Profile", "Terminate", "Monitor"},
}
NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as opened:
        yield opened


def answers(channel: grpc.Channel, service: str, *requests: Any) -> Sequence[Any]:
    call = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    return list(call(iter(requests), timeout=20))


def asking(**what: Any) -> Any:
    return reflection_pb2.ServerReflectionRequest(**what)


def described(channel: grpc.Channel, service: str, symbol: str) -> Any:
    """A pool of its own with the symbol's file, and with all that this one needs."""
    (answer,) = answers(channel, service, asking(file_containing_symbol=symbol))
    files: dict[str, Any] = {}
    for raw in answer.file_descriptor_response.file_descriptor_proto:
        file = descriptor_pb2.FileDescriptorProto.FromString(raw)
        files[file.name] = file
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(name: str) -> None:
        if name not in added:
            added.add(name)
            for needed in files[name].dependency:
                add(needed)
            pool.Add(files[name])

    for name in files:
        add(name)
    return pool


@pytest.mark.parametrize("service", REFLECTION)
def test_all_services_are_listed_and_each_is_described(channel: grpc.Channel, service: str) -> None:
    (answer,) = answers(channel, service, asking(list_services=""))
    listed = [found.name for found in answer.list_services_response.service]

    assert sorted(listed) == sorted([*SERVICES, *REFLECTION])
    for name in listed:
        found = described(channel, service, name).FindServiceByName(name)
        methods = {method.name for method in found.methods}
        assert methods >= SERVICES.get(name, {"ServerReflectionInfo"})


@pytest.mark.parametrize("service", REFLECTION)
def test_a_predict_by_what_reflection_alone_says_is_answered(
    channel: grpc.Channel, service: str
) -> None:
    pool = described(channel, service, "tensorflow.serving.PredictionService")
    method = pool.FindServiceByName("tensorflow.serving.PredictionService").methods_by_name[
        "Predict"
    ]
    request: Any = message_factory.GetMessageClass(method.input_type)()
    request.model_spec.name = "half_plus_two"
    tensor = request.inputs["x"]
    tensor.dtype = 1
    tensor.float_val.extend([1.0, 2.0, 5.0])
    for size in (3, 1):
        tensor.tensor_shape.dim.add(size=size)
    call = channel.unary_unary(
        "/tensorflow.serving.PredictionService/Predict",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )

    assert list(call(request, timeout=20).outputs["y"].float_val) == [2.5, 3.0, 4.5]


def test_an_infer_by_what_reflection_alone_says_is_answered(channel: grpc.Channel) -> None:
    name = "inference.GRPCInferenceService"
    method = (
        described(channel, REFLECTION[0], name)
        .FindServiceByName(name)
        .methods_by_name["ModelInfer"]
    )
    request: Any = message_factory.GetMessageClass(method.input_type)(model_name="half_plus_two")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[2, 1])
    tensor.contents.fp32_contents.extend([1.0, 5.0])
    call = channel.unary_unary(
        f"/{name}/ModelInfer",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )

    (output,) = call(request, timeout=20).outputs
    assert (output.name, list(output.shape)) == ("y", [2, 1])


@pytest.mark.parametrize("service", REFLECTION)
def test_an_unknown_symbol_is_an_error_and_the_stream_goes_on(
    channel: grpc.Channel, service: str
) -> None:
    *missing, last = answers(
        channel,
        service,
        asking(file_containing_symbol="no.Such"),
        asking(file_by_filename="no/such.proto"),
        asking(all_extension_numbers_of_type="no.Such"),
        asking(file_by_filename="tensorflow_serving/apis/predict.proto"),
    )

    assert [answer.error_response.error_code for answer in missing] == [NOT_FOUND] * 3
    names = [
        descriptor_pb2.FileDescriptorProto.FromString(raw).name
        for raw in last.file_descriptor_response.file_descriptor_proto
    ]
    assert "tensorflow_serving/apis/predict.proto" in names
