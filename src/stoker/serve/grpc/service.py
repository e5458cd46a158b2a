"""TensorFlow Serving's gRPC services, which call the dataplane; and the server of all services."""

from __future__ import annotations

import functools
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_management_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.dataplane.requests import PredictRequest
from stoker.serve.deadline import Deadline
from stoker.serve.errors import Code, ServeError
from stoker.serve.grpc import inference, v2
from stoker.serve.grpc.calls import Calls
from stoker.serve.grpc.health import Health
from stoker.serve.grpc.inference import read_spec, spec_proto
from stoker.serve.grpc.predict import PREDICT, InlineGrpcPredict, read_inputs, response_of
from stoker.serve.grpc.profiler import ProfilerService
from stoker.serve.grpc.reflection import add_reflection
from stoker.serve.grpc_server.limits import ServerLimits
from stoker.serve.grpc_server.server import GrpcServer
from stoker.serve.limits import HttpLimits
from stoker.serve.observability.access_log import AccessLog
from stoker.serve.runtime.counted_threads import CountedThreads
from stoker.serve.security.auth import Keys
from stoker.serve.security.tls import Tls
from stoker.serve.servables.model_config import models_of


def _predict(
    plane: DataPlane, request: predict_pb2.PredictRequest, deadline: Deadline
) -> predict_pb2.PredictResponse:
    answer = plane.predict(
        PredictRequest(
            model=read_spec(request),
            read_inputs=functools.partial(read_inputs, request),
            signature=request.model_spec.signature_name,
            output_filter=tuple(request.output_filter),
            entrypoint="GRPC",
            deadline=deadline,
        )
    )
    return response_of(
        answer.model, answer.signature, answer.outputs, as_content=plane.tensor_content
    )


def _metadata(
    plane: DataPlane, request: get_model_metadata_pb2.GetModelMetadataRequest, _deadline: Deadline
) -> get_model_metadata_pb2.GetModelMetadataResponse:
    if not request.metadata_field:
        raise ServeError(
            Code.INVALID_ARGUMENT,
            "GetModelMetadataRequest must specify at least one metadata_field",
        )
    for name in request.metadata_field:
        if name != "signature_def":
            raise ServeError(Code.INVALID_ARGUMENT, f"Metadata field {name} is not supported")
    metadata = plane.metadata(read_spec(request))
    definitions = get_model_metadata_pb2.SignatureDefMap()
    for name, definition in metadata.signature_defs.items():
        definitions.signature_def[name].CopyFrom(definition)
    response = get_model_metadata_pb2.GetModelMetadataResponse()
    response.model_spec.CopyFrom(spec_proto(metadata.model, ""))
    response.metadata["signature_def"].Pack(definitions)
    return response


def _status(
    plane: DataPlane, request: get_model_status_pb2.GetModelStatusRequest, _deadline: Deadline
) -> get_model_status_pb2.GetModelStatusResponse:
    response = get_model_status_pb2.GetModelStatusResponse()
    for status in plane.status(read_spec(request)):
        found = response.model_version_status.add(version=status.version, state=status.state)
        found.status.error_code = Code.UNKNOWN if status.reason else Code.OK
        found.status.error_message = status.reason
    return response


def _reload(
    plane: DataPlane, request: model_management_pb2.ReloadConfigRequest, deadline: Deadline
) -> model_management_pb2.ReloadConfigResponse:
    """Replace the configuration of the served models by that of the request."""
    if request.config.WhichOneof("config") != "model_config_list":
        raise ServeError(
            Code.INVALID_ARGUMENT,
            "ServerModelConfig type not supported by HandleReloadConfigRequest. Only "
            "ModelConfigList is currently supported",
        )
    plane.reload(models_of(request.config), deadline=deadline)
    return model_management_pb2.ReloadConfigResponse()


_PREDICTION_SERVICE = {
    "Predict": _predict,
    "Classify": inference.classify,
    "Regress": inference.regress,
    "MultiInference": inference.multi_inference,
    "GetModelMetadata": _metadata,
}
_MODEL_SERVICE = {"GetModelStatus": _status, "HandleReloadConfigRequest": _reload}

_HEALTH_METHODS = (
    "/tensorflow.serving.ModelService/GetModelStatus",
    "/grpc.health.v1.Health/Check",
    *(f"/{v2.SERVICE}/{name}" for name in ("ServerLive", "ServerReady", "ModelReady")),
)
"""Methods of health checks. They only read a few fields, so even an overloaded server answers them."""


def _count_refused(plane: DataPlane, message: Any) -> None:
    """Count a call that was refused because the server is overloaded, for the model that its message names."""
    spec = getattr(message, "model_spec", None)
    model = getattr(message, "model_name", "") if spec is None else spec.name
    plane.count_refused(model, "GRPC", Code.RESOURCE_EXHAUSTED)


def _servicer(base: type, plane: DataPlane, calls: Calls, methods: Mapping[str, Any]) -> Any:
    """Return an object of a generated servicer class; its methods call the dataplane."""
    servicer = base()
    for name, answer in methods.items():
        setattr(servicer, name, calls.handler(plane, name, answer))
    return servicer


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpcOptions:
    """Sockets, limits and security of the gRPC server."""

    bound: socket.socket
    """The bound socket to listen on."""

    local: socket.socket | None = None
    """A Unix socket to listen on as well, without TLS, as in TensorFlow Serving; None: no Unix socket."""

    arguments: Mapping[str, str | int] = field(default_factory=dict)
    """gRPC's channel arguments, by name."""

    workers: int = 8
    """Number of threads for handlers."""

    max_in_flight: int = 1024
    """Maximum number of concurrent calls. A further call gets RESOURCE_EXHAUSTED, unless it is a health check."""

    max_held_bytes: int = 512 << 20
    """Maximum bytes of messages held at the same time. A call that would exceed it gets RESOURCE_EXHAUSTED."""

    limits: HttpLimits = field(default_factory=HttpLimits)
    """Limits of a connection."""

    keys: Keys | None = None
    """Accepted API keys; None accepts every call."""

    tls: Tls | None = None
    """The certificates; None serves without TLS."""

    access_log: AccessLog | None = None
    """Gets a line for each call; None: no log."""

    profiler: bool = True
    """Whether TensorFlow's profiler service is registered."""


def make_grpc_server(plane: DataPlane, health: Health, options: GrpcOptions) -> GrpcServer:
    """Return a server with all services. It answers calls after `start`.

    Raises:
        ConfigError: a channel argument of gRPC is invalid.
    """
    limits = ServerLimits(
        connection=options.limits,
        in_flight=options.max_in_flight,
        held_bytes=options.max_held_bytes,
    ).with_channel_arguments(options.arguments)
    connections = limits.connection.connections
    calls = Calls(access_log=options.access_log, keys=options.keys)
    server = GrpcServer(
        pool=CountedThreads(
            options.workers,
            "stoker-grpc",
            on_change=functools.partial(
                plane.metrics.requests_without_thread.add, entrypoint="GRPC"
            ),
        ),
        limits=limits,
        tls=None if options.tls is None else options.tls.context(connections=connections),
        intercept=None if options.keys is None else calls.check_key,
    )
    server.when_refused(functools.partial(_count_refused, plane))
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(
        _servicer(
            prediction_service_pb2_grpc.PredictionServiceServicer, plane, calls, _PREDICTION_SERVICE
        ),
        server,
    )
    server.answer_in_loop(*_HEALTH_METHODS)
    server.answer_inline(PREDICT, InlineGrpcPredict(plane, calls).answer)
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(
        _servicer(model_service_pb2_grpc.ModelServiceServicer, plane, calls, _MODEL_SERVICE), server
    )
    v2.add_service(plane, calls, server)
    health.add_to(server)
    if options.profiler:
        ProfilerService(plane, calls).add_to(server)
    add_reflection(server, with_profiler=options.profiler)
    for bound in (options.bound, options.local):
        if bound is not None:
            server.listen(bound)
    return server
