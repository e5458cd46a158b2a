"""The gRPC interface: TensorFlow Serving's services, converted to and from the dataplane."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
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
from stoker.export.callpath import Signature
from stoker.serve.access_log import AccessLog
from stoker.serve.auth import Keys
from stoker.serve.dataplane import DataPlane
from stoker.serve.errors import Code, ServeError
from stoker.serve.grpc import inference, v2
from stoker.serve.grpc.access import KeyInterceptor, credentials
from stoker.serve.grpc.calls import Calls
from stoker.serve.grpc.health import Health, add_reflection
from stoker.serve.grpc.inference import fill_spec, read_spec, spec_proto
from stoker.serve.model_config import models_of
from stoker.serve.requests import ModelSpec, PredictRequest, Tensors
from stoker.serve.tensors import fill, to_array
from stoker.serve.tls import Tls

_MAX_MESSAGE_BYTES = 2**31 - 1
"""TensorFlow Serving's limit, protobuf's own; gRPC in Python would stop at 4 MiB."""

_MAX_METADATA_BYTES = 32 << 10
"""Largest headers of a call."""

_ARGUMENTS: dict[str, str | int] = {
    "grpc.max_receive_message_length": _MAX_MESSAGE_BYTES,
    "grpc.max_send_message_length": _MAX_MESSAGE_BYTES,
    "grpc.max_metadata_size": _MAX_METADATA_BYTES,
    "grpc.http2.min_recv_ping_interval_without_data_ms": 10_000,
    "grpc.http2.max_ping_strikes": 3,
}
"""gRPC's settings, unless `grpc_channel_arguments` has others."""


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
        at_once = self._predicted_at_once(request, context)
        if at_once is not None:
            return at_once
        with self._calls.call(context, "Predict", request) as call:
            answer = self._plane.predict(
                PredictRequest(
                    model=read_spec(request),
                    read_inputs=functools.partial(_read_inputs, request),
                    signature=request.model_spec.signature_name,
                    output_filter=tuple(request.output_filter),
                    entrypoint="GRPC",
                    patience=call.patience,
                )
            )
            call.response = _response(answer.model, answer.signature, answer.outputs)
        return call.response

    def _predicted_at_once(
        self, request: predict_pb2.PredictRequest, context: grpc.ServicerContext
    ) -> predict_pb2.PredictResponse | None:
        """The answer of a model that is quick and free; None where all that a call needs is needed."""
        left_s = context.time_remaining()
        if self._calls.noted or request.output_filter or (left_s is not None and left_s <= 0):
            return None
        try:
            spec = read_spec(request)
        except ServeError:
            return None
        found = self._plane.predict_at_once(
            spec,
            request.model_spec.signature_name,
            functools.partial(_read_inputs, request),
            came_s=(time.monotonic(),),
            entrypoint="GRPC",
        )
        if found is None:
            return None
        model = ModelSpec(name=spec.name, version=found.version)
        return _response(model, found.signature, found.outputs)

    def Classify(  # noqa: N802 - the protocol's name
        self, request: classification_pb2.ClassificationRequest, context: grpc.ServicerContext
    ) -> classification_pb2.ClassificationResponse:
        """Classify Examples."""
        with self._calls.call(context, "Classify", request) as call:
            call.response = inference.classify(self._plane, request, call.patience)
        return call.response

    def Regress(  # noqa: N802 - the protocol's name
        self, request: regression_pb2.RegressionRequest, context: grpc.ServicerContext
    ) -> regression_pb2.RegressionResponse:
        """Regress Examples."""
        with self._calls.call(context, "Regress", request) as call:
            call.response = inference.regress(self._plane, request, call.patience)
        return call.response

    def MultiInference(  # noqa: N802 - the protocol's name
        self, request: inference_pb2.MultiInferenceRequest, context: grpc.ServicerContext
    ) -> inference_pb2.MultiInferenceResponse:
        """Run several signatures on the same Examples."""
        with self._calls.call(context, "MultiInference", request) as call:
            call.response = inference.multi_inference(self._plane, request, call.patience)
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
            self._plane.reload(models_of(request.config), patience=call.patience)
        return model_management_pb2.ReloadConfigResponse()


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpcOptions:
    """Where calls come from, and what they may take."""

    host: str
    """The address."""

    port: int
    """The port, 0 for a free one."""

    socket_path: str = ""
    """A Unix socket to answer on too; none if empty."""

    arguments: Mapping[str, str | int] = field(default_factory=dict)
    """More of gRPC's own settings, by their names."""

    workers: int = 8
    """Threads that answer."""

    max_in_flight: int = 1024
    """Most calls under way; another gets RESOURCE_EXHAUSTED."""

    shared: bool = False
    """Whether other processes may bind the port too."""

    keys: Keys | None = None
    """Who may call; everybody if None."""

    tls: Tls | None = None
    """The certificates; none if None."""

    access_log: AccessLog | None = None
    """Where a line for each call goes; nowhere if None."""


def make_grpc_server(
    plane: DataPlane, health: Health, options: GrpcOptions
) -> tuple[grpc.Server, int]:
    """A server that is bound but not started, and its real port.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
    """
    # A second server on the port must fail, unless it is one of ours.
    shared = {"grpc.so_reuseport": int(options.shared)}
    server = grpc.server(
        ThreadPoolExecutor(options.workers, thread_name_prefix="stoker-grpc"),
        options=list({**_ARGUMENTS, **shared, **options.arguments}.items()),
        interceptors=[]
        if options.keys is None
        else [KeyInterceptor(options.keys, options.access_log)],
        maximum_concurrent_rpcs=options.max_in_flight,
    )
    calls = Calls(access_log=options.access_log, keys=options.keys)
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(
        PredictionService(plane, calls), server
    )
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(plane, calls), server)
    v2.add_service(plane, calls, server)
    health.add_to(server)
    add_reflection(server)
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"{host}:{options.port}"
    try:
        if options.socket_path:  # the file's mode says who may; TensorFlow Serving has no TLS there
            server.add_insecure_port(f"unix:{options.socket_path}")
        if options.tls is None:
            return server, server.add_insecure_port(address)
        return server, server.add_secure_port(address, credentials(options.tls))
    except RuntimeError as error:
        raise ConfigError(
            "the gRPC port must be free on this machine",
            got=address,
            fix="Choose another --port, or 0 for a free one.",
        ) from error


def _read_inputs(request: predict_pb2.PredictRequest, _signature: Signature) -> Tensors:
    return {name: to_array(proto, name=name) for name, proto in request.inputs.items()}


def _response(model: ModelSpec, signature: str, outputs: Tensors) -> predict_pb2.PredictResponse:
    response = predict_pb2.PredictResponse()
    fill_spec(response.model_spec, model, signature)
    for name, array in outputs.items():
        fill(response.outputs[name], array)
    return response


def _check_fields(fields: list[str]) -> None:
    if not fields:
        raise ServeError(
            Code.INVALID_ARGUMENT,
            "GetModelMetadataRequest must specify at least one metadata_field",
        )
    for name in fields:
        if name != "signature_def":
            raise ServeError(Code.INVALID_ARGUMENT, f"Metadata field {name} is not supported")
