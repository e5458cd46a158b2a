"""The messages of `inference.GRPCInferenceService`, described field by field as the specification has them.

Source: kserve/open-inference-protocol, `specification/protocol/open_inference_grpc.proto`.
"""

from __future__ import annotations

from stoker.serve.grpc.descriptions import described

SERVICE = "inference.GRPCInferenceService"

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
}
"""Message -> its fields, as `described` takes them."""

_DESCRIPTION = described(SERVICE, _MESSAGES, file_name="stoker/serve/grpc/open_inference.proto")

POOL = _DESCRIPTION.pool
"""Where the messages and the service are described."""

MESSAGES = _DESCRIPTION.messages
"""The class of each message by its name, of those within others too."""
