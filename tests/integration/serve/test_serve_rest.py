"""The REST interface over real sockets."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from stoker.serve.process.server import Server

Ask = Callable[..., Any]

HALF = "/v1/models/half_plus_two"


def png(height: int, width: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\x7f" * width) * height)
    signed = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return signed + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_tensorflow_servings_documented_example_is_answered_as_documented(ask: Ask) -> None:
    answer = ask(f"{HALF}:predict", {"instances": [1.0, 2.0, 5.0]})

    assert (answer.status, answer.body) == (200, '{"predictions": [2.5, 3.0, 4.5]}')


@pytest.mark.parametrize(
    "path",
    [
        f"{HALF}/versions/1:predict",
        f"{HALF}/versions/0001:predict",
        f"{HALF}/labels/champion:predict",
        "/V1/Models/half_plus_two:PREDICT",
    ],
)
def test_a_version_a_label_and_any_case_lead_to_the_same_answer(ask: Ask, path: str) -> None:
    assert ask(path, {"instances": [[1.0]]}).json() == {"predictions": [[2.5]]}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"inputs": [[1.0], [2.0]]}, {"outputs": [[2.5], [3.0]]}),
        ({"inputs": {"x": [[1]]}}, {"outputs": [[2.5]]}),
        ({"instances": [{"x": [1.0]}]}, {"predictions": [[2.5]]}),
        ({"signature_name": "serving_default", "instances": [[1]]}, {"predictions": [[2.5]]}),
        ({"signature_name": "", "instances": [[1]]}, {"predictions": [[2.5]]}),
        ({"inputs": []}, {"outputs": []}),
    ],
)
def test_rows_and_columns_named_and_bare(ask: Ask, body: Any, expected: Any) -> None:
    answer = ask(f"{HALF}:predict", body)

    assert (answer.status, answer.json()) == (200, expected)


def test_nan_and_infinity_are_read_and_printed(ask: Ask) -> None:
    answer = ask(f"{HALF}:predict", b'{"instances": [[NaN], [Infinity], [-Infinity], [-4]]}')

    assert answer.body == '{"predictions": [[NaN], [Infinity], [-Infinity], [0.0]]}'


def test_several_outputs_come_as_one_object_a_row(ask: Ask) -> None:
    rows = [{"fare": 1.5, "place": [1, 2]}, {"fare": 2, "place": [3, 4]}]

    answer = ask("/v1/models/two:predict", {"instances": rows})

    assert answer.json() == {"predictions": [{"double": 3.0, "sum": 3}, {"double": 4.0, "sum": 7}]}


def test_strings_go_through_the_lookup_table_and_bytes_come_back_as_base64(ask: Ask) -> None:
    cash = {"b64": base64.b64encode(b"cash").decode()}

    answer = ask("/v1/models/words:predict", {"inputs": [cash, "card", "schön"]})

    raw = [{"b64": base64.b64encode(w).decode()} for w in (b"cash", b"card", "schön".encode())]
    assert answer.json() == {"outputs": {"id": [1, 2, -1], "raw_bytes": raw}}


def test_an_image_is_sent_as_base64(ask: Ask) -> None:
    image = {"b64": base64.b64encode(png(5, 7)).decode()}

    answer = ask("/v1/models/image:predict", {"instances": [image]})

    assert answer.json() == {"predictions": [[5, 7, 3]]}


def test_bytes_that_are_not_an_image_are_the_clients_fault(ask: Ask) -> None:
    answer = ask("/v1/models/image:predict", {"instances": [{"b64": "aGVsbG8="}]})

    assert answer.status == 400
    assert "image_bytes" in answer.json()["error"]
    assert "Unknown image file format" in answer.json()["error"]


def test_status_is_printed_as_documented(ask: Ask) -> None:
    for path in (HALF, f"{HALF}/versions/1", f"{HALF}/labels/champion"):
        assert ask(path).json() == {
            "model_version_status": [
                {
                    "version": "1",
                    "state": "AVAILABLE",
                    "status": {"error_code": "OK", "error_message": ""},
                }
            ]
        }


def test_metadata_names_inputs_and_outputs(ask: Ask) -> None:
    answer = ask(f"{HALF}/metadata").json()

    assert answer["model_spec"] == {"name": "half_plus_two", "signature_name": "", "version": "1"}
    signature = answer["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["inputs"]["x"]["dtype"] == "DT_FLOAT"
    assert [dim["size"] for dim in signature["inputs"]["x"]["tensor_shape"]["dim"]] == ["-1", "1"]
    assert signature["method_name"] == "tensorflow/serving/predict"


def test_health_is_answered(ask: Ask) -> None:
    assert (ask("/livez").status, ask("/readyz").status) == (200, 200)
    assert ask("/readyz", method="HEAD").status == 200


def test_requests_are_counted_under_tensorflow_servings_names(ask: Ask) -> None:
    ask(f"{HALF}:predict", {"instances": [[1.0]]})
    ask('/v1/models/in"vented:predict', {"instances": [1]})
    lines = ask("/monitoring/prometheus/metrics").body.splitlines()

    counted = ':tensorflow:serving:request_count{model_name="half_plus_two",status="OK"} '
    assert any(line.startswith(counted) and float(line.split()[-1]) >= 1 for line in lines)
    assert "# TYPE :tensorflow:serving:request_latency histogram" in lines
    latency = ':tensorflow:serving:request_latency_bucket{model_name="half_plus_two"'
    buckets = [line for line in lines if line.startswith(latency)]
    by_rest = [line for line in buckets if 'API="predict",entrypoint="REST"' in line]
    assert len(by_rest) == 34
    assert 'le="+Inf"' in by_rest[-1]
    assert any('model_name="other",status="NOT_FOUND"' in line for line in lines)
    assert "vented" not in "\n".join(lines)


MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "space": b"  \n",
    "no json": b"hello",
    "cut": b'{"instances": [[1.0',
    "trailing": b'{"instances": [[1.0]]} x',
    "trailing comma": b'{"instances": [[1.0],]}',
    "single quotes": b"{'instances': [[1.0]]}",
    "not utf-8": b'{"instances": ["\xff"]}',
    "utf-16": '{"instances": [[1.0]]}'.encode("utf-16"),
    "bom": b'\xef\xbb\xbf{"instances": [[1.0]]}',
    "nul": b'{"instances": [[1.0]]}\0',
    "nul inside": b'{"insta\0nces": [[1.0]]}',
    "list": b"[1, 2]",
    "number": b"5",
    "null": b"null",
    "string": b'"instances"',
    "no key": b"{}",
    "wrong key": b'{"instance": [[1.0]]}',
    "both keys": b'{"instances": [[1.0]], "inputs": [[1.0]]}',
    "instances null": b'{"instances": null}',
    "instances empty": b'{"instances": []}',
    "instances object": b'{"instances": {"x": [[1.0]]}}',
    "instances number": b'{"instances": 1}',
    "inputs null": b'{"inputs": null}',
    "inputs empty object": b'{"inputs": {}}',
    "row null": b'{"instances": [null]}',
    "value null": b'{"instances": [[null]]}',
    "value text": b'{"instances": [["1.0"]]}',
    "value bool": b'{"instances": [[true]]}',
    "value object": b'{"instances": [[{"b64": "AA=="}]]}',
    "ragged": b'{"instances": [[1.0], [1.0, 2.0]]}',
    "ragged deeper": b'{"instances": [[1.0], [[1.0]]]}',
    "ragged shallower": b'{"instances": [[1.0], 1.0]}',
    "mixed": b'{"instances": [[1.0], {"x": [1.0]}]}',
    "unknown input": b'{"instances": [{"y": [1.0]}]}',
    "extra input": b'{"instances": [{"x": [1.0], "y": [1.0]}]}',
    "missing input": b'{"instances": [{"x": [1.0]}, {}]}',
    "unknown column": b'{"inputs": {"y": [[1.0]]}}',
    "just too large for double": b'{"instances": [[1e309]]}',
    "a whole number too large for double": b'{"instances": [[1' + b"0" * 309 + b"]]}",
    "too large for double": b'{"instances": [[1e999]]}',
    "too many digits for double": b'{"instances": [[' + b"9" * 400 + b".0]]}",
    "huge integer": b'{"instances": [[' + b"9" * 400 + b"]]}",
    "integer of 5,000 digits": b'{"instances": [[' + b"9" * 5000 + b"]]}",
    "signature number": b'{"signature_name": 5, "instances": [[1.0]]}',
    "signature null": b'{"signature_name": null, "instances": [[1.0]]}',
    "signature unknown": b'{"signature_name": "nope", "instances": [[1.0]]}',
    "signature path": b'{"signature_name": "../../etc/passwd", "instances": [[1.0]]}',
    "deep list": b'{"instances": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep but parsed": b'{"instances": ' + b"[" * 200 + b"1" + b"]" * 200 + b"}",
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "lone surrogate key": b'{"\\ud800": 1}',
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_body_is_refused_in_one_line(ask: Ask, name: str) -> None:
    answer = ask(f"{HALF}:predict", MALFORMED[name])

    assert answer.status == 400, answer.body
    message = json.loads(answer.body)["error"]
    assert len(message) < 1000
    assert "\n" not in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("rows", "name", "expected"),
    [
        ([{"fare": 1.0}], "place", "keys must be equal to: fare,place"),
        ([{"fare": None, "place": [1, 2]}], "fare", "Type: Null"),
        ([{"fare": 1.0, "place": [1.0, 2.0]}], "place", "int64"),
        ([{"fare": 1.0, "place": [1, 2**63]}], "place", "int64"),
        ([{"fare": 1.0, "place": [1, "2"]}], "place", 'JSON Value: "2" Type: String'),
    ],
)
def test_a_wrong_feature_is_named_with_what_was_expected(
    ask: Ask, rows: Any, name: str, expected: str
) -> None:
    answer = ask("/v1/models/two:predict", {"instances": rows})

    assert answer.status == 400
    assert name in answer.json()["error"]
    assert expected in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"instances": ["\\ud800"]}', "Unicode"),
        (b'{"instances": [{"b64": "no base64!"}]}', "base64"),
        (b'{"instances": [{"b64": "YQ="}]}', "base64"),
        (b'{"instances": [{"b64": 5}]}', "does not have named input: b64"),
        (b'{"instances": [5]}', "string"),
    ],
)
def test_a_wrong_string_is_refused(ask: Ask, body: bytes, said: str) -> None:
    answer = ask("/v1/models/words:predict", body)

    assert answer.status == 400
    assert said in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/v1/models/nope", 404, "nope"),
        ("/v1/models/nope/metadata", 404, "nope"),
        (f"{HALF}/versions/7", 404, "Could not find version 7 of model half_plus_two"),
        (
            f"{HALF}/versions/7/metadata",
            404,
            "Servable not found for request: Specific(half_plus_two, 7)",
        ),
        (f"{HALF}/labels/nope", 400, "Unrecognized servable version label: nope"),
        (f"{HALF}/versions/{'9' * 20}", 400, "Failed to convert version"),
        (f"{HALF}/versions/{'9' * 19}", 400, "Failed to convert version"),
        (f"{HALF}/versions/{'0' * 5000}", 404, "Could not find version 0"),
        (f"/v1/models/{'a' * 9000}", 404, "Could not find any versions of model aaa"),
        (f"{HALF}/versions/x", 400, "Malformed request: GET"),
        (f"{HALF}:predict", 400, "Malformed request: GET"),
        ("/v1/models/..%2f..%2fetc%2fpasswd", 400, "Malformed request"),
        ("/v1/models/%00", 404, "Could not find any versions of model"),
        ("/v1/", 400, "Malformed request"),
    ],
)
def test_an_unknown_model_or_version_is_an_error(
    ask: Ask, path: str, status: int, message: str
) -> None:
    answer = ask(path)

    assert answer.status == status
    assert message in answer.json()["error"]


def test_an_unknown_signature_is_an_error_in_tensorflow_servings_words(ask: Ask) -> None:
    answer = ask(f"{HALF}:predict", {"signature_name": "nope", "instances": [1.0]})

    assert answer.json() == {"error": 'Serving signature name: "nope" not found in signature def'}


def test_a_path_outside_v1_gets_a_bare_404(ask: Ask) -> None:
    answer = ask("/etc/passwd")

    assert (answer.status, answer.body) == (404, "")


def test_a_body_over_the_limit_is_refused_before_it_is_read(server: Server, ask: Ask) -> None:
    with socket.create_connection(("127.0.0.1", server.rest_port), timeout=10) as client:
        client.sendall(
            f"POST {HALF}:predict HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 40}\r\n\r\n{{".encode()
        )
        answer = client.recv(65536)

    assert answer.startswith(b"HTTP/1.1 413")
    assert ask("/livez").status == 200


def test_a_chunked_body_over_the_limit_is_refused(server: Server) -> None:
    block = b"%x\r\n" % (1 << 20) + b" " * (1 << 20) + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.rest_port), timeout=10) as client:
        head = f"POST {HALF}:predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head.encode())
        with contextlib.suppress(ConnectionError):  # it may be cut off before it has sent all
            for _ in range((server.config.max_body_bytes >> 20) + 8):
                client.sendall(block)
        answer = client.recv(65536)

    assert answer.startswith(b"HTTP/1.1 413")


def test_a_client_that_leaves_in_mid_body_disturbs_no_other(server: Server, ask: Ask) -> None:
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.rest_port), timeout=10) as client:
            client.sendall(
                f"POST {HALF}:predict HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode()
            )

    assert ask(f"{HALF}:predict", {"instances": [[1.0]]}).status == 200
