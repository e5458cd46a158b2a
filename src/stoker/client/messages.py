"""TensorFlow Serving's gRPC messages, without TensorFlow.

`tensorflow_serving.apis` imports all of TensorFlow: seconds and hundreds of MB in every client. On the wire,
only the numbers and types of fields matter, and this module defines those.

Source: tensorflow/serving, apis/{model,predict,get_model_metadata,get_model_status,model_management}.proto;
tensorflow/tensorflow, core/framework/{tensor,tensor_shape}.proto, core/protobuf/meta_graph.proto.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf import descriptor_pb2

PREDICT = "/tensorflow.serving.PredictionService/Predict"
METADATA = "/tensorflow.serving.PredictionService/GetModelMetadata"
MODEL_STATUS = "/tensorflow.serving.ModelService/GetModelStatus"
RELOAD_CONFIG = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"

_PACKAGE = "stoker.client"

FIELDS: dict[str, dict[str, tuple[int, str]]] = {
    "Int64Value": {"value": (1, "int64")},
    "Any": {"type_url": (1, "string"), "value": (2, "bytes")},
    "Dim": {"size": (1, "int64"), "name": (2, "string")},
    "TensorShapeProto": {"dim": (2, "Dim*"), "unknown_rank": (3, "bool")},
    "TensorProto": {
        "dtype": (1, "int32"),
        "tensor_shape": (2, "TensorShapeProto"),
        "tensor_content": (4, "bytes"),
        "float_val": (5, "float*"),
        "double_val": (6, "double*"),
        "int_val": (7, "int32*"),
        "string_val": (8, "bytes*"),
        "scomplex_val": (9, "float*"),
        "int64_val": (10, "int64*"),
        "bool_val": (11, "bool*"),
        "dcomplex_val": (12, "double*"),
        "half_val": (13, "int32*"),
        "uint32_val": (16, "uint32*"),
        "uint64_val": (17, "uint64*"),
    },
    "ModelSpec": {
        "name": (1, "string"),
        "version": (2, "Int64Value"),
        "signature_name": (3, "string"),
        "version_label": (4, "string"),
    },
    "TensorEntry": {"key": (1, "string"), "value": (2, "TensorProto")},
    "PredictRequest": {
        "model_spec": (1, "ModelSpec"),
        "inputs": (2, "TensorEntry*"),
        "output_filter": (3, "string*"),
    },
    "PredictResponse": {"outputs": (1, "TensorEntry*"), "model_spec": (2, "ModelSpec")},
    "GetModelMetadataRequest": {
        "model_spec": (1, "ModelSpec"),
        "metadata_field": (2, "string*"),
    },
    "AnyEntry": {"key": (1, "string"), "value": (2, "Any")},
    "GetModelMetadataResponse": {"model_spec": (1, "ModelSpec"), "metadata": (2, "AnyEntry*")},
    "TensorInfo": {"dtype": (2, "int32"), "tensor_shape": (3, "TensorShapeProto")},
    "TensorInfoEntry": {"key": (1, "string"), "value": (2, "TensorInfo")},
    "SignatureDef": {
        "inputs": (1, "TensorInfoEntry*"),
        "outputs": (2, "TensorInfoEntry*"),
        "method_name": (3, "string"),
    },
    "SignatureDefEntry": {"key": (1, "string"), "value": (2, "SignatureDef")},
    "SignatureDefMap": {"signature_def": (1, "SignatureDefEntry*")},
    "GetModelStatusRequest": {"model_spec": (1, "ModelSpec")},
    "StatusProto": {"error_code": (1, "int32"), "error_message": (2, "string")},
    "ModelVersionStatus": {
        "version": (1, "int64"),
        "state": (2, "int32"),
        "status": (3, "StatusProto"),
    },
    "GetModelStatusResponse": {"model_version_status": (1, "ModelVersionStatus*")},
    # A serialized ModelServerConfig: on the wire a message is its bytes.
    "ReloadConfigRequest": {"config": (1, "bytes")},
    "ReloadConfigResponse": {"status": (1, "StatusProto")},
}
"""Message -> field -> its number and type; `*` marks repeated fields.

On the wire, a map is a repeated message of key and value, and an enumeration is an int32.
"""

_SCALARS = ("int32", "int64", "uint32", "uint64", "float", "double", "bool", "string", "bytes")


def message(name: str) -> Any:
    """Return a new message of this type."""
    return _classes()[name]()


@functools.cache
def _classes() -> dict[str, Any]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name="stoker/client.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in FIELDS.items():
        made = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            made.field.append(_field(field, number, kind))
    # A pool of its own, so that the messages do not clash with TensorFlow's if it is loaded.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in FIELDS
    }


def _field(name: str, number: int, kind: str) -> descriptor_pb2.FieldDescriptorProto:
    from google.protobuf import descriptor_pb2

    plain = kind.removesuffix("*")
    kinds = descriptor_pb2.FieldDescriptorProto
    field = kinds(
        name=name,
        number=number,
        label=kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL,
    )
    if plain in _SCALARS:
        field.type = kinds.Type.Value(f"TYPE_{plain.upper()}")
    else:
        field.type = kinds.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{plain}"
    return field
