"""`inference.GRPCInferenceService`: the Open Inference Protocol over gRPC.

Source: kserve/open-inference-protocol, `specification/protocol/inference_grpc.md`.
"""

from __future__ import annotations

import math
from typing import Any

import grpc
import numpy as np

from stoker.core.errors import Plain, UserError
from stoker.registry.exported_model import Signature, shape_text
from stoker.serve.dataplane import open_inference
from stoker.serve.dataplane.open_inference import invalid
from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.dataplane.requests import PredictRequest, Tensors
from stoker.serve.deadline import Deadline
from stoker.serve.grpc.calls import Answer, Calls
from stoker.serve.grpc.descriptions import OPEN_INFERENCE
from stoker.serve.tensor_bytes import DTYPES, checked_shape, from_bytes, to_bytes

_MESSAGES = OPEN_INFERENCE.messages
SERVICE = OPEN_INFERENCE.service

_CONTENTS = {
    "bool": "bool_contents",
    "int8": "int_contents",
    "int16": "int_contents",
    "int32": "int_contents",
    "int64": "int64_contents",
    "uint8": "uint_contents",
    "uint16": "uint_contents",
    "uint32": "uint_contents",
    "uint64": "uint64_contents",
    "float32": "fp32_contents",
    "float64": "fp64_contents",
    "string": "bytes_contents",
}
"""Dtype -> its field of InferTensorContents. 16-bit floats have no field and can only be sent as raw bytes."""


def add_service(plane: DataPlane, calls: Calls, server: grpc.Server) -> None:
    """Register the service on a server."""
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            calls.handler(plane, name, answer),
            request_deserializer=_MESSAGES[f"{name}Request"].FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )
        for name, answer in _ANSWERS.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _live(_plane: DataPlane, _request: Any, _deadline: Deadline) -> Any:
    return _MESSAGES["ServerLiveResponse"](live=True)


def _ready(plane: DataPlane, _request: Any, _deadline: Deadline) -> Any:
    return _MESSAGES["ServerReadyResponse"](ready=not plane.unready())


def _model_ready(plane: DataPlane, request: Any, _deadline: Deadline) -> Any:
    spec = open_inference.spec_of(request.name, request.version)
    return _MESSAGES["ModelReadyResponse"](ready=open_inference.is_ready(plane, spec))


def _server_metadata(_plane: DataPlane, _request: Any, _deadline: Deadline) -> Any:
    return _MESSAGES["ServerMetadataResponse"](
        name=open_inference.SERVER_NAME,
        version=open_inference.SERVER_VERSION,
        extensions=open_inference.EXTENSIONS,
    )


def _model_metadata(plane: DataPlane, request: Any, _deadline: Deadline) -> Any:
    found = open_inference.model_metadata(
        plane, open_inference.spec_of(request.name, request.version)
    )
    response = _MESSAGES["ModelMetadataResponse"](
        name=found.name, versions=found.versions, platform=open_inference.PLATFORM
    )
    for field, tensors in ((response.inputs, found.inputs), (response.outputs, found.outputs)):
        for tensor in tensors:
            field.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return response


def _infer(plane: DataPlane, request: Any, deadline: Deadline) -> Any:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise invalid(f"raw_input_contents must hold one for each of {len(request.inputs)} inputs")
    names = [tensor.name for tensor in request.inputs]
    if len(set(names)) != len(names):
        raise invalid("every input must be given only once")

    def read_inputs(_signature: Signature) -> Tensors:
        return {
            tensor.name: _array(tensor, raw[number] if raw else None)
            for number, tensor in enumerate(request.inputs)
        }

    parameters = {name: _parameter(value) for name, value in request.parameters.items()}
    answered = plane.predict(
        PredictRequest(
            model=open_inference.spec_of(request.model_name, request.model_version),
            read_inputs=read_inputs,
            signature=open_inference.signature_of(parameters),
            output_filter=tuple(output.name for output in request.outputs),
            entrypoint="GRPC",
            deadline=deadline,
        )
    )
    response = _MESSAGES["ModelInferResponse"](
        model_name=answered.model.name, model_version=str(answered.model.version), id=request.id
    )
    for name, array in answered.outputs.items():
        datatype = open_inference.datatype_of(array, name=name)
        response.outputs.add(name=name, datatype=datatype, shape=array.shape)
        response.raw_output_contents.append(to_bytes(array))
    return response


def _array(tensor: Any, raw: bytes | None) -> np.ndarray[Any, Any]:
    name = tensor.name
    dtype = open_inference.dtype_of(tensor.datatype, name=name)
    shape = checked_shape(list(tensor.shape), name=name)
    if raw is not None:
        if tensor.HasField("contents"):
            raise invalid(f"input {name!r} must be raw or in contents, not both")
        return from_bytes(raw, dtype=dtype, shape=shape, name=name)
    field = _CONTENTS.get(dtype)
    if field is None:
        raise UserError(f"input {name!r} must be sent in raw_input_contents", got=tensor.datatype)
    others = [one.name for one, _ in tensor.contents.ListFields() if one.name != field]
    values = getattr(tensor.contents, field)
    if others or len(values) != math.prod(shape):
        raise UserError(
            f"{field} of input {name!r} must hold the values of shape {shape_text(shape)}",
            got=Plain(", ".join(others) or f"{len(values):,} values"),
        )
    if dtype == "string":
        array = np.empty(len(values), dtype=object)
        array[:] = list(values)
        return array.reshape(shape)
    try:
        return np.array(list(values), dtype=DTYPES[dtype]).reshape(shape)
    except OverflowError as error:
        raise UserError(f"input {name!r} must hold values of {dtype}", got=Plain("more")) from error


def _parameter(value: Any) -> Any:
    choice = value.WhichOneof("parameter_choice")
    return None if choice is None else getattr(value, choice)


_ANSWERS: dict[str, Answer] = {
    "ServerLive": _live,
    "ServerReady": _ready,
    "ModelReady": _model_ready,
    "ServerMetadata": _server_metadata,
    "ModelMetadata": _model_metadata,
    "ModelInfer": _infer,
}
