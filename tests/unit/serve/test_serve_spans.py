"""What a trace says of a request, by OpenTelemetry's conventions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker.serve.errors import Code
from stoker.serve.observability.access_log import Entry, caller_of
from stoker.serve.request_record import RequestRecord
from stoker.serve.tracing.spans import Span, route_of, span_of


def of(entry: Entry, *, now_s: float = 110.0) -> Span:
    return span_of(entry, now_s=now_s, scheme="http")


def rest(method: str = "POST /v1/models/m:predict", status: int = 200, **more: Any) -> Entry:
    record = more.pop("record", None) or RequestRecord(began_s=100.0)
    return Entry(protocol="REST", method=method, status=status, record=record, at_s=5000.0, **more)


def call(method: str, code: Code, **more: Any) -> Entry:
    record = RequestRecord(began_s=100.0)
    return Entry(
        protocol="GRPC", method=method, status=code.name, record=record, at_s=5000.0, **more
    )


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/models/m:predict", "/v1/models/{model}:predict"),
        ("/V1/models/m/Versions/12:Classify", "/v1/models/{model}/versions/{version}:classify"),
        ("/v1/models/m/labels/stable:regress", "/v1/models/{model}/labels/{label}:regress"),
        ("/v1/models/m", "/v1/models/{model}"),
        ("/v1/models/m/metadata", "/v1/models/{model}/metadata"),
        ("/v2/models/m/versions/x/infer", "/v2/models/{model}/versions/{version}/infer"),
        ("/v2/models/m/ready", "/v2/models/{model}/ready"),
        ("/v2/models/m/", "/v2/models/{model}"),
        ("/v2/", "/v2"),
        ("/v1/models/m:invented", ""),
        ("/v1/models/a/b:predict", ""),
        ("/v1/models/m/versions/x", ""),
        ("/wp-login.php", ""),
        ("", ""),
    ],
)
def test_a_route_holds_nothing_that_a_client_may_choose(path: str, route: str) -> None:
    assert route_of(path) == route


def test_a_rest_request_is_an_http_server_span() -> None:
    record = RequestRecord(
        began_s=100.0, model="m", version=3, signature="serving_default", rows=2, code="OK"
    )
    record.ran(104.0, 106.5, came_s=103.0)

    span = of(
        rest(
            record=record,
            peer="10.0.0.7:4711",
            bytes_in=20,
            bytes_out=30,
            request_id="r",
            key="shop",
        )
    )

    assert span.name == "POST /v1/models/{model}:predict"
    assert span.attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/models/m:predict",
        "url.scheme": "http",
        "http.route": "/v1/models/{model}:predict",
        "http.response.status_code": 200,
        "http.request.body.size": 20,
        "http.response.body.size": 30,
        "client.address": "10.0.0.7",
        "client.port": 4711,
        "stoker.model.name": "m",
        "stoker.model.version": 3,
        "stoker.model.signature": "serving_default",
        "stoker.rows": 2,
        "stoker.code": "OK",
        "stoker.request_id": "r",
        "stoker.key": "shop",
    }
    assert (span.began_s, span.ended_s, span.error) == (4990.0, 5000.0, "")
    assert [(part.name, part.began_s, part.ended_s) for part in span.parts] == [
        ("queue", 4993.0, 4994.0),
        ("model", 4994.0, 4996.5),
    ]


def test_a_request_that_did_not_come_to_its_model_has_no_parts() -> None:
    span = of(rest(status=404, method="GET /nothing"))

    assert (span.name, span.parts, span.error) == ("GET", [], "")
    assert "http.route" not in span.attributes
    assert "stoker.model.version" not in span.attributes


def test_parts_lie_within_their_request_whatever_its_thread_wrote_later() -> None:
    record = RequestRecord(began_s=100.0)
    record.ran(105.0, 300.0, came_s=20.0)

    span = of(rest(status=504, record=record))

    times = [(part.began_s, part.ended_s) for part in span.parts]
    assert times == [(4990.0, 4995.0), (4995.0, 5000.0)]
    assert (span.error, span.attributes["error.type"]) == ("504", "504")


def test_a_method_that_a_client_invents_is_in_no_name() -> None:
    span = of(rest(method="BREW /v1/models/m", status=405))

    assert span.name == "HTTP /v1/models/{model}"
    assert span.attributes["http.request.method"] == "_OTHER"
    assert span.attributes["http.request.method_original"] == "BREW"


def test_what_a_client_writes_is_cut() -> None:
    record = RequestRecord(began_s=100.0, model="m" * 1000)
    span = of(rest(method="GET /" + "x" * 1000, record=record))

    assert max(len(str(value)) for value in span.attributes.values()) == 256


@pytest.mark.parametrize(
    ("method", "service"),
    [
        ("Predict", "tensorflow.serving.PredictionService"),
        ("MultiInference", "tensorflow.serving.PredictionService"),
        ("GetModelStatus", "tensorflow.serving.ModelService"),
        ("ModelInfer", "inference.GRPCInferenceService"),
    ],
)
def test_a_call_is_an_rpc_server_span(method: str, service: str) -> None:
    span = of(call(method, Code.NOT_FOUND, peer="ipv6:%5B::1%5D:50"))

    assert span.name == f"{service}/{method}"
    known = {name: span.attributes[name] for name in span.attributes if name.startswith("rpc.")}
    assert known == {
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": method,
        "rpc.grpc.status_code": 5,
    }
    assert (span.attributes["client.address"], span.attributes["client.port"]) == ("::1", 50)
    assert span.error == ""


@pytest.mark.parametrize("code", list(Code))
def test_a_call_is_an_error_where_that_is_the_servers_fault(code: Code) -> None:
    """Source: OpenTelemetry, semantic conventions for gRPC: the status of a server's span."""
    servers = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL"}
    servers |= {"UNAVAILABLE", "DATA_LOSS"}
    assert of(call("Predict", code)).error == (code.name if code.name in servers else "")


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        ("ipv4:127.0.0.1:1", {"client.address": "127.0.0.1", "client.port": 1}),
        ("unix:/run/x", {"network.transport": "unix"}),
        (":", {}),
        ("", {}),
    ],
)
def test_a_client_is_named_as_far_as_it_is_known(peer: str, said: dict[str, Any]) -> None:
    attributes = of(rest(peer=peer)).attributes
    found = {name: attributes[name] for name in attributes if name.startswith(("cli", "net"))}
    assert found == said


def test_only_what_says_which_trace_it_is_is_taken_of_a_clients_headers() -> None:
    of_http = [(b"traceparent", b"00-a"), (b"tracestate", b"x=1"), (b"authorization", b"secret")]
    assert caller_of(of_http) == {"traceparent": "00-a", "tracestate": "x=1"}
    assert caller_of([("traceparent", "00-b"), ("x-bin", b"\xff")]) == {"traceparent": "00-b"}


MODULES = re.compile("opentelemetry|traces|otlp")


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, and whether that is when the file is itself."""
    tree = ast.parse(path.read_text())
    at_once = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, id(node) in at_once) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, id(node) in at_once
            yield from ((f"{node.module}.{n.name}", id(node) in at_once) for n in node.names)


def test_opentelemetry_is_loaded_by_two_modules_each_loaded_only_if_configured() -> None:
    root = Path(stoker.__file__).parent
    # Parsing all files takes seconds; an import has its module's last name in it.
    named = [p for p in root.rglob("*.py") if MODULES.search(p.read_text(encoding="utf-8"))]
    found = {path.relative_to(root).as_posix(): list(imported(path)) for path in named}

    own = "opentelemetry"
    assert {p for p, names in found.items() if any(n.startswith(own) for n, _ in names)} == {
        "serve/tracing/traces.py",
        "telemetry/writers/otlp.py",
    }
    users = ("stoker.serve.tracing.traces", "stoker.telemetry.writers.otlp")
    uses = {(p, now) for p, names in found.items() for n, now in names if n in users}
    assert uses == {("serve/process/server.py", False), ("telemetry/publish.py", False)}
