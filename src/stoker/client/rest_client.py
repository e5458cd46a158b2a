"""A client of TensorFlow Serving's REST interface, over a persistent connection."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stoker.client.connection import REST_URL, Connection, Tls
from stoker.client.model_client import (
    Answers,
    ModelClient,
    NoAnswerError,
    RefusedError,
    from_columns,
    from_rows,
    model_at,
    refused_fix,
)
from stoker.client.rows import Request, as_bytes, json_instances, padded
from stoker.client.signature import DTYPES_OF_JSON, ModelAt, SignatureSpec, TensorSpec
from stoker.core.errors import DataError, Plain

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SAID_CHARS = 2000
"""Maximum length of an error body that the error message shows, characters."""


class RestClient(ModelClient):
    """A client over REST; only one thread may use it at a time.

    Source: TensorFlow Serving, RESTful API.
    """

    def __init__(self, url: str = REST_URL, *, connection: Connection | None = None) -> None:
        """Create the client; it connects with the first call.

        Args:
            url: `http://host:port`, `https://...`, or `host:port`.
            connection: Time-out, token, TLS.

        Raises:
            ConfigError: the URL is invalid.
        """
        super().__init__(url, scheme="http", connection=connection)
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, model: str | ModelAt, request: Request) -> Answers:
        """Call `:predict`. The model's signatures are requested only if lists differ in length."""
        request = padded(request, lambda: self.signatures(model))
        body = json.dumps(request.body, default=_plain).encode()
        found = self._json("POST", f"{model_at(model).path}:predict", body)
        key = "predictions" if request.rows is not None else "outputs"
        if not isinstance(found, dict) or key not in found:
            raise DataError(f"the answer must hold {key!r}", got=found)
        if key == "predictions" and not isinstance(found[key], list):
            raise DataError("'predictions' must be a list with one item per row", got=found[key])
        read = from_rows if key == "predictions" else from_columns
        return Answers(outputs=read(found[key]))

    def signatures(self, model: str | ModelAt) -> dict[str, SignatureSpec]:
        """Return the model's signatures, from `/metadata`."""
        found = self._json("GET", f"{model_at(model).path}/metadata")
        try:
            definitions = found["metadata"]["signature_def"]["signature_def"]
            return {name: _signature(one) for name, one in definitions.items()}
        except (KeyError, TypeError, AttributeError, ValueError):
            raise DataError("the answer must be a model's metadata", got=found) from None

    def status(self, model: str | ModelAt) -> list[dict[str, Any]]:
        """Return version, state and reason of each version that the server knows.

        Raises:
            CallError: the server refused, or did not answer.
        """
        found = self._json("GET", model_at(model).path)
        try:
            return list(found["model_version_status"])
        except (KeyError, TypeError):
            raise DataError("the answer must be a model's status", got=found) from None

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _predict_arrays(
        self, model: ModelAt, inputs: Mapping[str, NDArray[Any]], signature: str
    ) -> Answers:
        return self.ask(model, Request(rows=json_instances(inputs, binary=()), signature=signature))

    def _json(self, method: str, path: str, body: bytes | None = None) -> Any:
        content = self._send(method, self.address.path + path, body)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise DataError(
                f"{self.address} must answer with JSON",
                got=content[:80],
                fix="Check that a model server listens at this address.",
            ) from None

    def _send(self, method: str, path: str, body: bytes | None) -> bytes:
        kept = self._connection is not None
        try:
            return self._exchange(method, path, body)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError) as error:
            self.close()
            # The server may have closed a kept connection while it was idle, so try again. If a new connection fails,
            # the cause is another one, so report it.
            if not kept:
                raise self._no_answer(error) from None
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._no_answer(error) from None
        try:
            return self._exchange(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._no_answer(error) from None

    def _exchange(self, method: str, path: str, body: bytes | None) -> bytes:
        connection = self._connection = self._connection or self._connect()
        headers = {**self._settings.headers, "Content-Type": "application/json"}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        content = response.read()
        if response.status != http.HTTPStatus.OK:
            status = str(response.status)
            raise RefusedError(
                f"{self.address} must answer over REST",
                status=f"HTTP {status}",
                said=_said(content),
                fix=refused_fix(status),
            )
        return content

    def _connect(self) -> http.client.HTTPConnection:
        host, port, wait_s = self.address.host, self.address.port, self._settings.timeout_s
        if not self.address.secure:
            return http.client.HTTPConnection(host, port, timeout=wait_s)
        context = _context(self._settings.tls)
        return http.client.HTTPSConnection(host, port, timeout=wait_s, context=context)

    def _no_answer(self, error: Exception) -> NoAnswerError:
        return no_answer(error, f"{self.address} must answer over REST", self._settings.timeout_s)


def no_answer(error: Exception, rule: str, timeout_s: float) -> NoAnswerError:
    """Return the error of a failed connection, with the next action."""
    if isinstance(error, TimeoutError):
        got = f"no answer within {timeout_s:g} s"
        return NoAnswerError(rule, got=Plain(got), fix="Set a longer time-out, or send fewer rows.")
    if isinstance(error, ConnectionRefusedError):
        fix = "Start the server (`stoker serve`), or name its address by --url."
        return NoAnswerError(rule, got=Plain("connection refused"), fix=fix)
    if isinstance(error, ssl.SSLError):
        fix = "Is it https there, and does --ca name the authority that signed its certificate?"
        return NoAnswerError(rule, got=Plain(error.reason or str(error)), fix=fix)
    if isinstance(error, http.client.BadStatusLine) and not isinstance(
        error, http.client.RemoteDisconnected
    ):
        fix = "Is it the gRPC port? Call it by gRPC (`stoker call --grpc`), or name the REST port."
        return NoAnswerError(rule, got=Plain("something that is not HTTP"), fix=fix)
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return NoAnswerError(rule, got=Plain(text))


def _context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=None if tls.ca is None else str(tls.ca))
    if tls.cert is not None and tls.key is not None:
        context.load_cert_chain(str(tls.cert), str(tls.key))
    return context


def _said(content: bytes) -> str:
    """Return the server's error message: `error` if the body is a JSON object with this key, else the body."""
    text = content[:_SAID_CHARS].decode(errors="replace").strip()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    said = found.get("error", text) if isinstance(found, dict) else text
    return said if isinstance(said, str) else json.dumps(said)


def _plain(value: Any) -> Any:
    """Convert a value that the json module cannot write: NumPy numbers and arrays, and bytes."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bytes):
        return as_bytes(value)
    raise DataError("rows may hold only numbers, strings and bytes", got=type(value).__name__)


def _signature(definition: Mapping[str, Any]) -> SignatureSpec:
    return SignatureSpec(
        inputs={name: _spec(info) for name, info in definition.get("inputs", {}).items()},
        outputs={name: _spec(info) for name, info in definition.get("outputs", {}).items()},
    )


def _spec(info: Mapping[str, Any]) -> TensorSpec:
    shape = info.get("tensor_shape", {})
    sizes = [int(dim.get("size", 0)) for dim in shape.get("dim", [])]
    return TensorSpec(
        dtype=DTYPES_OF_JSON.get(info["dtype"], info["dtype"]),
        shape=None
        if shape.get("unknown_rank")
        else tuple(None if size < 0 else size for size in sizes),
    )
