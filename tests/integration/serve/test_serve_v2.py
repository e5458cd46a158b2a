"""The Open Inference Protocol, by plain HTTP as its specification prints it."""

from __future__ import annotations

import http.client
import json
from typing import Any

import numpy as np
import pytest

from stoker.serve.process.server import Server
from stoker.serve.rest.numbers import read_lists

HALF = "/v2/models/half_plus_two"
LENGTH = "Inference-Header-Content-Length"


def ask(
    server: Server, path: str, body: Any = None, tail: bytes = b"", **headers: str
) -> tuple[int, Any, bytes]:
    """Status, the JSON and the bytes after it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.rest_port, timeout=30)
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if tail and raw is not None:
        named.setdefault(LENGTH, str(len(raw)))
    try:
        sent = None if raw is None else raw + tail
        connection.request("GET" if sent is None else "POST", path, sent, named)
        response = connection.getresponse()
        whole = response.read()
        head = int(response.getheader(LENGTH) or len(whole))
        return response.status, json.loads(whole[:head] or b"null"), whole[head:]
    finally:
        connection.close()


def tensor(name: str, datatype: str, shape: list[int], **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **more}


def test_health_server_and_model_are_described(server: Server) -> None:
    assert ask(server, "/v2/health/live")[0] == 200
    assert ask(server, "/v2/health/ready")[:2] == (200, {"ready": True})
    assert ask(server, "/v2")[1]["extensions"] == ["binary_tensor_data"]
    assert ask(server, f"{HALF}/ready")[:2] == (200, {"name": "half_plus_two", "ready": True})
    assert ask(server, f"{HALF}/versions/1/ready")[0] == 200
    assert ask(server, f"{HALF}/versions/9/ready")[0] == 503
    assert ask(server, "/v2/models/none/ready")[0] == 503
    assert ask(server, f"{HALF}/versions/1")[:2] == (
        200,
        {
            "name": "half_plus_two",
            "versions": ["1"],
            "platform": "tensorflow_savedmodel",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 1]}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 1]}],
        },
    )
    assert ask(server, "/v2/models/none")[0] == 404


@pytest.mark.parametrize("data", [[1.0, 2, -4.5], [[1.0], [2], [-4.5]]])
def test_json_tensors_are_answered_flat(server: Server, data: Any) -> None:
    body = {"id": "42", "inputs": [tensor("x", "FP32", [3, 1], data=data)]}
    status, said, tail = ask(server, f"{HALF}/infer", body)
    assert (status, tail) == (200, b"")
    output = tensor("y", "FP32", [3, 1], data=[2.5, 3.0, -0.25])
    assert said == {
        "model_name": "half_plus_two",
        "model_version": "1",
        "id": "42",
        "outputs": [output],
    }


def test_many_numbers_are_answered_and_refused_as_few_are(server: Server) -> None:
    sent = [number / 4 for number in range(8000)]
    wanted = tensor("y", "FP32", [8000, 1], data=[number / 2 + 2 for number in sent])
    for data in (sent, [[number] for number in sent]):
        body = {"inputs": [tensor("x", "FP32", [8000, 1], data=data)]}
        assert read_lists(json.dumps(body).encode()) is not None, "it is read by simdjson"
        status, said, _ = ask(server, f"{HALF}/infer", body)
        assert (status, said["outputs"]) == (200, [wanted])

    few, many = [1.5, True, 2.5], [*sent, True]
    said_of = [
        ask(server, f"{HALF}/infer", {"inputs": [tensor("x", "FP32", [len(data), 1], data=data)]})
        for data in (few, many)
    ]
    assert said_of[0] == said_of[1]
    assert "must hold values of type float32" in said_of[0][1]["error"]
    body = {"inputs": [tensor("x", "FP32", [1, 1], data=sent)]}
    assert "8,000 values" in ask(server, f"{HALF}/infer", body)[1]["error"]


def test_binary_tensors_go_both_ways_and_mixed(server: Server) -> None:
    fare, place = np.array([1.5, np.nan], "<f4"), np.array([[1, 2], [3, 4]], "<i8")
    inputs = [
        tensor("fare", "FP32", [2], parameters={"binary_data_size": 8}),
        tensor("place", "INT64", [2, 2], parameters={"binary_data_size": 32}),
    ]
    tail = fare.tobytes() + place.tobytes()
    outputs = [{"name": "sum", "parameters": {"binary_data": True}}, {"name": "double"}]
    status, said, rest = ask(
        server, "/v2/models/two/versions/1/infer", {"inputs": inputs, "outputs": outputs}, tail
    )
    assert status == 200
    assert said["outputs"][0] == tensor("sum", "INT64", [2], parameters={"binary_data_size": 16})
    assert np.frombuffer(rest, "<i8").tolist() == [3, 7]
    assert said["outputs"][1]["data"][0] == 3.0
    assert np.isnan(said["outputs"][1]["data"][1])

    everything = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    _, said, rest = ask(server, "/v2/models/two/infer", everything, tail)
    sizes = [one["parameters"]["binary_data_size"] for one in said["outputs"]]
    assert (sizes, len(rest)) == ([8, 16], 24)
    everything["outputs"] = [{"name": "sum", "parameters": {"binary_data": False}}]
    _, said, rest = ask(server, "/v2/models/two/infer", everything, tail)
    assert (said["outputs"][0]["data"], rest) == ([3, 7], b"")


def test_texts_go_as_json_and_as_bytes_after_their_lengths(server: Server) -> None:
    path = "/v2/models/words/infer"
    body = {"inputs": [tensor("word", "BYTES", [2], data=["cash", "ü"])]}
    _, said, _ = ask(server, path, body)
    assert {one["name"]: one["data"] for one in said["outputs"]} == {
        "id": [1, -1],
        "raw_bytes": ["cash", "ü"],
    }
    tail = b"\x04\0\0\0card\x01\0\0\0\xff"
    parts = {"binary_data_size": len(tail)}
    body = {"inputs": [tensor("word", "BYTES", [2], parameters=parts)]}
    status, said, _ = ask(server, path, body, tail)
    assert (status, "not UTF-8" in said["error"]) == (400, True)
    body["parameters"] = {"binary_data_output": True}  # type: ignore[assignment] # another field
    status, said, rest = ask(server, path, body, tail)
    assert (status, rest) == (200, np.array([2, -1], "<i8").tobytes() + tail)


GOOD = tensor("x", "FP32", [1, 1], data=[1.0])
SIZED = tensor("x", "FP32", [1, 1], parameters={"binary_data_size": 4})


@pytest.mark.parametrize(
    ("body", "tail", "headers", "said"),
    [
        (b"{", b"", {}, "JSON Parse error"),
        (b"[1]", b"", {}, "must be an object"),
        ({}, b"", {}, "'inputs' must be a list"),
        ({"inputs": []}, b"", {}, "'inputs' must be a list"),
        ({"inputs": [5]}, b"", {}, "must be an object"),
        ({"inputs": [GOOD, GOOD]}, b"", {}, "given only once"),
        ({"inputs": [GOOD], "id": 5}, b"", {}, "'id' must be a string"),
        ({"inputs": [{**GOOD, "datatype": "FP31"}]}, b"", {}, "the datatype of 'x'"),
        ({"inputs": [{**GOOD, "datatype": ["FP32"]}]}, b"", {}, "the datatype of 'x'"),
        ({"inputs": [{**GOOD, "datatype": "INT32"}]}, b"", {}, "must hold values of type int32"),
        ({"inputs": [{**GOOD, "shape": [2, 1]}]}, b"", {}, "the values of shape [2,1]"),
        ({"inputs": [{**GOOD, "shape": [-1, 1]}]}, b"", {}, "a complete shape"),
        ({"inputs": [{**GOOD, "shape": [0, 2**62], "data": []}]}, b"", {}, "a complete shape"),
        ({"inputs": [{**GOOD, "shape": [1.0]}]}, b"", {}, "whole numbers"),
        ({"inputs": [{**GOOD, "shape": [True, 1]}]}, b"", {}, "whole numbers"),
        ({"inputs": [{**GOOD, "shape": [10**30, 10**30]}]}, b"", {}, "the values of shape"),
        ({"inputs": [{**GOOD, "data": 5}]}, b"", {}, "must be a list"),
        ({"inputs": [{**GOOD, "data": ["a"]}]}, b"", {}, "must hold values of type float32"),
        ({"inputs": [{**GOOD, "data": [None]}]}, b"", {}, "must hold values of type float32"),
        ({"inputs": [{**GOOD, "name": "z"}]}, b"", {}, "'x' is missing"),
        ({"inputs": [{**GOOD, "name": ""}]}, b"", {}, "the name of an input"),
        ({"inputs": [GOOD], "outputs": [{"name": "z"}]}, b"", {}, "not found in signature: z"),
        ({"inputs": [GOOD], "outputs": [{"name": "y"}] * 2}, b"", {}, "requested only once"),
        ({"inputs": [GOOD], "parameters": {"sequence_id": 3}}, b"", {}, "sequence"),
        ({"inputs": [GOOD], "parameters": {"signature_name": "z"}}, b"", {}, "not found"),
        ({"inputs": [GOOD], "parameters": {"binary_data_output": 1}}, b"", {}, "true or false"),
        ({"inputs": [SIZED]}, b"", {}, "binary_data_size of 'x' must be 0..0"),
        ({"inputs": [SIZED]}, b"123", {}, "binary_data_size of 'x' must be 0..3"),
        ({"inputs": [SIZED]}, b"12345", {}, "follow the last tensor"),
        ({"inputs": [{**SIZED, "data": [1.0]}]}, b"1234", {}, "either data or"),
        ({"inputs": [{**SIZED, "shape": [1]}]}, b"1234", {}, ""),
        ({"inputs": [{**SIZED, "shape": [2]}]}, b"1234", {}, "must have 8 bytes"),
        ({"inputs": [{**SIZED, "datatype": "BYTES"}]}, b"1234", {}, "each preceded by its length"),
        ({"inputs": [SIZED]}, b"1234", {LENGTH: "99999"}, LENGTH),
        ({"inputs": [SIZED]}, b"1234", {LENGTH: "-1"}, LENGTH),
        ({"inputs": [SIZED]}, b"1234", {LENGTH: "1e1"}, LENGTH),
        (b"[" * 100_000, b"", {}, "nested too deeply"),
    ],
)
def test_what_is_wrong_gets_400_and_the_reason(
    server: Server, body: Any, tail: bytes, headers: dict[str, str], said: str
) -> None:
    status, answer, _ = ask(server, f"{HALF}/infer", body, tail, **headers)
    if not said:  # a trailing axis of one may be left out
        assert status == 200
        return
    assert status == 400
    assert said in answer["error"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2/", 200),
        ("/v2/nothing", 404),
        ("/v2x", 404),
        (f"{HALF}/versions/x", 400),
        (f"{HALF}/versions/99999999999999999999", 400),
        (f"{HALF}/infer", 400),
        (f"{HALF}/else", 404),
    ],
)
def test_an_unknown_path_is_an_error(server: Server, path: str, status: int) -> None:
    assert ask(server, path)[0] == status
