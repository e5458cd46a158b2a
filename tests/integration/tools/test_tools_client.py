"""The client and `stoker call` against a real server, and against servers that misbehave."""

from __future__ import annotations

import datetime as dt
import http.server
import ipaddress
import json
import math
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from stoker.cli.main import invoke
from stoker.client import (
    CallError,
    Connection,
    GrpcClient,
    ModelAt,
    NoAnswerError,
    RefusedError,
    RestClient,
    Tls,
)
from stoker.client.messages import PREDICT, message
from stoker.client.tensors import fill_tensor
from stoker.core.errors import DataError, UserError

ROWS = [
    {"fare": 1.5, "place": [1, 2], "company": "Flash"},
    {"fare": math.nan, "place": [3, -4], "company": "größe"},
]
EXPECTED = {"double": [3.0, math.nan], "sum": [3, -1], "who": ["Flash!", "größe!"]}


def plain(array: Any) -> list[Any]:
    return [v.decode() if isinstance(v, bytes) else v for v in array.tolist()]


@pytest.mark.parametrize("client", [RestClient, GrpcClient])
def test_rows_may_be_numpys(served: Any, client: Any) -> None:
    with client(served.rest if client is RestClient else served.grpc) as asking:
        for rows in (np.array([1.0, 2.0]), [np.float32(1.0), np.float32(2.0)]):
            assert next(iter(asking.predict("half", rows).outputs.values())).tolist() == [2.5, 3.0]
        row = {"fare": np.float32(1.5), "place": np.array([1, 2]), "company": "Flash"}
        assert asking.predict("taxi", [row]).outputs["sum"].tolist() == [3]


@pytest.mark.parametrize("client", [RestClient, GrpcClient])
def test_both_protocols_answer_rows_with_nan_and_text(served: Any, client: Any) -> None:
    url = served.rest if client is RestClient else served.grpc
    with client(url) as asking:
        answers = asking.predict("taxi", ROWS)
        again = asking.predict(ModelAt(name="taxi", version=1), ROWS[:1])

    for name, values in EXPECTED.items():
        if name == "double":
            np.testing.assert_array_equal(answers.outputs[name], np.array(values))
        else:
            assert plain(answers.outputs[name]) == values
    assert plain(again.outputs["sum"]) == [3]
    assert answers.version == (1 if client is GrpcClient else None)


def test_every_dtype_goes_there_and_back_over_grpc(served: Any) -> None:
    sent = {
        "a_float16": np.array([1.5, np.nan], np.float16),
        "a_bfloat16": np.array([[1.5], [-np.inf]], ml_dtypes.bfloat16),
        "a_float32": np.array(0.1, np.float32),
        "a_float64": np.array([[[0.1]]]),
        "a_int8": np.array([-128, 127], np.int8),
        "a_int16": np.array([-32768], np.int16),
        "a_int32": np.zeros((0, 3), np.int32),
        "a_int64": np.array([-(2**63), 2**63 - 1]),
        "a_uint8": np.array([255], np.uint8),
        "a_uint16": np.array([65535], np.uint16),
        "a_uint32": np.array([2**32 - 1], np.uint32),
        "a_uint64": np.array([2**64 - 1], np.uint64),
        "a_bool": np.array([True, False]),
        "a_complex64": np.array([1 + 2j], np.complex64),
        "a_string": np.array([[b"\xff\x00"], [b""]], dtype=object),
    }
    with GrpcClient(served.grpc) as client:
        got = client.predict("everything", sent).outputs

    assert {name.replace("b_", "a_") for name in got} == set(sent)
    for name, array in sent.items():
        back = got[name.replace("a_", "b_")]
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)


def test_what_the_model_declares_is_the_same_over_both(served: Any) -> None:
    with RestClient(served.rest) as rest, GrpcClient(served.grpc) as grpc:
        for model in ("taxi", "everything", "image"):
            by_rest = rest.signatures(model)["serving_default"]
            assert by_rest == grpc.signatures(model)["serving_default"]
        assert rest.status("taxi")[0]["state"] == "AVAILABLE"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"fare": 1.5, "place": [1, 2]}], "no 'company'"),
        ([{"fare": 1.5, "place": [1, 2], "compny": "a"}], "Did you mean 'company'"),
        ([{"fare": 1.5, "place": [1.5, 2], "company": "a"}], "'place' must hold int64"),
        ([{"fare": "x", "place": [1, 2], "company": "a"}], "'fare' must hold float32"),
        ([{"fare": 1, "place": [1, 2], "company": 3}], "'company' must hold strings"),
        ([ROWS[0], {**ROWS[0], "place": [1]}], "rows of the same length"),
        ([ROWS[0], {**ROWS[0], "company": ["a"]}], "'company' must have rows of the same length"),
        ([ROWS[0], {"fare": 1.0}], "row 1: fare"),
        ([7.0], "an object of the inputs"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_grpc_sends_them(
    served: Any, rows: list[Any], reason: str
) -> None:
    with GrpcClient(served.grpc) as client, pytest.raises(UserError, match=reason):
        client.predict("taxi", rows)


def test_the_client_does_not_pad_where_the_model_may_not_cut_it_off(served: Any) -> None:
    reason = "'place' must have rows of the same length.*send one row"
    with RestClient(served.rest) as client, pytest.raises(UserError, match=reason):
        client.predict("taxi", [ROWS[0], {**ROWS[0], "place": [1]}])


def test_a_refusal_has_the_servers_status_and_words(served: Any) -> None:
    with RestClient(served.rest) as rest, pytest.raises(RefusedError) as over_rest:
        rest.predict("nobody", [1.0])
    with GrpcClient(served.grpc) as grpc, pytest.raises(RefusedError) as over_grpc:
        grpc.predict("nobody", {"x": np.array([1.0], np.float32)})

    assert over_rest.value.status == "HTTP 404"
    assert over_grpc.value.status == "NOT_FOUND"
    for error in (over_rest.value, over_grpc.value):
        assert "Servable not found for request: Latest(nobody)" in error.line()
        assert "Name a model and a version that this server has." in error.line()


@pytest.mark.parametrize(("client", "scheme"), [(RestClient, "http"), (GrpcClient, "grpc")])
def test_a_port_without_a_server_is_reported_as_such(client: Any, scheme: str) -> None:
    # Bound and not listening: the kernel refuses.
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        url = f"{scheme}://127.0.0.1:{holder.getsockname()[1]}"
        with client(url) as asking, pytest.raises(NoAnswerError, match="connection refused"):
            asking.signatures("half")


def test_the_wrong_ports_protocol_is_named(served: Any) -> None:
    with (
        RestClient(served.grpc) as rest,
        pytest.raises(NoAnswerError, match="Call it by gRPC"),
    ):
        rest.predict("half", [1.0])
    with (
        GrpcClient(served.rest.removeprefix("http://")) as grpc,
        pytest.raises(NoAnswerError, match="leave out --grpc"),
    ):
        grpc.signatures("half")
    with (
        GrpcClient(f"grpcs://{served.grpc}") as grpc,
        pytest.raises(NoAnswerError, match="Is it TLS there"),
    ):
        grpc.signatures("half")


class _Odd(http.server.BaseHTTPRequestHandler):
    """Answers as the path's first model name says."""

    protocol_version = "HTTP/1.1"
    seen: list[dict[str, str]]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append(dict(self.headers))
        kind = self.path.split("/")[-1].partition(":")[0]
        if kind == "silent":
            threading.Event().wait(5)
            return
        if kind == "gone":
            self.close_connection = True
            return
        if kind == "once" and len(self.seen) == 2:  # the kept connection ends without an answer
            self.close_connection = True
            return
        status, body = {
            "broken": (500, b"<h1>oh no</h1>"),
            "busy": (503, b'{"error": "too busy."}'),
            "page": (200, b"<html>"),
            "other": (200, b'{"hello": 1}'),
            "ragged": (200, b'{"predictions": [[1], [1, 2]]}'),
            "bytes": (200, b'{"predictions": [{"b64": "/w=="}]}'),
            "once": (200, b'{"predictions": [1.5]}'),
            "deep": (200, b"[" * 100_000),
            "deep-refusal": (500, b"[" * 100_000),
            "text": (200, b'{"predictions": "abc"}'),
            "no-base64": (200, b'{"predictions": [{"b64": "x"}]}'),
        }[kind]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def odd() -> Iterator[tuple[str, list[dict[str, str]]]]:
    handler = type("Odd", (_Odd,), {"seen": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}", handler.seen  # type: ignore[attr-defined]  # an attribute that the stubs do not know
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("model", "kind", "said"),
    [
        ("broken", RefusedError, "HTTP 500: <h1>oh no</h1>"),
        ("busy", RefusedError, "HTTP 503: too busy. Ask again later."),
        ("silent", NoAnswerError, "no answer within 0.5 s. Set a longer"),
        ("gone", NoAnswerError, "closed connection without response"),
        ("page", DataError, "Check that a model server"),
        ("other", DataError, "must hold 'predictions'"),
        ("deep", DataError, "must answer with JSON"),
        ("deep-refusal", RefusedError, "HTTP 500: [[["),
        ("text", DataError, "'predictions' must be a list"),
        ("no-base64", DataError, "must be base64"),
    ],
)
def test_a_server_that_misbehaves_is_one_line(
    odd: tuple[str, Any], model: str, kind: type[UserError], said: str
) -> None:
    how = Connection(timeout_s=0.5 if model == "silent" else 30)
    with RestClient(odd[0], connection=how) as client, pytest.raises(kind) as error:
        client.predict(model, [1.0])

    assert said in error.value.line()


def test_odd_answers_are_read_as_they_are(odd: tuple[str, Any]) -> None:
    with RestClient(odd[0]) as client:
        assert client.predict("ragged", [1.0]).outputs[""].tolist() == [[1], [1, 2]]
        assert client.predict("bytes", [1.0]).outputs[""].tolist() == [b"\xff"]


def test_a_kept_connection_that_the_server_ended_is_opened_again(odd: tuple[str, Any]) -> None:
    with RestClient(odd[0]) as client:
        answers = [client.predict("once", [1.0]).outputs[""].tolist() for _ in range(2)]

    assert answers == [[1.5], [1.5]]
    assert len(odd[1]) == 3


def test_a_token_goes_with_every_call(odd: tuple[str, Any]) -> None:
    with RestClient(odd[0], connection=Connection(token="s3cret")) as client:
        client.predict("once", [1.0])

    assert odd[1][0]["Authorization"] == "Bearer s3cret"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that vouches for itself, and its key."""
    made_at = dt.datetime.now(dt.UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    alternatives = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(made_at - dt.timedelta(hours=1))
        .not_valid_after(made_at + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture
def secure(certificate: tuple[Path, Path]) -> Iterator[str]:
    """A server of HTTPS that wants the client's certificate, too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    context.load_verify_locations(certificate[0])
    context.verify_mode = ssl.CERT_REQUIRED
    handler = type("Secure", (_Odd,), {"seen": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # replaced for this test
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_rest_goes_over_tls_with_certificates_of_both_sides(
    secure: str, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    both = Connection(tls=Tls(ca=cert, cert=cert, key=key))
    with RestClient(secure, connection=both) as client:
        assert client.predict("once", [1.0]).outputs[""].tolist() == [1.5]
    for wrong in (Tls(), Tls(ca=cert)):
        how = Connection(tls=wrong)
        with RestClient(secure, connection=how) as client, pytest.raises(NoAnswerError):
            client.predict("once", [1.0])


def test_grpc_goes_over_tls(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    seen = []

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        seen.append(dict(context.invocation_metadata()))
        response = message("PredictResponse")
        fill_tensor(response.outputs.add(key="y").value, np.array([2.5], np.float32))
        return bytes(response.SerializeToString())

    server = grpc.server(futures.ThreadPoolExecutor(1))
    handlers = {"Predict": grpc.unary_unary_rpc_method_handler(answer)}
    service = PREDICT.split("/")[1]
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    keys = [(key.read_bytes(), cert.read_bytes())]
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(keys))
    server.start()
    try:
        url = f"grpcs://127.0.0.1:{port}"
        how = Connection(tls=Tls(ca=cert), token="s3cret")
        with GrpcClient(url, connection=how) as client:
            found = client.predict("m", {"x": np.zeros(1, np.float32)}).outputs
        with GrpcClient(url) as stranger, pytest.raises(CallError):
            stranger.predict("m", {"x": np.zeros(1, np.float32)})
    finally:
        server.stop(None).wait()

    assert found["y"].tolist() == [2.5]
    assert [one["authorization"] for one in seen] == ["Bearer s3cret"]


@pytest.fixture
def stoker(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = invoke([str(argument) for argument in arguments], debug=False)
        said = capfd.readouterr()
        return code, said.out, said.err

    return run


def test_call_prints_the_same_json_over_both_protocols(
    served: Any, stoker: Any, tmp_path: Path
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    (tmp_path / "body.json").write_text(json.dumps({"instances": ROWS}))
    found = []
    for name in ("rows.json", "rows.jsonl", "body.json"):
        for flags in (["--url", served.rest], ["--url", served.grpc, "--grpc"]):
            code, out, err = stoker(
                "call", "taxi", "--data", tmp_path / name, "--version", 1, "--json", *flags
            )
            assert code == 0, err
            found.append(json.loads(out))

    row = {"double": 3.0, "sum": 3, "who": "Flash!"}
    for facts in found:
        assert facts["model"] == "taxi"
        assert facts["version"] == 1
        assert facts["predictions"][0] == row
        assert math.isnan(facts["predictions"][1]["double"])


def test_call_sends_whole_tensors_and_prints_them(served: Any, stoker: Any, tmp_path: Path) -> None:
    body = tmp_path / "columns.json"
    body.write_text(json.dumps({"signature_name": "serving_default", "inputs": [1.0, 2.0]}))
    for flags in (["--url", served.rest], ["--url", served.grpc, "--grpc"]):
        code, out, err = stoker("call", "half", "--data", body, "--json", *flags)
        assert code == 0, err
        assert json.loads(out)["outputs"] == [2.5, 3.0]


def test_call_sends_images_as_they_are(served: Any, stoker: Any, tmp_path: Path) -> None:
    images = [tmp_path / "a.png", tmp_path / "b.jpg"]
    for path, content in zip(images, (b"\x89PNG\xff", b"\xff\xd8"), strict=True):
        path.write_bytes(content)
    for flags in (["--url", served.rest], ["--url", served.grpc, "--grpc"]):
        code, out, err = stoker("call", "image", "--image", images[0], "--image", images[1], *flags)
        assert code == 0, err
        assert [line.split()[-1] for line in out.splitlines()] == ["row(s)", "5", "2"]


def test_calls_errors_are_one_line(served: Any, stoker: Any, tmp_path: Path) -> None:
    picture, row = tmp_path / "a.png", tmp_path / "row.json"
    picture.write_bytes(b"\x89PNG\xff")
    row.write_text('{"fare": 1.0,\n "place": oh}')
    who = tmp_path / "who.json"
    who.write_text('{"company": "a"}')
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    for arguments, reason in (
        ((), "neither --data nor --image"),
        (("--data", row), "Expecting value in line 2, column 11"),
        (("--data", picture), "Send images by --image"),
        (("--data", tmp_path / "no"), "No such file"),
        (
            ("--data", who, "--image", picture, "--url", served.rest),
            "taxi must have exactly one input",
        ),
        (("--image", picture, "--url", "ftp://x"), "must be scheme://host:port"),
        (("--image", picture, "--url", served.rest, "--signature", "x"), "'x' must be a signature"),
        (("--data", row, "--version", "1", "--label", "a"), "by its number or by a label"),
        (("--data", row, "--timeout-s", "0"), "above 0 and at most"),
        (("--data", row, "--timeout-s", "inf"), "above 0 and at most"),
        (("--data", row, "--timeout-s", "1e300"), "above 0 and at most"),
        (("--data", deep, "--url", served.rest), "JSON of few levels"),
        (("--data", who, "--url", "http://[::1"), "must be scheme://host:port"),
        (("--data", who, "--url", "http://a..b"), "must be scheme://host:port"),
        (("--data", who, "--url", "http://me@127.0.0.1"), "must be scheme://host:port"),
        (("--data", who, "--url", "http://a b"), "must be scheme://host:port"),
        (("--data", who, "--url", served.rest + "/größe x"), "HTTP 404"),
    ):
        model = "image" if "No such file" in reason else "taxi"
        code, _, err = stoker("call", model, *arguments)
        assert code == 2, (arguments, err)
        assert reason in err
        assert err.count("\n") == 1


def test_the_client_loads_neither_tensorflow_nor_keras(served: Any) -> None:
    code = (
        "import sys\nfrom stoker.client import GrpcClient, RestClient\n"
        f"with RestClient({served.rest!r}) as c: print(c.predict('half', [1.0]).outputs)\n"
        f"with GrpcClient({served.grpc!r}) as c: print(c.predict('half', [1.0]).outputs)\n"
        "heavy = {'tensorflow', 'keras', 'pandas', 'pyarrow', 'cv2', 'ibis'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2.5") == 2
