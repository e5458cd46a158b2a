"""Services and messages for which no installed package has generated code, described in a short notation.

Each service has a descriptor pool of its own, because a client library in the same process may register the same names
in the default pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pool

from stoker.core.protobuf_messages import describe_messages, message_classes


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A service and its messages."""

    service: str
    """Its full name."""

    pool: descriptor_pool.DescriptorPool
    """The descriptor pool of the service and its messages."""

    messages: Mapping[str, Any]
    """Message name -> its class, nested messages included."""


def _described(service: str, messages: Mapping[str, str], *, file_name: str) -> Description:
    """Return a service and its message classes.

    Args:
        service: Full name of the service. Messages `XRequest` and `XResponse` define its method `X`.
        messages: Message -> its fields, as `describe_messages` takes them.
        file_name: Name of the .proto file that would describe the service.
    """
    package, _, service_name = service.rpartition(".")
    file = describe_messages(package, messages, file_name=file_name, oneof="parameter_choice")
    methods = file.service.add(name=service_name).method
    for name in messages:
        method = name.removesuffix("Request")
        if method != name:
            methods.add(
                name=method,
                input_type=f".{package}.{name}",
                output_type=f".{package}.{method}Response",
            )
    pool, classes = message_classes(file, messages)
    return Description(service=service, pool=pool, messages=classes)


OPEN_INFERENCE = _described(
    "inference.GRPCInferenceService",
    {
        "ServerLiveRequest": "",
        "ServerLiveResponse": "bool live=1",
        "ServerReadyRequest": "",
        "ServerReadyResponse": "bool ready=1",
        "ModelReadyRequest": "string name=1; string version=2",
        "ModelReadyResponse": "bool ready=1",
        "ServerMetadataRequest": "",
        "ServerMetadataResponse": "string name=1; string version=2; string* extensions=3",
        "ModelMetadataRequest": "string name=1; string version=2",
        "ModelMetadataResponse.TensorMetadata": "string name=1; string datatype=2; int64* shape=3",
        "ModelMetadataResponse": (
            "string name=1; string* versions=2; string platform=3; "
            "ModelMetadataResponse.TensorMetadata* inputs=4; "
            "ModelMetadataResponse.TensorMetadata* outputs=5"
        ),
        "InferParameter": (
            "bool ?bool_param=1; int64 ?int64_param=2; string ?string_param=3; "
            "double ?double_param=4; uint64 ?uint64_param=5"
        ),
        "InferTensorContents": (
            "bool* bool_contents=1; int32* int_contents=2; int64* int64_contents=3; "
            "uint32* uint_contents=4; uint64* uint64_contents=5; float* fp32_contents=6; "
            "double* fp64_contents=7; bytes* bytes_contents=8"
        ),
        "ModelInferRequest.InferInputTensor": (
            "string name=1; string datatype=2; int64* shape=3; map<InferParameter> parameters=4; "
            "InferTensorContents contents=5"
        ),
        "ModelInferRequest.InferRequestedOutputTensor": "string name=1; map<InferParameter> parameters=2",
        "ModelInferRequest": (
            "string model_name=1; string model_version=2; string id=3; map<InferParameter> parameters=4; "
            "ModelInferRequest.InferInputTensor* inputs=5; "
            "ModelInferRequest.InferRequestedOutputTensor* outputs=6; bytes* raw_input_contents=7"
        ),
        "ModelInferResponse.InferOutputTensor": (
            "string name=1; string datatype=2; int64* shape=3; map<InferParameter> parameters=4; "
            "InferTensorContents contents=5"
        ),
        "ModelInferResponse": (
            "string model_name=1; string model_version=2; string id=3; map<InferParameter> parameters=4; "
            "ModelInferResponse.InferOutputTensor* outputs=5; bytes* raw_output_contents=6"
        ),
    },
    file_name="stoker/serve/grpc/open_inference.proto",
)
"""The Open Inference Protocol.

Source: kserve/open-inference-protocol, `specification/protocol/open_inference_grpc.proto`.
"""

PROFILER = _described(
    "tensorflow.ProfilerService",
    {
        "ProfileOptions": (
            "uint32 host_tracer_level=2; uint32 device_tracer_level=3; uint32 version=5; "
            "uint64 start_timestamp_ns=8; uint64 duration_ms=9"
        ),
        "ProfileRequest": (
            "uint64 duration_ms=1; ProfileOptions opts=4; string repository_root=5; "
            "string session_id=6; string host_name=7"
        ),
        "ProfileToolData": "string name=1; bytes data=2",
        "ProfileResponse": "ProfileToolData* tool_data=6; bool empty_trace=7",
        "TerminateRequest": "string session_id=1",
        "TerminateResponse": "",
        "MonitorRequest": "uint64 duration_ms=1; int32 monitoring_level=2; bool timestamp=3",
        "MonitorResponse": "string data=1",
    },
    file_name="stoker/serve/grpc/profiler_service.proto",
)
"""TensorFlow's profiler service, without fields that only the profiler of TPUs reads.

Source: openxla/xla, `profiler_service.proto`.
"""
