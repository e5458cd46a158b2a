"""The Open Inference Protocol by a client that others wrote: NVIDIA's for Triton, in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from keras.export import ExportArchive

from stoker.registry.repository import Repository
from stoker.serve.config import ServeConfig
from stoker.serve.dataplane.open_inference import DATATYPES
from stoker.serve.process.server import Server

TRITON_PYTHON = Path(__file__).parents[3] / ".tools" / "triton" / "bin" / "python"
"""An environment of its own: tritonclient asks for an older protobuf than is locked."""

SCRIPT = Path(__file__).with_name("triton_client.py")
HALVES = [[2.5], [3.0], [4.5]]


def echo(path: Path, dtypes: list[str]) -> Path:
    """Gives back what it gets, one input for every datatype of the protocol."""
    spec = [tf.TensorSpec([None, 3], tf.dtypes.as_dtype(name), name=name) for name in dtypes]

    def same(*values: tf.Tensor) -> dict[str, tf.Tensor]:
        return {f"{n}_out": tf.identity(v) for n, v in zip(dtypes, values, strict=True)}

    archive = ExportArchive()
    archive.add_endpoint("serving_default", tf.function(same), input_signature=spec)
    archive.write_out(str(path), verbose=False)
    return path


@pytest.fixture(scope="module")
def said(
    exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, dict[str, Any]]]:
    """What the client got, by REST ("http") and by gRPC ("grpc")."""
    if not TRITON_PYTHON.exists():
        if os.environ.get("CI") == "true":
            pytest.fail(f"must be there in CI: {TRITON_PYTHON}")
        pytest.skip(f"{TRITON_PYTHON} must be an environment with requirements-triton.lock")
    folder = tmp_path_factory.mktemp("triton")
    repository = Repository(folder / "models")
    for name in ("half_plus_two", "two"):
        repository.push(exported[name], name)
    repository.push(echo(folder / "echo", list(DATATYPES)), "echo")
    in_json = [name for name in DATATYPES if name not in ("float16", "bfloat16")]
    repository.push(echo(folder / "echo_json", in_json), "echo_json")
    server = Server(
        ServeConfig(
            root=repository.root, rest_port=0, grpc_port=0, poll_s=0.1, lame_duck_s=0.0, drain_s=5
        )
    )
    server.start()
    try:
        assert server.wait_until_ready(60)
        command = [str(TRITON_PYTHON), str(SCRIPT), str(server.rest_port), str(server.grpc_port)]
        clean = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean)
        assert ended.returncode == 0, ended.stderr
        yield json.loads(ended.stdout)
    finally:
        server.stop()


@pytest.mark.parametrize("client", ["http", "grpc"])
def test_tritons_client_is_answered(said: dict[str, dict[str, Any]], client: str) -> None:
    found = said[client]

    states = ("live", "ready", "model ready", "version not ready", "model not there")
    assert [found[name] for name in states] == [True, True, True, False, False]
    assert found["described"] == [
        "tensorflow_savedmodel",
        ["1"],
        [["fare", "FP32", [-1]], ["place", "INT64", [-1, 2]]],
    ]
    for name in ("half", "version", "signature", "priority", "mixed", "gzip"):
        assert found[name] == HALVES, name
    assert found["empty"] == [0, 1]
    assert found["several"] == [HALVES] * 20


@pytest.mark.parametrize(
    ("client", "way", "without"),
    [
        ("http", "echo", set()),
        ("grpc", "echo", set()),
        ("http", "echo in JSON", {"float16", "bfloat16"}),
    ],
)
def test_every_datatype_of_the_protocol_goes_there_and_back(
    said: dict[str, dict[str, Any]], client: str, way: str, without: set[str]
) -> None:
    assert said[client][way] == dict.fromkeys(DATATYPES.keys() - without, True)


def test_its_http_client_may_compress_by_deflate(said: dict[str, dict[str, Any]]) -> None:
    assert said["http"]["deflate"] == HALVES


@pytest.mark.parametrize(
    ("client", "refused", "not_found"),
    [("http", "400", "404"), ("grpc", "StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND")],
)
def test_wrong_requests_raise_the_clients_own_errors(
    said: dict[str, dict[str, Any]], client: str, refused: str, not_found: str
) -> None:
    found = said[client]
    expected = {
        "wrong datatype": f"Refused: {refused} input 'x' must be float32",
        "wrong name": f"Refused: {refused} the inputs must be x",
        "wrong output": f"Refused: {refused} output tensor alias not found in signature: z",
        "wrong model": f"Refused: {not_found} Servable not found for request: Latest(none)",
        "sequence": f"Refused: {refused} this server keeps no state of sequences",
    }
    for name, text in expected.items():
        assert str(found[name]).startswith(text), found[name]
