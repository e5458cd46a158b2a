"""Definitions of TensorFlow Serving's gRPC messages that do not need TensorFlow.

`tensorflow_serving.apis` imports all of TensorFlow, which takes seconds and hundreds of MB in every client. The encoded
bytes of a message depend only on the numbers and types of its fields, which this module defines.

Source: tensorflow/serving, apis/{model,predict,get_model_metadata,get_model_status,model_management}.proto;
tensorflow/tensorflow, core/framework/{tensor,tensor_shape}.proto, core/protobuf/meta_graph.proto.
"""

from __future__ import annotations

import functools
from typing import Any

PREDICT = "/tensorflow.serving.PredictionService/Predict"
METADATA = "/tensorflow.serving.PredictionService/GetModelMetadata"
MODEL_STATUS = "/tensorflow.serving.ModelService/GetModelStatus"
RELOAD_CONFIG = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"

MESSAGES = {
    "Int64Value": "int64 value=1",
    "Any": "string type_url=1; bytes value=2",
    "Dim": "int64 size=1; string name=2",
    "TensorShapeProto": "Dim* dim=2; bool unknown_rank=3",
    "TensorProto": (
        "int32 dtype=1; TensorShapeProto tensor_shape=2; bytes tensor_content=4; "
        "float* float_val=5; double* double_val=6; int32* int_val=7; bytes* string_val=8; "
        "float* scomplex_val=9; int64* int64_val=10; bool* bool_val=11; "
        "double* dcomplex_val=12; int32* half_val=13; uint32* uint32_val=16; "
        "uint64* uint64_val=17"
    ),
    "ModelSpec": (
        "string name=1; Int64Value version=2; string signature_name=3; string version_label=4"
    ),
    "TensorEntry": "string key=1; TensorProto value=2",
    "PredictRequest": "ModelSpec model_spec=1; TensorEntry* inputs=2; string* output_filter=3",
    "PredictResponse": "TensorEntry* outputs=1; ModelSpec model_spec=2",
    "GetModelMetadataRequest": "ModelSpec model_spec=1; string* metadata_field=2",
    "AnyEntry": "string key=1; Any value=2",
    "GetModelMetadataResponse": "ModelSpec model_spec=1; AnyEntry* metadata=2",
    "TensorInfo": "int32 dtype=2; TensorShapeProto tensor_shape=3",
    "TensorInfoEntry": "string key=1; TensorInfo value=2",
    "SignatureDef": "TensorInfoEntry* inputs=1; TensorInfoEntry* outputs=2; string method_name=3",
    "SignatureDefEntry": "string key=1; SignatureDef value=2",
    "SignatureDefMap": "SignatureDefEntry* signature_def=1",
    "GetModelStatusRequest": "ModelSpec model_spec=1",
    "StatusProto": "int32 error_code=1; string error_message=2",
    "ModelVersionStatus": "int64 version=1; int32 state=2; StatusProto status=3",
    "GetModelStatusResponse": "ModelVersionStatus* model_version_status=1",
    # `config` is a message, ModelServerConfig. It is declared as bytes because both are encoded in the same way.
    "ReloadConfigRequest": "bytes config=1",
    "ReloadConfigResponse": "StatusProto status=1",
}
"""Message -> its fields.

A map is written as a repeated message of key and value, and an enumeration as an int32: their encoding is the same.
"""


def message(name: str) -> Any:
    """Return a new message of this type."""
    return _classes()[name]()


@functools.cache
def _classes() -> dict[str, Any]:
    from stoker.core.protobuf_messages import describe_messages, message_classes

    file = describe_messages("stoker.client", MESSAGES, file_name="stoker/client.proto")
    return message_classes(file, MESSAGES)[1]
