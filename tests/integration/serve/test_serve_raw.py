"""A tensor as the body, and as the answer, over real sockets."""

from __future__ import annotations

import http.client
from typing import Any

import numpy as np
import pytest

from stoker.serve.process.server import Server

RAW = "application/octet-stream"


def post(
    server: Server, model: str, body: bytes, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.rest_port, timeout=30)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(
            "POST", f"/v1/models/{model}:predict", body, {"Content-Type": RAW, **named}
        )
        response = connection.getresponse()
        return response.status, response.read(), dict(response.getheaders())
    finally:
        connection.close()


X = np.array([[1.0], [2.0], [-4.0]], np.float32)


def test_a_tensor_is_answered_by_a_tensor_or_by_json(server: Server) -> None:
    own = {"X_Tensor_Dtype": "float32", "X_Tensor_Shape": "3, 1"}
    status, body, headers = post(server, "half_plus_two", X.tobytes(), Accept=RAW, **own)
    assert (status, headers["content-type"]) == (200, RAW)
    assert np.frombuffer(body, "<f4").tolist() == [2.5, 3.0, 0.0]
    said = [headers[f"x-tensor-{name}"] for name in ("name", "dtype", "shape")]
    assert said == ["y", "float32", "3,1"]
    status, body, _ = post(server, "half_plus_two", X.tobytes(), Accept="*/*", **own)
    assert (status, body) == (200, b'{"predictions": [[2.5], [3.0], [0.0]]}')
    json_body = b'{"instances": [[1.0]]}'
    status, body, _ = post(
        server, "half_plus_two", json_body, Accept=f"{RAW};q=1", Content_Type="application/json"
    )
    assert (status, np.frombuffer(body, "<f4").tolist()) == (200, [2.5])


def test_nan_and_no_rows_at_all_pass(server: Server) -> None:
    own = {"X_Tensor_Dtype": "float32", "Accept": RAW}
    odd = np.array([[np.nan], [np.inf]], np.float32).tobytes()
    status, body, _ = post(server, "half_plus_two", odd, X_Tensor_Shape="2,1", **own)
    assert (status, body) == (200, odd)
    status, body, headers = post(server, "half_plus_two", b"", X_Tensor_Shape="0,1", **own)
    assert (status, body, headers["x-tensor-shape"]) == (200, b"", "0,1")


def test_the_whole_body_is_one_text(server: Server) -> None:
    own = {"X_Tensor_Dtype": "string", "Accept": RAW}
    status, body, headers = post(server, "words", b"\xff\0raw", X_Output_Name="raw_bytes", **own)
    assert (status, body, headers["x-tensor-dtype"]) == (200, b"\xff\0raw", "string")
    status, body, _ = post(server, "words", b"cash", X_Output_Name="id", **own)
    assert (status, np.frombuffer(body, "<i8").tolist()) == (200, [1])


@pytest.mark.parametrize(
    ("model", "headers", "said"),
    [
        ("half_plus_two", {}, "X-Tensor-Dtype must be"),
        ("half_plus_two", {"X_Tensor_Dtype": "f32", "X_Tensor_Shape": "3,1"}, "X-Tensor-Dtype"),
        ("half_plus_two", {"X_Tensor_Dtype": "float32"}, "X-Tensor-Shape must be whole numbers"),
        (
            "half_plus_two",
            {"X_Tensor_Dtype": "float32", "X_Tensor_Shape": "3,-1"},
            "X-Tensor-Shape",
        ),
        ("half_plus_two", {"X_Tensor_Dtype": "float32", "X_Tensor_Shape": "3;1"}, "X-Tensor-Shape"),
        ("half_plus_two", {"X_Tensor_Dtype": "float32", "X_Tensor_Shape": "2,1"}, "8 bytes"),
        (
            "half_plus_two",
            {"X_Tensor_Dtype": "float32", "X_Tensor_Shape": ",".join(["999999999999"] * 9)},
            "bytes",
        ),
        ("half_plus_two", {"X_Tensor_Dtype": "float32", "X_Tensor_Shape": "1," * 40 + "3"}, "axes"),
        ("half_plus_two", {"X_Tensor_Dtype": "int32", "X_Tensor_Shape": "3,1"}, "must be float32"),
        (
            "half_plus_two",
            {"X_Tensor_Dtype": "int32", "X_Tensor_Shape": "1,3"},
            "must be float32",
        ),
        ("half_plus_two", {"X_Tensor_Dtype": "string", "X_Tensor_Shape": "1"}, "not be set"),
        ("half_plus_two", {"X_Tensor_Dtype": "string"}, "must be float32"),
        ("half_plus_two", {"X_Tensor_Dtype": "bool", "X_Tensor_Shape": "12"}, "0 or 1"),
        (
            "half_plus_two",
            {"X_Tensor_Dtype": "float32", "X_Tensor_Shape": "3,1", "X_Tensor_Name": "z"},
            "'x' is missing",
        ),
        (
            "half_plus_two",
            {"X_Tensor_Dtype": "float32", "X_Tensor_Shape": "3,1", "X_Output_Name": "z"},
            "not found in signature: z",
        ),
        (
            "half_plus_two",
            {"X_Tensor_Dtype": "float32", "X_Tensor_Shape": "3,1", "X_Signature_Name": "z"},
            "not found in signature def",
        ),
        (
            "two",
            {"X_Tensor_Dtype": "float32", "X_Tensor_Shape": "3"},
            "must name one of fare, place",
        ),
        ("words", {"X_Tensor_Dtype": "string", "Accept": RAW}, "must name one of id, raw_bytes"),
    ],
)
def test_what_does_not_fit_gets_400_and_the_reason(
    server: Server, model: str, headers: dict[str, Any], said: str
) -> None:
    status, body, _ = post(server, model, X.tobytes(), **headers)
    assert status == 400
    assert said in body.decode()
