"""The gRPC interface: TensorFlow Serving's services, converted to and from the dataplane."""

from __future__ import annotations

import dataclasses
import functools
import logging
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

from stoker.core.errors import ConfigError
from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.dataplane.requests import PredictRequest
from stoker.serve.errors import Code, ServeError
from stoker.serve.grpc import inference, v2
from stoker.serve.grpc.access import KeyInterceptor
from stoker.serve.grpc.call import Limits
from stoker.serve.grpc.calls import Calls
from stoker.serve.grpc.health import Health
from stoker.serve.grpc.inference import read_spec, spec_proto
from stoker.serve.grpc.predict import PREDICT, PredictAtOnce, read_inputs, response_of
from stoker.serve.grpc.profiler import ProfilerService
from stoker.serve.grpc.reflection import add_reflection
from stoker.serve.grpc.server import GrpcServer
from stoker.serve.limits import HttpLimits
from stoker.serve.observability.access_log import AccessLog
from stoker.serve.security.auth import Keys
from stoker.serve.security.tls import Tls
from stoker.serve.servables.model_config import models_of

_UNLIMITED = 2**31 - 1
"""The largest number that gRPC's settings have: bytes, milliseconds. Of a message it is TensorFlow
Serving's limit, protobuf's own; gRPC in Python would stop at 4 MiB."""

_LEAST_HEAD_BYTES, _MOST_HEAD_BYTES = 1 << 10, 1 << 20
"""Between them the limit of headers must be: those of a plain call take some hundred bytes."""

_MAX_STREAMS = 4096
"""Most calls of a connection at once."""

_log = logging.getLogger(__name__)


class PredictionService(prediction_service_pb2_grpc.PredictionServiceServicer):  # type: ignore[misc]
    """Every call of TensorFlow Serving's service of that name."""

    def __init__(self, plane: DataPlane, calls: Calls) -> None:
        """Args: plane: what answers; calls: opens and ends calls."""
        self._plane = plane
        self._calls = calls

    def Predict(  # noqa: N802 - the protocol's name
        self, request: predict_pb2.PredictRequest, context: grpc.ServicerContext
    ) -> predict_pb2.PredictResponse:
        """Ask a model."""
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
        """The signatures of a version."""
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
    """Every call of TensorFlow Serving's service of that name."""

    def __init__(self, plane: DataPlane, calls: Calls) -> None:
        """Args: plane: what answers; calls: opens and ends calls."""
        self._plane = plane
        self._calls = calls

    def GetModelStatus(  # noqa: N802 - the protocol's name
        self, request: get_model_status_pb2.GetModelStatusRequest, context: grpc.ServicerContext
    ) -> get_model_status_pb2.GetModelStatusResponse:
        """The states of a model's versions."""
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
        """Serve the models of a request and no other."""
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
    """Where calls come from, and what they may take."""

    bound: socket.socket
    """The socket to answer on."""

    local: socket.socket | None = None
    """A Unix socket to answer on too, without TLS as TensorFlow Serving has it; none if None."""

    arguments: Mapping[str, str | int] = field(default_factory=dict)
    """More of gRPC's own settings, by their names."""

    workers: int = 8
    """Threads that answer."""

    max_in_flight: int = 1024
    """Most calls under way; another gets RESOURCE_EXHAUSTED."""

    max_held_bytes: int = 512 << 20
    """Most bytes of messages under way at once; another call gets RESOURCE_EXHAUSTED."""

    limits: HttpLimits = field(default_factory=HttpLimits)
    """What a connection may take."""

    keys: Keys | None = None
    """Who may call; everybody if None."""

    tls: Tls | None = None
    """The certificates; none if None."""

    access_log: AccessLog | None = None
    """Where a line for each call goes; nowhere if None."""

    profiler: bool = True
    """Whether TensorFlow's profiler service answers."""


def make_grpc_server(plane: DataPlane, health: Health, options: GrpcOptions) -> GrpcServer:
    """A server that answers once it is started.

    Raises:
        ConfigError: one of gRPC's own settings is wrong.
    """
    limits = _limits(options)
    connections = limits.connection.connections
    server = GrpcServer(
        workers=options.workers,
        limits=limits,
        tls=None if options.tls is None else options.tls.context(connections=connections),
        intercept=None
        if options.keys is None
        else KeyInterceptor(options.keys, options.access_log).intercept_service,
    )
    calls = Calls(access_log=options.access_log, keys=options.keys)
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


def _limits(options: GrpcOptions) -> Limits:
    """Those of the options, changed by gRPC's own settings.

    Raises:
        ConfigError: one of these is no such number.
    """
    given = dict(options.arguments)

    def taken(name: str, default: int, *, least: int = 1) -> int:
        value = given.pop(name, default)
        if value == -1:  # gRPC's word for no limit
            return _UNLIMITED
        if not isinstance(value, int) or not least <= value <= _UNLIMITED:
            raise ConfigError(
                f"{name} must be a whole number from {least:,} to {_UNLIMITED:,}, or -1",
                got=value,
                fix="Correct it in --grpc_channel_arguments.",
            )
        return value

    head_bytes = taken("grpc.max_metadata_size", options.limits.head_bytes, least=_LEAST_HEAD_BYTES)
    limits = Limits(
        connection=dataclasses.replace(
            options.limits, head_bytes=min(head_bytes, _MOST_HEAD_BYTES)
        ),
        in_flight=options.max_in_flight,
        receive_bytes=taken("grpc.max_receive_message_length", _UNLIMITED, least=0),
        send_bytes=taken("grpc.max_send_message_length", _UNLIMITED, least=0),
        held_bytes=options.max_held_bytes,
        streams=taken("grpc.max_concurrent_streams", _MAX_STREAMS),
        age_s=taken("grpc.max_connection_age_ms", _UNLIMITED) / 1000,
        grace_s=taken("grpc.max_connection_age_grace_ms", _UNLIMITED) / 1000,
        idle_s=taken("grpc.max_connection_idle_ms", _UNLIMITED) / 1000,
    )
    for name in given:
        _log.warning("--grpc_channel_arguments: %s has no effect here", name)
    return limits


def _check_fields(fields: list[str]) -> None:
    if not fields:
        raise ServeError(
            Code.INVALID_ARGUMENT,
            "GetModelMetadataRequest must specify at least one metadata_field",
        )
    for name in fields:
        if name != "signature_def":
            raise ServeError(Code.INVALID_ARGUMENT, f"Metadata field {name} is not supported")
