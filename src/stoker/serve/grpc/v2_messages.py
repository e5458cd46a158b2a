"""The messages of `inference.GRPCInferenceService`, described field by field as the specification has them.

They live in a pool of their own: a client library in the same process brings the same names.

Source: kserve/open-inference-protocol, `specification/protocol/open_inference_grpc.proto`.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

_Kind = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Kind.TYPE_BOOL,
    "int32": _Kind.TYPE_INT32,
    "int64": _Kind.TYPE_INT64,
    "uint32": _Kind.TYPE_UINT32,
    "uint64": _Kind.TYPE_UINT64,
    "float": _Kind.TYPE_FLOAT,
    "double": _Kind.TYPE_DOUBLE,
    "string": _Kind.TYPE_STRING,
    "bytes": _Kind.TYPE_BYTES,
}

_MESSAGES: dict[str, str] = {
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
        "string name=1; string datatype=2; int64* shape=3; map parameters=4; "
        "InferTensorContents contents=5"
    ),
    "ModelInferRequest.InferRequestedOutputTensor": "string name=1; map parameters=2",
    "ModelInferRequest": (
        "string model_name=1; string model_version=2; string id=3; map parameters=4; "
        "ModelInferRequest.InferInputTensor* inputs=5; "
        "ModelInferRequest.InferRequestedOutputTensor* outputs=6; bytes* raw_input_contents=7"
    ),
    "ModelInferResponse.InferOutputTensor": (
        "string name=1; string datatype=2; int64* shape=3; map parameters=4; "
        "InferTensorContents contents=5"
    ),
    "ModelInferResponse": (
        "string model_name=1; string model_version=2; string id=3; map parameters=4; "
        "ModelInferResponse.InferOutputTensor* outputs=5; bytes* raw_output_contents=6"
    ),
}
"""Message -> its fields: `*` is repeated, `?` one of the oneof, `map` goes from a text to an InferParameter."""


def _described() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="stoker/serve/grpc/open_inference.proto", package=PACKAGE, syntax="proto3"
    )
    made: dict[str, descriptor_pb2.DescriptorProto] = {}
    for full_name in sorted(_MESSAGES, key=lambda name: name.count(".")):
        outer, _, name = full_name.rpartition(".")
        messages = made[outer].nested_type if outer else file.message_type
        made[full_name] = messages.add(name=name)
        for field in filter(None, _MESSAGES[full_name].split("; ")):
            _add_field(made[full_name], field, full_name)
    _add_service(file)
    return file


def _add_service(file: descriptor_pb2.FileDescriptorProto) -> None:
    """Every message `XRequest` has its `XResponse`, and both are of the method `X`."""
    service = file.service.add(name=SERVICE.removeprefix(f"{PACKAGE}."))
    for name in _MESSAGES:
        method = name.removesuffix("Request")
        if method != name:
            service.method.add(
                name=method,
                input_type=f".{PACKAGE}.{name}",
                output_type=f".{PACKAGE}.{method}Response",
            )


def _add_field(message: descriptor_pb2.DescriptorProto, text: str, full_name: str) -> None:
    kind, _, named = text.partition(" ")
    name, _, number = named.partition("=")
    field = message.field.add(name=name.lstrip("?"), number=int(number))
    repeated = kind.endswith("*") or kind == "map"
    field.label = _Kind.LABEL_REPEATED if repeated else _Kind.LABEL_OPTIONAL
    if name.startswith("?"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    kind = kind.rstrip("*")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = _Kind.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{kind}"
    if kind == "map":
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _add_field(entry, "string key=1", "")
        _add_field(entry, "InferParameter value=2", "")
        field.type_name = f".{PACKAGE}.{full_name}.{entry.name}"


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_described())
    return pool


POOL = _pool()
"""Where the messages and the service are described."""

MESSAGES: dict[str, Any] = {
    name: message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
    for name in _MESSAGES
}
"""The class of each message by its name, of those within others too."""
