"""What a server holds its clients to: sizes, numbers, time, keys and certificates."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import http.client
import json
import select
import shutil
import socket
import ssl
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
import tensorflow as tf
from google.protobuf import text_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tensorflow_serving.apis import (
    model_management_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_log_pb2,
    prediction_service_pb2_grpc,
)
from tests.integration.serve.conftest import started

from stoker.core.errors import ConfigError
from stoker.registry.repository import Repository
from stoker.serve.config import ServeConfig, read_metrics_path
from stoker.serve.limits import METRICS_PATH, HttpLimits
from stoker.serve.process.server import Server
from stoker.serve.security.tls import HANDSHAKES

AskAt = Callable[..., Any]
HALF = "/v1/models/half:predict"
ROW = {"instances": [[1.0]]}
KEYS = {"reader": "a-reader-of-the-model", "admin": "an-admin-of-the-model"}


@pytest.fixture(scope="module")
def base(exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = Repository(tmp_path_factory.mktemp("models"))
    repository.push(exported["half_plus_two"], "half")
    return repository.base("half")


def running(base: Path, **more: Any) -> AbstractContextManager[Server]:
    config = ServeConfig(
        models={"half": base}, rest_port=0, grpc_port=0, lame_duck_s=0.0, drain_s=2, poll_s=0.1
    )
    return started(dataclasses.replace(config, **more))


@pytest.fixture(scope="module")
def strict(base: Path) -> Iterator[Server]:
    """A server with a short deadline and small limits."""
    limits = HttpLimits(connections=20, head_bytes=4096, head_s=0.5, body_s=0.7, send_s=0.5)
    with running(base, http=limits, max_body_bytes=100_000, max_held_bytes=150_000) as server:
        yield server


def raw(server: Server, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """What comes back for these bytes until the server closes, or a second passes without a byte."""
    with socket.create_connection(("127.0.0.1", server.rest_port), timeout=5) as client:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                client.sendall(part)
                time.sleep(pause_s)
        found = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while piece := client.recv(65536):
                found += piece
                client.settimeout(1)
        return found


HEAD = b"POST /v1/models/half:predict HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([b"GET /livez HTTP/1.1\r\nX: " + b"a" * 5000 + b"\r\n\r\n"], b"431"),
        ([b"GET /livez HTTP/1.1\r\n" + b"X: a\r\n" * 2000 + b"\r\n"], b"431"),
        ([b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n"], b"431"),
        ([b"GET /livez HTTP/1.1\r\nX: " + b"a" * 1000] + [b"a" * 1000] * 5, b"431"),
        ([b"nonsense\r\n\r\n"], b"400"),
        ([b"\x16\x03\x01\x02\x00\x01\x00"], b"400"),
        ([HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}"], b"400"),
        ([HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"], b"400"),
        ([HEAD + b"Content-Length: -1\r\n\r\n"], b"400"),
        ([HEAD + b"Content-Length: 200000\r\n\r\n"], b"413"),
        ([HEAD + b"Content-Length: 2\r\nX\0: 1\r\n\r\n{}"], b"400"),
        ([HEAD + b"Content-Encoding: br\r\nContent-Length: 2\r\n\r\n{}"], b"415"),
        ([b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"], b"404"),
    ],
)
def test_a_request_that_is_too_large_or_no_http_is_refused(
    strict: Server, parts: list[bytes], status: bytes
) -> None:
    answer = raw(strict, *parts)

    assert answer.split(b" ")[1] == status, answer
    assert b"Traceback" not in answer


def test_wrong_bytes_after_a_request_do_not_prevent_its_answer(strict: Server) -> None:
    body = json.dumps(ROW).encode()
    good = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body

    answer = raw(strict, good + b"nonsense\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b'{"predictions": [[2.5]]}')
    assert answer.count(b"HTTP/1.1") == 1


def test_slow_clients_are_cut_and_others_notice_nothing(strict: Server, ask_at: AskAt) -> None:
    assert raw(strict, b"GET /livez HT", b"TP", pause_s=0.3).startswith(b"HTTP/1.1 408")
    body = raw(strict, HEAD + b"Content-Length: 9\r\n\r\n", *[b"1"] * 4, pause_s=0.25)
    assert body.startswith(b"HTTP/1.1 408")
    with socket.create_connection(("127.0.0.1", strict.rest_port), timeout=5) as silent:
        assert silent.recv(1) == b""
    assert ask_at(strict.rest_port, HALF, ROW).status == 200


def test_more_connections_than_allowed_are_turned_away_for_a_while(
    strict: Server, ask_at: AskAt
) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(
                socket.create_connection(("127.0.0.1", strict.rest_port), timeout=5)
            )
        answer = raw(strict)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in answer
    end_s = time.monotonic() + 30
    while ask_at(strict.rest_port, "/livez").status != 200:
        assert time.monotonic() < end_s


def test_bodies_held_for_others_are_bounded_and_given_back(strict: Server, ask_at: AskAt) -> None:
    half = HEAD + b"Content-Length: 100000\r\n\r\n" + b" " * 80_000
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", strict.rest_port)))
            for _ in range(2)
        ]
        for client in clients:
            client.settimeout(5)
            client.sendall(half)
        statuses = [client.recv(100).split(b" ")[1] for client in clients]
        assert sorted(statuses) == [b"408", b"503"]
    assert ask_at(strict.rest_port, HALF, ROW).status == 200
    assert strict._app.held_bytes == 0
    assert strict._app._in_flight == 0


def test_gzip_goes_both_ways_and_a_bomb_goes_nowhere(strict: Server) -> None:
    def ask(body: bytes, **headers: str) -> tuple[int, bytes, str | None]:
        connection = http.client.HTTPConnection("127.0.0.1", strict.rest_port, timeout=10)
        connection.request("POST", HALF, body, {"Content-Encoding": "gzip", **headers})
        answer = connection.getresponse()
        found = answer.status, answer.read(), answer.getheader("Content-Encoding")
        connection.close()
        return found

    rows = json.dumps({"instances": [[float(n)] for n in range(1000)]}).encode()
    status, found, encoding = ask(gzip.compress(rows), **{"Accept-Encoding": "gzip"})
    assert (status, encoding) == (200, "gzip")
    assert json.loads(gzip.decompress(found))["predictions"][999] == [501.5]
    plain = ask(gzip.compress(rows), **{"Accept-Encoding": "gzip;q=0, br"})
    assert (plain[2], len(json.loads(plain[1])["predictions"])) == (None, 1000)
    small = ask(gzip.compress(json.dumps(ROW).encode()), **{"Accept-Encoding": "gzip"})
    assert small == (200, b'{"predictions": [[2.5]]}', None)

    deflate = {"Content-Encoding": "deflate"}
    assert ask(zlib.compress(json.dumps(ROW).encode()), **deflate)[:2] == small[:2]
    assert ask(zlib.compress(b" " * 10_000_000), **deflate)[0] == 413
    assert ask(gzip.compress(rows), **deflate)[0] == 400

    assert ask(gzip.compress(b" " * 10_000_000))[0] == 413
    assert ask(gzip.compress(rows)[:-5])[0] == 400
    assert ask(gzip.compress(rows) + b"more")[0] == 400
    assert ask(b"no gzip")[0] == 400
    assert ask(b"")[0] == 400


def test_too_many_requests_under_way_are_refused_for_now(base: Path, ask_at: AskAt) -> None:
    with running(base, max_in_flight=2) as server:
        head = HEAD + b"Content-Length: 9\r\n\r\n"
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                waiting = stack.enter_context(
                    socket.create_connection(("127.0.0.1", server.rest_port))
                )
                waiting.sendall(head)
            end_s = time.monotonic() + 30
            while server._app._in_flight < 2:
                assert time.monotonic() < end_s
                time.sleep(0.01)
            answer = ask_at(server.rest_port, HALF, ROW)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            for path in ("/livez", "/v1/models/half", "/v2/models/half/ready"):
                assert ask_at(server.rest_port, path).status == 200, "health checks are answered"
            assert ask_at(server.rest_port, "/v1/models/half/metadata").status == 503
            metrics = ask_at(server.rest_port, METRICS_PATH).body
            refused = 'stoker_request_count{model_name="half",version="",status="UNAVAILABLE"} 2'
            assert refused in metrics, "the alerts on failed requests see it"
        while ask_at(server.rest_port, HALF, ROW).status != 200:
            assert time.monotonic() < end_s


def predict(port: int, *, credentials: Any = None, metadata: Any = (), address: str = "") -> Any:
    address = address or f"localhost:{port}"
    opened = (
        grpc.insecure_channel(address)
        if credentials is None
        else grpc.secure_channel(address, credentials)
    )
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "half"
    request.inputs["x"].CopyFrom(tf.make_tensor_proto([[1.0]]))
    with opened as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        answer = stub.Predict(request, metadata=metadata, timeout=20, wait_for_ready=False)
    return list(answer.outputs["y"].float_val)


def test_grpc_is_answered_on_a_unix_socket_too_and_takes_its_own_settings(
    base: Path, tmp_path: Path
) -> None:
    path = tmp_path / "grpc.sock"
    small = {"grpc.max_receive_message_length": 1000}
    with running(base, grpc_socket_path=str(path), grpc_channel_arguments=small) as server:
        assert predict(0, address=f"unix:{path}") == [2.5]
        assert predict(server.grpc_port) == [2.5]
        request = predict_pb2.PredictRequest()
        request.model_spec.name = "h" * 2000
        with grpc.insecure_channel(f"unix:{path}") as channel:
            stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
            assert code_of(lambda: stub.Predict(request, timeout=20)) == "RESOURCE_EXHAUSTED"


def code_of(call: Callable[[], Any]) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return str(caught.value.code().name)


def test_only_a_known_key_is_let_in_and_only_an_admin_reloads(
    base: Path, tmp_path: Path, ask_at: AskAt
) -> None:
    import hashlib

    admin = hashlib.sha256(KEYS["admin"].encode()).hexdigest()
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        f"- {{name: r, role: predict, key: {KEYS['reader']}}}\n"
        f"- {{name: a, role: admin, sha256: {admin}}}\n"
    )
    with running(base, keys_file=keys) as server:
        port = server.rest_port
        refused = ask_at(port, HALF, ROW)
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert ask_at(port, HALF, ROW, Authorization="Bearer nonsense").status == 401
        assert ask_at(port, HALF, ROW, Authorization="Basic abc").status == 401
        assert ask_at(port, HALF, ROW, **{"X-API-Key": ""}).status == 401
        assert ask_at(port, "/monitoring/prometheus/metrics").status == 401
        assert ask_at(port, "/livez").status == 200
        assert ask_at(port, "/readyz").status == 200
        bearer = {"Authorization": f"Bearer {KEYS['reader']}"}
        assert ask_at(port, HALF, ROW, **bearer).status == 200
        assert ask_at(port, HALF, ROW, **{"X-API-Key": KEYS["admin"]}).status == 200

        assert code_of(lambda: predict(server.grpc_port)) == "UNAUTHENTICATED"
        reader = (("authorization", f"Bearer {KEYS['reader']}"),)
        assert predict(server.grpc_port, metadata=reader) == [2.5]
        request = model_management_pb2.ReloadConfigRequest()
        text_format.Parse(
            f'model_config_list {{ config {{ name: "half" base_path: "{base}" }} }}',
            request.config,
        )
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            reload = model_service_pb2_grpc.ModelServiceStub(channel).HandleReloadConfigRequest
            denied = code_of(lambda: reload(request, metadata=reader, timeout=20))
            assert denied == "PERMISSION_DENIED"
            reload(request, metadata=(("x-api-key", KEYS["admin"]),), timeout=20)
            health = health_pb2_grpc.HealthStub(channel)
            probe = health_pb2.HealthCheckRequest()
            serving = health_pb2.HealthCheckResponse.SERVING
            assert health.Check(probe, timeout=20).status == serving
            assert next(health.Watch(probe, timeout=20)).status == serving
            names = health_pb2.HealthListRequest()
            assert code_of(lambda: health.List(names, timeout=20)) == "UNAUTHENTICATED"
            assert "half" in health.List(names, metadata=reader, timeout=20).statuses


CORS = {
    "access-control-allow-origin": "*",
    "access-control-allow-methods": "POST, GET",
    "access-control-allow-headers": "Content-Type",
}
PAGE = {"Origin": "https://page.example"}


@pytest.mark.parametrize("wanted", [True, False])
def test_pages_of_other_origins_may_ask_where_that_is_wanted(
    base: Path, ask_at: AskAt, wanted: bool
) -> None:
    """As TensorFlow Serving: on every answer under /v1, whatever its status, and on no other."""
    with running(base, cors=wanted) as server:
        port, before = server.rest_port, metrics_of(server, ask_at)
        answers = [
            ask_at(port, HALF, ROW, **PAGE),  # small: answered in the loop
            ask_at(port, HALF, {"instances": [[1.0]] * 9000}, **PAGE),
            ask_at(port, HALF, {"instances": "x"}, **PAGE),
            ask_at(port, "/v1/nothing", **PAGE),
            ask_at(port, "/v1/models/half", **PAGE),
            ask_at(port, "/v2/models/half", **PAGE),
            ask_at(port, HALF, method="OPTIONS", **PAGE),
            ask_at(port, HALF, method="OPTIONS"),
        ]
        others = [ask_at(port, "/livez", **PAGE), ask_at(port, "/nothing", **PAGE)]
        counted = metrics_of(server, ask_at) - before

    assert [answer.status for answer in answers] == [200, 200, 400, 400, 200, 200, 200, 400]
    assert [answer.body for answer in answers[-2:]] == ["", ""]
    assert [cors_of(answer) for answer in answers] == [CORS if wanted else {}] * len(answers)
    assert [cors_of(answer) for answer in others] == [{}, {}]
    named = ':tensorflow:serving:request_count{model_name="",status='
    assert {line for line in counted if line.startswith(named)} == {
        f'{named}"OK"}} 1',
        f'{named}"FAILED_PRECONDITION"}} 1',
        f'{named}"INVALID_ARGUMENT"}} 1',
    }


def test_a_browser_asks_without_a_key_whether_it_may_send_one(
    base: Path, tmp_path: Path, ask_at: AskAt
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{name: r, role: predict, key: {KEYS['reader']}}}\n")
    with running(base, cors=True, keys_file=keys) as server:
        may = ask_at(server.rest_port, HALF, method="OPTIONS", **PAGE)
        refused = ask_at(server.rest_port, HALF, ROW, **PAGE)

    with_keys = {"access-control-allow-headers": "Content-Type, Authorization, X-API-Key"}
    assert (may.status, cors_of(may)) == (200, CORS | with_keys)
    assert (refused.status, cors_of(refused)) == (401, CORS | with_keys)


def metrics_of(server: Server, ask_at: AskAt) -> set[str]:
    return set(ask_at(server.rest_port, "/monitoring/prometheus/metrics").body.splitlines())


def cors_of(answer: Any) -> dict[str, str]:
    named = {name.lower(): value for name, value in answer.headers.items()}
    return {name: value for name, value in named.items() if name.startswith("access-control")}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "- {name: a, role: predict}",
        "- {name: a, role: king, key: 0123456789abcdef}",
        "- {name: a, role: predict, key: short}",
        "- {name: a, role: predict, key: 0123456789abcdef, sha256: ab}",
        "- {name: a, role: predict, sha256: ab}",
        "- {name: a, role: predict, key: 0123456789abcdef, more: 1}",
        "- text",
        "{a: [",
    ],
)
def test_a_wrong_file_of_keys_is_refused_without_showing_a_key(
    base: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "keys.yaml").write_text(text)
    config = ServeConfig(
        models={"half": base}, rest_port=0, grpc_port=0, keys_file=tmp_path / "keys.yaml"
    )

    with pytest.raises(ConfigError) as caught:
        Server(config)
    assert "0123456789abcdef" not in caught.value.line()


def test_an_address_that_others_reach_needs_authentication(base: Path, tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(ConfigError, match="without authentication"):
            ServeConfig(models={"half": base}, host=host)
        ServeConfig(models={"half": base}, host=host, allow_unauthenticated=True)
        ServeConfig(models={"half": base}, host=host, keys_file=tmp_path / "keys")
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        ServeConfig(models={"half": base}, host=host)


@dataclasses.dataclass(frozen=True)
class Certificates:
    authority: str
    certificate: str
    key: str
    folder: Path


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """An authority, and one certificate from it for localhost, for server and client alike."""
    openssl = shutil.which("openssl")
    assert openssl is not None, "the tests of TLS need the openssl program"
    folder = tmp_path_factory.mktemp("tls")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    new = ["req", "-newkey", "rsa:2048", "-nodes"]
    # Python 3.13's clients refuse an authority that does not say what its key is for.
    usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    made = ["-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca"]
    run(*new, *made, *usage)
    run(*new, "-keyout", "key.pem", "-out", "request", "-subj", "/CN=localhost")
    said = "subjectAltName=DNS:localhost,IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n"
    (folder / "names").write_text(said)
    run(
        *["x509", "-req", "-in", "request", "-CA", "ca.pem", "-CAkey", "ca.key"],
        *["-CAcreateserial", "-days", "2", "-extfile", "names", "-out", "cert.pem"],
    )
    texts = [(folder / name).read_text() for name in ("ca.pem", "cert.pem", "key.pem")]
    return Certificates(texts[0], texts[1], texts[2], folder)


def ssl_file(tmp_path: Path, found: Certificates, *, verify: bool) -> Path:
    path = tmp_path / "ssl.config"
    parts = {"server_key": found.key, "server_cert": found.certificate}
    if verify:
        parts["custom_ca"] = found.authority
    lines = [f"{name}: {json.dumps(text)}" for name, text in parts.items()]
    path.write_text("\n".join([*lines, f"client_verify: {str(verify).lower()}"]))
    return path


def https(server: Server, context: ssl.SSLContext) -> int:
    connection = http.client.HTTPSConnection(
        "localhost", server.rest_port, timeout=10, context=context
    )
    try:
        connection.request("POST", HALF, json.dumps(ROW))
        return connection.getresponse().status
    finally:
        connection.close()


def test_tls_on_both_ports(base: Path, tmp_path: Path, certificates: Certificates) -> None:
    trusting = ssl.create_default_context(cadata=certificates.authority)
    trust = grpc.ssl_channel_credentials(certificates.authority.encode())
    with running(base, ssl_config_file=ssl_file(tmp_path, certificates, verify=False)) as server:
        assert https(server, trusting) == 200
        with pytest.raises(ssl.SSLError):
            https(server, ssl.create_default_context())
        assert predict(server.grpc_port, credentials=trust) == [2.5]
        assert code_of(lambda: predict(server.grpc_port)) == "UNAVAILABLE"


def test_clients_that_never_shake_hands_are_counted(
    base: Path, tmp_path: Path, certificates: Certificates
) -> None:
    """They take no descriptor of a process that has a limit of connections."""
    trusting = ssl.create_default_context(cadata=certificates.authority)
    trust = grpc.ssl_channel_credentials(certificates.authority.encode())
    file = ssl_file(tmp_path, certificates, verify=False)
    with running(base, ssl_config_file=file, http=HttpLimits(connections=2)) as server:
        for port in (server.rest_port, server.grpc_port):
            silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(HANDSHAKES + 40)]
            try:
                until_s = time.monotonic() + 60
                cut = 0
                while cut < 38:
                    assert time.monotonic() < until_s, f"{cut} were cut"
                    ready, _, _ = select.select(silent, [], [], 0.1)
                    cut = len(ready)
                assert cut == 38
            finally:
                for one in silent:
                    one.close()

        def answers() -> bool:  # once the server has seen that they are gone
            with contextlib.suppress(OSError, grpc.RpcError):
                rest = https(server, trusting)
                return (rest, predict(server.grpc_port, credentials=trust)) == (200, [2.5])
            return False

        while not answers():
            assert time.monotonic() < until_s


def test_a_handshake_that_never_ends_is_closed(
    base: Path, tmp_path: Path, certificates: Certificates
) -> None:
    file = ssl_file(tmp_path, certificates, verify=False)
    with running(base, ssl_config_file=file, http=HttpLimits(head_s=1.0)) as server:
        for port in (server.rest_port, server.grpc_port):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as silent:
                silent.sendall(b"\x16\x03\x01")
                assert silent.recv(1) == b"", "after head_s, and not after a minute"


def test_mutual_tls_on_both_ports(base: Path, tmp_path: Path, certificates: Certificates) -> None:
    trusting = ssl.create_default_context(cadata=certificates.authority)
    trust = grpc.ssl_channel_credentials(certificates.authority.encode())
    own = grpc.ssl_channel_credentials(
        certificates.authority.encode(),
        certificates.key.encode(),
        certificates.certificate.encode(),
    )
    with running(base, ssl_config_file=ssl_file(tmp_path, certificates, verify=True)) as server:
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.BadStatusLine)):
            https(server, trusting)
        trusting.load_cert_chain(certificates.folder / "cert.pem", certificates.folder / "key.pem")
        assert https(server, trusting) == 200
        assert code_of(lambda: predict(server.grpc_port, credentials=trust)) == "UNAVAILABLE"
        assert predict(server.grpc_port, credentials=own) == [2.5]


def test_a_wrong_ssl_file_is_refused(tmp_path: Path, base: Path) -> None:
    for text in ("", "server_key: 'x'", "server_key: 'x' server_cert: 'y'", "nonsense"):
        (tmp_path / "ssl.config").write_text(text)
        with pytest.raises(ConfigError):
            Server(
                ServeConfig(
                    models={"half": base},
                    rest_port=0,
                    grpc_port=0,
                    ssl_config_file=tmp_path / "ssl.config",
                )
            )


def test_the_metrics_are_where_the_file_says(base: Path, tmp_path: Path, ask_at: AskAt) -> None:
    file = tmp_path / "monitoring.config"
    file.write_text('prometheus_config { enable: true path: "/metrics" }')
    assert read_metrics_path(file) == "/metrics"
    file.write_text("prometheus_config { enable: true }")
    assert read_metrics_path(file) == "/monitoring/prometheus/metrics"
    file.write_text("")
    assert read_metrics_path(file) is None
    file.write_text('prometheus_config { enable: true path: "metrics" }')
    with pytest.raises(ConfigError):
        read_metrics_path(file)

    with running(base, metrics_path="/metrics") as server:
        assert "request_latency" in ask_at(server.rest_port, "/metrics").body
        assert ask_at(server.rest_port, "/monitoring/prometheus/metrics").status == 404


def warm_up_file(folder: Path, *logs: prediction_log_pb2.PredictionLog) -> Path:
    path = folder / "assets.extra" / "tf_serving_warmup_requests"
    path.parent.mkdir()
    with tf.io.TFRecordWriter(str(path)) as writer:
        for log in logs:
            writer.write(log.SerializeToString())
    return path


def logged(value: Any) -> prediction_log_pb2.PredictionLog:
    log = prediction_log_pb2.PredictionLog()
    log.predict_log.request.inputs["x"].CopyFrom(tf.make_tensor_proto(value))
    return log


def test_a_versions_own_requests_run_before_any_other_and_a_bad_one_ends_it(
    exported: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from stoker.serve.servables.servable import Servable, State

    folder = tmp_path / "1"
    shutil.copytree(exported["half_plus_two"], folder)
    path = warm_up_file(folder, logged([[1.0]]), logged([[2.0], [3.0]]))
    with caplog.at_level("INFO"):
        whole = Servable(1, folder)
        assert whole.load()
        whole.unload()
    assert "warmed up with 2 requests" in caplog.text

    data = path.read_bytes()
    short = data[:4]
    torn = [
        data[:-1],
        data[:-20],
        short,
        data[:5] + b"\xff" + data[6:],
        data[:30] + b"~" + data[31:],
    ]
    for damaged in torn:
        path.write_bytes(damaged)
        servable = Servable(1, folder)
        assert not servable.load()
        assert servable.state is State.END
        assert "tf_serving_warmup_requests" in servable.reason
    path.unlink()
    path.parent.rmdir()
    warm_up_file(folder, logged("text"))
    servable = Servable(1, folder)
    assert not servable.load()
    assert "'x'" in servable.reason


def test_a_server_under_attack_answers_others(strict: Server, ask_at: AskAt) -> None:
    """Half requests, cut bodies and nonsense from several threads, and good requests at the same time."""
    ended = threading.Event()
    parts = [
        b"GET / HT",
        HEAD + b"Content-Length: 50\r\n\r\n{",
        b"\0" * 100,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        HEAD + b"Content-Length: 30\r\n\r\n" + b"[" * 30,
    ]

    def attack(part: bytes) -> None:
        while not ended.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", strict.rest_port), timeout=2) as client,
            ):
                client.sendall(part)
                client.shutdown(socket.SHUT_WR)
                client.recv(1000)

    threads = [threading.Thread(target=attack, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    try:
        answers = [ask_at(strict.rest_port, HALF, ROW) for _ in range(50)]
    finally:
        ended.set()
        for thread in threads:
            thread.join()

    assert {answer.status for answer in answers} == {200}
    assert {answer.body for answer in answers} == {'{"predictions": [[2.5]]}'}
