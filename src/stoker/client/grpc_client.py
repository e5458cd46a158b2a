"""A client of TensorFlow Serving's gRPC interface that does not need TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stoker.client.connection import GRPC_URL, Address, Connection, Tls
from stoker.client.messages import METADATA, PREDICT, message
from stoker.client.model_client import (
    Answers,
    CallError,
    ModelClient,
    NoAnswerError,
    RefusedError,
    model_at,
    refused_fix,
)
from stoker.client.rows import Request, padded, to_arrays
from stoker.client.signature import DTYPES, ModelAt, SignatureSpec, TensorSpec, chosen
from stoker.core.errors import ConfigError, Plain

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NO_LIMIT = -1
"""Channel options without a limit on message size: gRPC's default of 4 MiB is below TensorFlow Serving's limit."""

_SIGNATURES = "signature_def"
"""Name of the part of the metadata that is requested."""


class GrpcClient(ModelClient):
    """A client over gRPC; threads may share it.

    Source: TensorFlow Serving, apis/prediction_service.proto.
    """

    def __init__(self, url: str = GRPC_URL, *, connection: Connection | None = None) -> None:
        """Create the channel; it connects with the first call.

        Args:
            url: `host:port`, or `grpcs://host:port` for TLS.
            connection: Time-out, token, TLS.

        Raises:
            ConfigError: the address is invalid, or grpcio is not installed.
        """
        super().__init__(url, scheme="grpc", connection=connection)
        self._channel = _channel(self.address, self._settings.tls)

    def ask(self, model: str | ModelAt, request: Request) -> Answers:
        """Request the model's signatures, convert the rows to its dtypes, and call it; rows that do not fit are not sent."""
        known = self.signatures(model)
        rows = to_arrays(padded(request, lambda: known), chosen(known, request.signature))
        return self._predict_arrays(model_at(model), rows, request.signature)

    def signatures(self, model: str | ModelAt) -> dict[str, SignatureSpec]:
        """Return the model's signatures, by `GetModelMetadata`."""
        request = message("GetModelMetadataRequest")
        _fill_model(request.model_spec, model_at(model), "")
        request.metadata_field.append(_SIGNATURES)
        response = self.call(METADATA, request, "GetModelMetadataResponse")
        found = message("SignatureDefMap")
        for entry in response.metadata:
            if entry.key == _SIGNATURES:
                found.MergeFromString(entry.value.value)
        return {entry.key: _signature(entry.value) for entry in found.signature_def}

    def close(self) -> None:
        """Close the channel, for all threads."""
        self._channel.close()

    def _predict_arrays(
        self, model: ModelAt, inputs: Mapping[str, NDArray[Any]], signature: str
    ) -> Answers:
        from stoker.client.tensors import fill_tensor, to_array

        request = message("PredictRequest")
        _fill_model(request.model_spec, model, signature)
        for name, values in inputs.items():
            fill_tensor(request.inputs.add(key=name).value, values)
        response = self.call(PREDICT, request, "PredictResponse")
        return Answers(
            outputs={entry.key: to_array(entry.value) for entry in response.outputs},
            version=int(response.model_spec.version.value),
        )

    def call(self, method: str, request: Any, answers_with: str) -> Any:
        """Call a method of the server.

        Args:
            method: Path of the method.
            request: The request message.
            answers_with: Name of the response message's type.

        Raises:
            CallError: the server cannot be reached, does not answer in time, or refuses the call.
        """
        import grpc

        reader = type(message(answers_with))
        ask = self._channel.unary_unary(
            method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=reader.FromString,
        )
        # gRPC metadata keys must be lower case.
        headers = tuple((name.lower(), value) for name, value in self._settings.headers.items())
        try:
            return ask(request, timeout=self._settings.timeout_s, metadata=headers)
        except grpc.RpcError as error:
            raise self._why(error.code().name, error.details() or "") from None

    def _why(self, status: str, said: str) -> CallError:
        rule = f"{self.address} must answer over gRPC"
        if status == "DEADLINE_EXCEEDED":
            got = f"no answer within {self._settings.timeout_s:g} s"
            return NoAnswerError(
                rule, got=Plain(got), fix="Set a longer time-out, or send fewer rows."
            )
        if status == "UNAVAILABLE" and "failed to connect" in said:
            return NoAnswerError(rule, got=Plain(_unreached(said)[0]), fix=_unreached(said)[1])
        return RefusedError(rule, status=status, said=said, fix=refused_fix(status))


def _unreached(said: str) -> tuple[str, str]:
    """Return why the connection failed, and the next action, derived from gRPC's long message."""
    if "http1" in said:
        return "something that speaks HTTP/1", "Is it the REST port? Then leave out --grpc."
    if "handshake" in said.lower():
        return said.rpartition("SSL routines:")[
            2
        ], "Is it TLS there, and does --ca name the authority that signed its certificate?"
    fix = "Start the server (`stoker serve`), or name its gRPC address by --url."
    return ("connection refused" if "refused" in said.lower() else said), fix


def _channel(address: Address, tls: Tls) -> Any:
    try:
        import grpc
    except ModuleNotFoundError:
        raise ConfigError(
            "GrpcClient needs grpcio",
            got=Plain("it is not installed"),
            fix="Run `pip install 'stoker-client[grpc]'`, or use RestClient.",
        ) from None

    options = [
        ("grpc.max_receive_message_length", _NO_LIMIT),
        ("grpc.max_send_message_length", _NO_LIMIT),
        # Ignore a proxy that the environment sets: it is for the web, not for model servers.
        ("grpc.enable_http_proxy", 0),
    ]
    if not address.secure:
        return grpc.insecure_channel(str(address), options=options)
    ca, key, cert = (None if p is None else p.read_bytes() for p in (tls.ca, tls.key, tls.cert))
    return grpc.secure_channel(
        str(address), grpc.ssl_channel_credentials(ca, key, cert), options=options
    )


def _fill_model(spec: Any, model: ModelAt, signature: str) -> None:
    spec.name = model.name
    spec.signature_name = signature
    if model.version is not None:
        spec.version.value = model.version
        spec.version.SetInParent()
    elif model.label:
        spec.version_label = model.label


def _signature(definition: Any) -> SignatureSpec:
    return SignatureSpec(
        inputs={entry.key: _spec(entry.value) for entry in definition.inputs},
        outputs={entry.key: _spec(entry.value) for entry in definition.outputs},
    )


def _spec(info: Any) -> TensorSpec:
    shape = info.tensor_shape
    return TensorSpec(
        dtype=DTYPES.get(info.dtype, str(info.dtype)),
        shape=None
        if shape.unknown_rank
        else tuple(None if dim.size < 0 else dim.size for dim in shape.dim),
    )
