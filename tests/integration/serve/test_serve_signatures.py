"""Models of several signatures and inputs, called by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from keras.export import ExportArchive
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from stoker.registry.repository import Repository
from stoker.serve.config import ServeConfig
from stoker.serve.process.server import Server
from stoker.serve.servables.servable import State

Ask = Callable[..., Any]
BOTH = "/v1/models/both"


def both(path: Path, *, addend: float) -> Path:
    """Halves by default, doubles by another name, and gives a sum and a difference by a third."""
    endpoints: dict[str, tuple[Any, list[tf.TensorSpec]]] = {
        "serving_default": (
            lambda x: {"y": x * 0.5 + addend},
            [tf.TensorSpec([None, 1], tf.float32, name="x")],
        ),
        "double": (
            lambda x: {"y": x * 2.0 + addend},
            [tf.TensorSpec([None, 1], tf.float32, name="x")],
        ),
        "apart": (
            lambda left, right: {
                "total": tf.reduce_sum(left) + tf.reduce_sum(right),
                "left": left + addend,
                "right": right * 10,
            },
            [
                tf.TensorSpec([None], tf.float32, name="left"),
                tf.TensorSpec([None, 2], tf.float32, name="right"),
            ],
        ),
    }
    archive = ExportArchive()
    for name, (call, spec) in endpoints.items():
        archive.add_endpoint(name, tf.function(call), input_signature=spec)
    archive.write_out(str(path), verbose=False)
    return path


@pytest.fixture(scope="module")
def served(exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`both` in version 1 (adds 0, label old) and 2 (adds 100, label new); and `two`."""
    folder = tmp_path_factory.mktemp("signatures")
    repository = Repository(folder / "models")
    for number, addend in ((1, 0.0), (2, 100.0)):
        repository.push(both(folder / str(number), addend=addend), "both")
    repository.push(exported["two"], "two")
    entry = 'config {{ name: "{0}" base_path: "{1}" {2} }}'
    labels = " ".join(
        f'version_labels {{ key: "{name}" value: {number} }}'
        for name, number in (("old", 1), ("new", 2))
    )
    entries = [
        entry.format("both", repository.base("both"), "model_version_policy { all {} } " + labels),
        entry.format("two", repository.base("two"), ""),
    ]
    (folder / "models.config").write_text(f"model_config_list {{ {' '.join(entries)} }}")
    server = Server(
        ServeConfig(
            model_config_file=folder / "models.config",
            rest_port=0,
            grpc_port=0,
            poll_s=0.05,
            lame_duck_s=0.0,
            drain_s=5,
        )
    )
    server.start()
    try:
        assert server.wait_until_ready(60)
        end_s = time.monotonic() + 60
        while {state for _, state, _ in server.models.get("both").statuses()} != {State.AVAILABLE}:
            assert time.monotonic() < end_s, "the older version is not loaded"
            time.sleep(0.01)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def stub(served: Server) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        yield prediction_service_pb2_grpc.PredictionServiceStub(channel)


@pytest.fixture
def ask(served: Server, ask_at: Ask) -> Ask:
    return lambda path, body=None: ask_at(served.rest_port, path, body)


def asking(model: str, signature: str = "", **inputs: Any) -> predict_pb2.PredictRequest:
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = model, signature
    for name, value in inputs.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(np.array(value, np.float32)))
    return request


@pytest.mark.parametrize(
    ("where", "version"),
    [
        ("", "2"),
        ("/versions/1", "1"),
        ("/versions/2", "2"),
        ("/labels/old", "1"),
        ("/labels/new", "2"),
    ],
)
def test_metadata_is_of_the_requested_version_or_label(ask: Ask, where: str, version: str) -> None:
    answer = ask(f"{BOTH}{where}/metadata")

    assert answer.status == 200
    found = answer.json()
    assert found["model_spec"] == {"name": "both", "signature_name": "", "version": version}
    signatures = found["metadata"]["signature_def"]["signature_def"]
    assert {"serving_default", "double", "apart"} <= set(signatures)
    assert set(signatures["apart"]["inputs"]) == {"left", "right"}
    assert set(signatures["apart"]["outputs"]) == {"total", "left", "right"}


@pytest.mark.parametrize(
    ("where", "status", "said"),
    [
        ("/versions/3", 404, "Servable not found for request: Specific(both, 3)"),
        ("/labels/none", 400, "Unrecognized servable version label: none"),
    ],
)
def test_metadata_of_what_is_not_there_is_refused(
    ask: Ask, where: str, status: int, said: str
) -> None:
    answer = ask(f"{BOTH}{where}/metadata")

    assert (answer.status, answer.json()) == (status, {"error": said})


def test_metadata_by_grpc_is_of_the_version_or_label_too(stub: Any) -> None:
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "both"
    request.model_spec.version.value = 1
    assert stub.GetModelMetadata(request).model_spec.version.value == 1
    request.model_spec.version_label = "new"
    assert stub.GetModelMetadata(request).model_spec.version.value == 2


@pytest.mark.parametrize(
    ("where", "signature", "expected"),
    [
        ("", None, [101.5, 102.0]),
        ("", "", [101.5, 102.0]),
        ("", "serving_default", [101.5, 102.0]),
        ("", "double", [106.0, 108.0]),
        ("/versions/1", "double", [6.0, 8.0]),
        ("/labels/old", "double", [6.0, 8.0]),
        ("/labels/old", None, [1.5, 2.0]),
    ],
)
def test_each_signature_gives_its_own_numbers(
    ask: Ask, where: str, signature: str | None, expected: list[float]
) -> None:
    named = {} if signature is None else {"signature_name": signature}
    columns = ask(f"{BOTH}{where}:predict", {**named, "inputs": {"x": [[3.0], [4.0]]}})
    rows = ask(f"{BOTH}{where}:predict", {**named, "instances": [[3.0], [4.0]]})

    assert columns.json() == {"outputs": [[value] for value in expected]}
    assert rows.json() == {"predictions": [[value] for value in expected]}


def test_each_signature_gives_its_own_numbers_by_grpc(stub: Any) -> None:
    for signature, expected in (("", 101.5), ("serving_default", 101.5), ("double", 106.0)):
        answer = stub.Predict(asking("both", signature, x=[[3.0]]))
        assert list(answer.outputs["y"].float_val) == [expected]
        assert answer.model_spec.signature_name == (signature or "serving_default")


def test_simultaneous_requests_to_different_signatures_are_not_joined(
    served: Server, ask_at: Ask
) -> None:
    def one(number: int) -> Any:
        name = "double" if number % 2 else "serving_default"
        body = {"signature_name": name, "instances": [[float(number)]]}
        return ask_at(served.rest_port, f"{BOTH}:predict", body).json()["predictions"][0][0]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(200)))

    assert found == [n * 2.0 + 100 if n % 2 else n * 0.5 + 100 for n in range(200)]


def test_several_inputs_in_columns_give_the_numbers_of_rows(ask: Ask) -> None:
    columns = {"fare": [1.5, 2.0], "place": [[1, 2], [3, 4]]}
    rows = [{"fare": 1.5, "place": [1, 2]}, {"fare": 2.0, "place": [3, 4]}]

    by_columns = ask("/v1/models/two:predict", {"inputs": columns})
    by_rows = ask("/v1/models/two:predict", {"instances": rows})

    assert by_columns.json() == {"outputs": {"double": [3.0, 4.0], "sum": [3, 7]}}
    assert by_rows.json() == {"predictions": [{"double": 3.0, "sum": 3}, {"double": 4.0, "sum": 7}]}


def test_inputs_in_columns_may_be_of_different_lengths(ask: Ask, stub: Any) -> None:
    """Only rows need a common first axis: TensorFlow Serving's page says so of `inputs`."""
    left, right = [1.0, 2.0, 3.0], [[10.0, 20.0]]
    expected = {"total": 36.0, "left": [101.0, 102.0, 103.0], "right": [[100.0, 200.0]]}

    answer = ask(
        f"{BOTH}:predict", {"signature_name": "apart", "inputs": {"left": left, "right": right}}
    )
    by_grpc = stub.Predict(asking("both", "apart", left=left, right=right)).outputs

    assert answer.json() == {"outputs": expected}
    assert {name: tf.make_ndarray(by_grpc[name]).tolist() for name in expected} == expected


def test_columns_of_different_lengths_leave_the_requests_in_the_same_batch_intact(
    served: Server, ask_at: Ask
) -> None:
    def one(number: int) -> Any:
        place = [[number, 1]] * (1 + number % 2)
        body = {"inputs": {"fare": [float(number)], "place": place}}
        return ask_at(served.rest_port, "/v1/models/two:predict", body).json()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(200)))

    assert found == [
        {"outputs": {"double": [number * 2.0], "sum": [number + 1] * (1 + number % 2)}}
        for number in range(200)
    ]
