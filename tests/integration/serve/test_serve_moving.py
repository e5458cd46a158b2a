"""The page on moving from TensorFlow Serving, tried as it is written: only paths and ports are others."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

from stoker.registry.repository import Repository

PAGES = Path(__file__).parents[3] / "docs" / "how-to"
BLOCK = re.compile(r"^```\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LONG_S = 120.0
BATCHING = """max_batch_size { value: 64 }
batch_timeout_micros { value: 2000 }
max_enqueued_batches { value: 100 }
num_batch_threads { value: 2 }
"""
MONITORING = 'prometheus_config { enable: true, path: "/monitoring/prometheus/metrics" }\n'


def blocks_of(page: str) -> list[str]:
    return BLOCK.findall((PAGES / page).read_text())


def theirs_and_ours(block: str) -> tuple[list[str], list[str]]:
    """The flags of the block's two lines: of TensorFlow Serving's command, and of ours."""
    theirs, ours = block.splitlines()
    assert theirs.split()[0] == "tensorflow_model_server"
    assert ours.split()[:2] == ["stoker", "serve"]
    return theirs.split()[1:], ours.split()[2:]


@pytest.fixture
def srv(exported: dict[str, Path], tmp_path: Path) -> Path:
    """The content of /srv on the page: two versions of the model, and the three files."""
    repository = Repository(tmp_path / "models")
    for name in ("half_plus_two", "half_plus_three"):
        repository.push(exported[name], "half")
    (shown,) = [b for b in blocks_of("serve.md") if b.startswith("model_config_list")]
    (tmp_path / "models.config").write_text(shown.replace("/srv", str(tmp_path)))
    (tmp_path / "batching.config").write_text(BATCHING)
    (tmp_path / "monitoring.config").write_text(MONITORING)
    return tmp_path


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@dataclass(frozen=True)
class Running:
    pid: int
    rest_port: int
    grpc_port: int
    log: Path


@contextmanager
def running(flags: list[str], folder: Path) -> Iterator[Running]:
    """The command from its ready message on; it is ended by SIGTERM, and must exit with 0."""
    ports = dict(zip(("--rest_api_port", "--port"), free_ports(), strict=True))
    others = [f for f in flags if f.partition("=")[0] not in ports]
    arguments = [f.replace("=/srv", f"={folder}") for f in others]
    arguments += [f"{name}={port}" for name, port in ports.items()]
    log = folder / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "stoker", "serve", *arguments], stdout=written, stderr=written
        )
    try:
        give_up_s = time.monotonic() + LONG_S
        while "\nserving half at " not in f"\n{log.read_text()}":
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up_s, log.read_text()
            time.sleep(0.05)
        yield Running(process.pid, ports["--rest_api_port"], ports["--port"], log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait(LONG_S)


def predicted(port: int, x: float, *, version: int | None = None, label: str = "") -> float:
    """What gRPC answers."""
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "half"
    if version is not None:
        request.model_spec.version.value = version
    if label:
        request.model_spec.version_label = label
    request.inputs["x"].CopyFrom(tf.make_tensor_proto([[x]], tf.float32))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        answer = stub.Predict(request, timeout=30.0, wait_for_ready=True)
    return float(answer.outputs["y"].float_val[0])


def test_both_commands_have_the_same_flags_in_both_lines() -> None:
    blocks = blocks_of("move-from-tensorflow-serving.md")

    assert len(blocks) == 2
    for block in blocks:
        theirs, ours = theirs_and_ours(block)
        assert theirs == ours


@pytest.mark.soak
def test_the_first_command_serves_one_model_by_both_protocols(
    srv: Path, ask_at: Callable[..., Any]
) -> None:
    _, flags = theirs_and_ours(blocks_of("move-from-tensorflow-serving.md")[0])
    assert {f.partition("=")[0] for f in flags} >= {"--rest_api_port", "--port"}

    with running(flags, srv) as server:
        body = {"instances": [[1.0], [2.0], [5.0]]}
        answer = ask_at(server.rest_port, "/v1/models/half:predict", body)
        over_grpc = predicted(server.grpc_port, 5.0)

    assert answer.json() == {"predictions": [[3.5], [4.0], [5.5]]}
    assert over_grpc == 5.5


def test_the_second_command_reads_its_files_and_takes_up_a_change_of_the_models(
    srv: Path, ask_at: Callable[..., Any]
) -> None:
    """It looks every 60 s, as on the page; here every second, to save time."""
    _, flags = theirs_and_ours(blocks_of("move-from-tensorflow-serving.md")[1])
    poll = "--model_config_file_poll_wait_seconds"
    assert f"{poll}=60" in flags
    flags = [f.replace(f"{poll}=60", f"{poll}=1") for f in flags]

    with running(flags, srv) as server:
        port = server.rest_port
        answers = {
            at: ask_at(port, f"/v1/models/half{at}:predict", {"instances": [[4.0]]}).json()
            for at in ("", "/versions/1", "/versions/2", "/labels/stable", "/labels/canary")
        }
        over_grpc = [
            predicted(server.grpc_port, 4.0),
            predicted(server.grpc_port, 4.0, version=1),
            predicted(server.grpc_port, 4.0, label="stable"),
            predicted(server.grpc_port, 4.0, label="canary"),
        ]
        metrics = ask_at(port, "/monitoring/prometheus/metrics")
        logged = server.log.read_text()
        over_rest = answer_after_the_file_changed(srv, server, ask_at)

    assert [answer["predictions"] for answer in answers.values()] == [
        [[5.0]],
        [[4.0]],
        [[5.0]],
        [[4.0]],
        [[5.0]],
    ]
    assert over_grpc == [5.0, 4.0, 4.0, 5.0]
    assert metrics.status == 200
    assert ":tensorflow:serving:request_count" in metrics.body
    assert "WARNING" not in logged
    assert over_rest == {"predictions": [[5.0]]}


def answer_after_the_file_changed(srv: Path, server: Running, ask_at: Callable[..., Any]) -> Any:
    """Move a label in the file of the models, and wait until gRPC has it; what REST answers then."""
    file = srv / "models.config"
    changed = file.read_text().replace('"stable" value: 1', '"stable" value: 2')
    assert changed != file.read_text()
    file.write_text(changed)
    give_up_s = time.monotonic() + LONG_S
    while predicted(server.grpc_port, 4.0, label="stable") != 5.0:
        assert time.monotonic() < give_up_s, server.log.read_text()
        time.sleep(0.1)  # another process's work
    path = "/v1/models/half/labels/stable:predict"
    return ask_at(server.rest_port, path, {"instances": [[4.0]]}).json()
