"""Spans of requests: names, attributes and times according to OpenTelemetry's conventions.

Source: OpenTelemetry semantic conventions, HTTP server spans and RPC server spans.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import unquote

from tensorflow_serving.apis import model_service_pb2, prediction_service_pb2

from stoker.serve.errors import Code
from stoker.serve.grpc.descriptions import OPEN_INFERENCE
from stoker.serve.observability.access_log import Entry
from stoker.serve.request_record import RequestRecord

Attributes = Mapping[str, str | int]

_MAX_CHARS = 256
"""Maximum number of characters of a string from a client in an attribute."""

_METHODS = frozenset(
    ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"]
)
"""HTTP methods that may occur in span names. Clients can invent other methods, which are replaced."""

_ROUTES: Sequence[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern, re.IGNORECASE | re.ASCII), text)
    for pattern, text in (
        (
            r"/v1/models/[^/:]+(?P<which>/versions/\d+|/labels/[^/:]+)?(?P<end>:\w+|/metadata)?",
            "/v1",
        ),
        (r"/v2/models/[^/]+(?P<which>/versions/[^/]+)?(?P<end>/ready|/infer)?/?", "/v2"),
    )
]

_WHICH = {"": "", "/versions": "/versions/{version}", "/labels": "/labels/{label}"}
_ENDS = frozenset((":predict", ":classify", ":regress", "/metadata", "/ready", "/infer", ""))

_SERVER_ERRORS = frozenset(
    (
        Code.UNKNOWN,
        Code.DEADLINE_EXCEEDED,
        Code.UNIMPLEMENTED,
        Code.INTERNAL,
        Code.UNAVAILABLE,
        Code.DATA_LOSS,
    )
)
"""Codes that mark a server's span as an error. Other codes are the client's errors."""

_FIRST_SERVER_ERROR = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A phase of a request."""

    name: str
    """The name of the phase."""

    began_s: float
    """Start, seconds of the same clock as the request's times."""

    ended_s: float
    """End, seconds of the same clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The span of one request."""

    name: str
    """Name with few possible values, so without the model's name."""

    attributes: Attributes
    """Attributes with OpenTelemetry's names; the names of Stoker's own attributes begin with `stoker.`."""

    began_s: float
    """Arrival of the request, seconds since 1970."""

    ended_s: float
    """End of the request, seconds since 1970."""

    error: str = ""
    """The error, if it is the server's fault; else ""."""

    parts: Sequence[Part] = field(default=())
    """The phases in the queue and in the model; empty if the request did not reach the model."""


def span_of(entry: Entry, *, now_s: float, scheme: str) -> Span:
    """Return the span of a request.

    Args:
        entry: The finished request.
        now_s: End of the request, seconds of the monotonic clock.
        scheme: "http" or "https".
    """
    named = _of_http(entry, scheme) if entry.protocol == "REST" else _of_call(entry)
    name, error, attributes = named
    shift_s = entry.at_s - now_s  # converts the monotonic clock to seconds since 1970
    began_s = min(entry.record.began_s, now_s)
    return Span(
        name=name,
        attributes={**attributes, **_of_peer(entry.peer), **_of_model(entry)},
        began_s=began_s + shift_s,
        ended_s=entry.at_s,
        error=error,
        parts=[
            Part(
                name=part.name,
                began_s=min(max(part.began_s, began_s), now_s) + shift_s,
                ended_s=min(part.ended_s, now_s) + shift_s,
            )
            for part in _parts(entry.record)
        ],
    )


def _of_http(entry: Entry, scheme: str) -> tuple[str, str, dict[str, str | int]]:
    original, _, path = entry.method.partition(" ")
    method = original if original in _METHODS else "_OTHER"
    attributes: dict[str, str | int] = {
        "http.request.method": method,
        "url.path": path[:_MAX_CHARS],
        "url.scheme": scheme,
        "http.response.status_code": int(entry.status),
        "http.request.body.size": entry.bytes_in,
        "http.response.body.size": entry.bytes_out,
    }
    if method != original:
        attributes["http.request.method_original"] = original[:_MAX_CHARS]
    route = route_of(path)
    if route:
        attributes["http.route"] = route
    error = str(entry.status) if int(entry.status) >= _FIRST_SERVER_ERROR else ""
    if error:
        attributes["error.type"] = error
    return (
        " ".join(filter(None, ("HTTP" if method != original else method, route))),
        error,
        attributes,
    )


def route_of(path: str) -> str:
    """Return a path without the parts that clients choose; "" for an unknown path."""
    for pattern, version in _ROUTES:
        found = pattern.fullmatch(path)
        end = (found["end"] or "").lower() if found else None
        if found and end in _ENDS:
            which = "/".join((found["which"] or "").lower().split("/")[:2])
            return f"{version}/models/{{model}}{_WHICH[which]}{end}"
    return "/v2" if path.rstrip("/") == "/v2" else ""


def _of_call(entry: Entry) -> tuple[str, str, dict[str, str | int]]:
    service, code = _services().get(entry.method, OPEN_INFERENCE.service), Code[str(entry.status)]
    attributes: dict[str, str | int] = {
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": entry.method,
        "rpc.grpc.status_code": int(code),
        "stoker.bytes_in": entry.bytes_in,
        "stoker.bytes_out": entry.bytes_out,
    }
    error = code.name if code in _SERVER_ERRORS else ""
    if error:
        attributes["error.type"] = error
    return f"{service}/{entry.method}", error, attributes


@cache
def _services() -> dict[str, str]:
    """Return method -> service, for TensorFlow Serving's gRPC methods."""
    described = [
        prediction_service_pb2.DESCRIPTOR.services_by_name["PredictionService"],
        model_service_pb2.DESCRIPTOR.services_by_name["ModelService"],
    ]
    return {method.name: service.full_name for service in described for method in service.methods}


def _of_peer(peer: str) -> dict[str, str | int]:
    """Return the attributes of a client's address, e.g. `1.2.3.4:5`, or from gRPC `ipv6:%5B::1%5D:5` or `unix:`."""
    if peer.startswith("unix:"):
        return {"network.transport": "unix"}
    address, _, port = unquote(peer).rpartition(":")
    address = address.removeprefix("ipv4:").removeprefix("ipv6:").strip("[]")
    if not address or not port.isdecimal():
        return {}
    return {"client.address": address, "client.port": int(port)}


def _of_model(entry: Entry) -> dict[str, str | int]:
    record = entry.record
    attributes: dict[str, str | int] = {
        "stoker.model.name": record.model[:_MAX_CHARS],
        "stoker.model.signature": record.signature[:_MAX_CHARS],
        "stoker.code": record.code,
        "stoker.request_id": entry.request_id[:_MAX_CHARS],
        "stoker.key": entry.key,
    }
    attributes = {name: value for name, value in attributes.items() if value}
    if record.version is not None:
        attributes["stoker.model.version"] = record.version
    return {**attributes, "stoker.rows": record.rows}


def _parts(record: RequestRecord) -> list[Part]:
    """Return the phases of a request.

    The times of several model calls (for several tasks, or for more rows than a batch) are summed.
    """
    if not record.run_began_s:
        return []
    began_s = record.run_began_s
    return [
        Part(name="queue", began_s=began_s - record.queued_s, ended_s=began_s),
        Part(name="model", began_s=began_s, ended_s=began_s + record.run_s),
    ]
