"""Good bodies with something wrong in them: never a fault of the server's, never slow, never NaN out."""

from __future__ import annotations

import http.client
import json
import random
import time

import grpc
import pytest
import tensorflow as tf
from tensorflow_serving.apis import (
    classification_pb2,
    get_model_status_pb2,
    inference_pb2,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from stoker.serve.process.server import Server

GOOD = {
    "half_plus_two:predict": {"instances": [[1.0], [2.5]], "signature_name": "serving_default"},
    "two:predict": {"inputs": {"fare": [1.5, 2.0], "place": [[1, 2], [3, 4]]}},
    "words:predict": {"instances": ["cash", {"b64": "Y2FzaA=="}]},
    "everything:predict": {"inputs": {"a_string": [["x"]], "a_bool": [True], "a_int8": 5}},
    "judge:classify": {"context": {"x": 1.0}, "examples": [{"x": [2.0]}, {"y": "z", "n": [1, 2]}]},
    "judge:regress": {"signature_name": "regress", "examples": [{"x": -1.5}]},
}
PIECES = [
    *(b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b"\\u", b"\\ud800", b"null", b"true"),
    *(b"NaN", b"-Infinity", b"1e999", b"-0", b"1.", b"9" * 400, b"\0", b"\xff", b"b64", b'{"b64":'),
    *(b'"instances":', b'"inputs":', b'"examples":', b"[" * 300, b'{"a":' * 300, b" " * 1000),
]
MUTANTS = 60
"""For each good body; the longest answer is held to, so that many do not add up unseen."""


def mutant(raw: bytes, chance: random.Random) -> bytes:
    """The bytes with one to three changes."""
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(raw) + 1)
        end = min(len(raw), start + chance.randrange(6))
        raw = (
            raw[:start] + chance.choice([b"", *PIECES, bytes([chance.randrange(256)])]) + raw[end:]
        )
    return raw


@pytest.mark.parametrize("path", GOOD)
def test_no_mutant_of_a_good_body_is_the_servers_fault(server: Server, path: str) -> None:
    chance = random.Random(path)
    connection = http.client.HTTPConnection("127.0.0.1", server.rest_port, timeout=30)
    whole = json.dumps(GOOD[path]).encode()
    longest_s = 0.0
    for number in range(MUTANTS):
        body = mutant(whole, chance) if number else whole
        begun_s = time.thread_time(), time.monotonic()
        connection.request("POST", f"/v1/models/{path}", body)
        answer = connection.getresponse()
        found = answer.read()
        longest_s = max(longest_s, time.monotonic() - begun_s[1])
        assert answer.status in (200, 400), (body, found)
        said = json.loads(found)
        assert "error" not in said or "\n" not in said["error"], body
        assert b"Traceback" not in found
        assert len(found) < 10_000
    connection.close()
    assert longest_s < 10  # none of them makes the server think for long, however slow the machine


def test_no_mutant_of_a_grpc_message_is_the_servers_fault(server: Server) -> None:
    chance = random.Random(5)
    predict = predict_pb2.PredictRequest()
    predict.model_spec.name = "half_plus_two"
    predict.inputs["x"].CopyFrom(tf.make_tensor_proto([[1.0], [2.0]]))
    classify = classification_pb2.ClassificationRequest()
    classify.model_spec.name = "judge"
    feature = classify.input.example_list.examples.add().features.feature["x"]
    feature.float_list.value.append(1.0)
    several = inference_pb2.MultiInferenceRequest()
    several.tasks.add(method_name="tensorflow/serving/classify").model_spec.name = "judge"
    several.input.CopyFrom(classify.input)
    status = get_model_status_pb2.GetModelStatusRequest()
    status.model_spec.name = "two"
    methods = {
        "PredictionService/Predict": predict,
        "PredictionService/Classify": classify,
        "PredictionService/MultiInference": several,
        "ModelService/GetModelStatus": status,
        "PredictionService/Nonsense": predict,
    }
    codes, said = set(), set()
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        for method, message in methods.items():
            call = channel.unary_unary(f"/tensorflow.serving.{method}")
            for _ in range(MUTANTS):
                try:
                    call(mutant(message.SerializeToString(), chance), timeout=30)
                except grpc.RpcError as error:
                    codes.add((error.code().name, method.partition("/")[2]))
                    said.add(error.details() or "")
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        assert list(stub.Predict(predict).outputs["y"].float_val) == [2.5, 3.0]

    assert [text for text in said if "Traceback" in text or "bug" in text] == []
    # gRPC itself answers INTERNAL to bytes that are not a message, before any of our code.
    ours = {code for code, _ in codes if code != "INTERNAL"}
    assert ours <= {"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "FAILED_PRECONDITION"}
    assert ("UNIMPLEMENTED", "Nonsense") in codes
