"""TensorFlow Serving's gRPC services, converted to and from the dataplane; and the server of all services."""

from __future__ import annotations

import functools
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    inference_pb2,
    model_management_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.dataplane.requests import PredictRequest
from stoker.serve.errors import Code, ServeError
from stoker.serve.grpc import inference, v2
from stoker.serve.grpc.calls import Calls
from stoker.serve.grpc.health import Health
from stoker.serve.grpc.inference import read_spec, spec_proto
from stoker.serve.grpc.predict import PREDICT, PredictAtOnce, read_inputs, response_of
from stoker.serve.grpc.profiler import ProfilerService
from stoker.serve.grpc.reflection import add_reflection
from stoker.serve.grpc_server.limits import ServerLimits
from stoker.serve.grpc_server.server import GrpcServer
from stoker.serve.limits import HttpLimits
from stoker.serve.observability.access_log import AccessLog
from stoker.serve.security.auth import Keys
from stoker.serve.security.tls import Tls
from stoker.serve.servables.model_config import models_of


class PredictionService(prediction_service_pb2_grpc.PredictionServiceServicer):  # type: ignore[misc]
    """TensorFlow Serving's service of that name."""

    def __init__(self, plane: DataPlane, calls: Calls) -> None:
        """Args: plane: answers; calls: starts and ends calls."""
        self._plane = plane
        self._calls = calls

    def Predict(  # noqa: N802 - the protocol's name
        self, request: predict_pb2.PredictRequest, context: grpc.ServicerContext
    ) -> predict_pb2.PredictResponse:
        """Run a model."""
        with self._calls.call(context, "Predict", request) as call:
            answer = self._plane.predict(
                PredictRequest(
                    model=read_spec(request),
                    read_inputs=functools.partial(read_inputs, request),
                    signature=request.model_spec.signature_name,
                    output_filter=tuple(request.output_filter),
                    entrypoint="GRPC",
                    deadline=call.deadline,
                )
            )
            call.response = response_of(
                answer.model,
                answer.signature,
                answer.outputs,
                as_content=self._plane.tensor_content,
            )
        return call.response

    def Classify(  # noqa: N802 - the protocol's name
        self, request: classification_pb2.ClassificationRequest, context: grpc.ServicerContext
    ) -> classification_pb2.ClassificationResponse:
        """Classify Examples."""
        with self._calls.call(context, "Classify", request) as call:
            call.response = inference.classify(self._plane, request, call.deadline)
        return call.response

    def Regress(  # noqa: N802 - the protocol's name
        self, request: regression_pb2.RegressionRequest, context: grpc.ServicerContext
    ) -> regression_pb2.RegressionResponse:
        """Regress Examples."""
        with self._calls.call(context, "Regress", request) as call:
            call.response = inference.regress(self._plane, request, call.deadline)
        return call.response

    def MultiInference(  # noqa: N802 - the protocol's name
        self, request: inference_pb2.MultiInferenceRequest, context: grpc.ServicerContext
    ) -> inference_pb2.MultiInferenceResponse:
        """Run several signatures on the same Examples."""
        with self._calls.call(context, "MultiInference", request) as call:
            call.response = inference.multi_inference(self._plane, request, call.deadline)
        return call.response

    def GetModelMetadata(  # noqa: N802 - the protocol's name
        self,
        request: get_model_metadata_pb2.GetModelMetadataRequest,
        context: grpc.ServicerContext,
    ) -> get_model_metadata_pb2.GetModelMetadataResponse:
        """Return the signatures of a version."""
        with self._calls.call(context, "GetModelMetadata", request):
            _check_fields(list(request.metadata_field))
            metadata = self._plane.metadata(read_spec(request))
        definitions = get_model_metadata_pb2.SignatureDefMap()
        for name, definition in metadata.signature_defs.items():
            definitions.signature_def[name].CopyFrom(definition)
        response = get_model_metadata_pb2.GetModelMetadataResponse()
        response.model_spec.CopyFrom(spec_proto(metadata.model, ""))
        response.metadata["signature_def"].Pack(definitions)
        return response


class ModelService(model_service_pb2_grpc.ModelServiceServicer):  # type: ignore[misc]
    """TensorFlow Serving's service of that name."""

    def __init__(self, plane: DataPlane, calls: Calls) -> None:
        """Args: plane: answers; calls: starts and ends calls."""
        self._plane = plane
        self._calls = calls

    def GetModelStatus(  # noqa: N802 - the protocol's name
        self, request: get_model_status_pb2.GetModelStatusRequest, context: grpc.ServicerContext
    ) -> get_model_status_pb2.GetModelStatusResponse:
        """Return the states of a model's versions."""
        with self._calls.call(context, "GetModelStatus", request):
            statuses = self._plane.status(read_spec(request))
        response = get_model_status_pb2.GetModelStatusResponse()
        for status in statuses:
            found = response.model_version_status.add(version=status.version, state=status.state)
            found.status.error_code = Code.UNKNOWN if status.reason else Code.OK
            found.status.error_message = status.reason
        return response

    def HandleReloadConfigRequest(  # noqa: N802 - the protocol's name
        self, request: model_management_pb2.ReloadConfigRequest, context: grpc.ServicerContext
    ) -> model_management_pb2.ReloadConfigResponse:
        """Serve exactly the models of a request."""
        with self._calls.call(context, "HandleReloadConfigRequest", request) as call:
            if request.config.WhichOneof("config") != "model_config_list":
                raise ServeError(
                    Code.INVALID_ARGUMENT,
                    "ServerModelConfig type not supported by HandleReloadConfigRequest. Only "
                    "ModelConfigList is currently supported",
                )
            self._plane.reload(models_of(request.config), deadline=call.deadline)
        return model_management_pb2.ReloadConfigResponse()


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpcOptions:
    """Sockets, limits and security of the gRPC server."""

    bound: socket.socket
    """The bound socket to answer on."""

    local: socket.socket | None = None
    """A Unix socket to answer on as well, without TLS as in TensorFlow Serving; None for none."""

    arguments: Mapping[str, str | int] = field(default_factory=dict)
    """gRPC's channel arguments, by name."""

    workers: int = 8
    """Threads for handlers."""

    max_in_flight: int = 1024
    """Most concurrent calls; another gets RESOURCE_EXHAUSTED."""

    max_held_bytes: int = 512 << 20
    """Most bytes of messages held at once; another call gets RESOURCE_EXHAUSTED."""

    limits: HttpLimits = field(default_factory=HttpLimits)
    """Limits of a connection."""

    keys: Keys | None = None
    """Accepted API keys; None accepts every call."""

    tls: Tls | None = None
    """The certificates; None serves without TLS."""

    access_log: AccessLog | None = None
    """Gets a line for each call; None for no log."""

    profiler: bool = True
    """Whether TensorFlow's profiler service is registered."""


def make_grpc_server(plane: DataPlane, health: Health, options: GrpcOptions) -> GrpcServer:
    """Return a server of all services; it answers after `start`.

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
        workers=options.workers,
        limits=limits,
        tls=None if options.tls is None else options.tls.context(connections=connections),
        intercept=None if options.keys is None else calls.check_key,
    )
    prediction = PredictionService(plane, calls)
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(prediction, server)
    server.answer_at_once(PREDICT, PredictAtOnce(plane, calls).answer)
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(plane, calls), server)
    v2.add_service(plane, calls, server)
    health.add_to(server)
    if options.profiler:
        ProfilerService(plane, calls).add_to(server)
    add_reflection(server, with_profiler=options.profiler)
    for bound in (options.bound, options.local):
        if bound is not None:
            server.listen(bound)
    return server


def _check_fields(fields: list[str]) -> None:
    if not fields:
        raise ServeError(
            Code.INVALID_ARGUMENT,
            "GetModelMetadataRequest must specify at least one metadata_field",
        )
    for name in fields:
        if name != "signature_def":
            raise ServeError(Code.INVALID_ARGUMENT, f"Metadata field {name} is not supported")
