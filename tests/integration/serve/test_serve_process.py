"""The server as its users start and end it: a process with flags and signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.core.errors import ConfigError
from stoker.export.repository import Repository
from stoker.serve.config import ServeConfig
from stoker.serve.server import Server

COMMAND = [sys.executable, "-m", "stoker", "serve"]


@pytest.fixture
def base(exported: dict[str, Path], tmp_path: Path) -> Path:
    repository = Repository(tmp_path / "models")
    repository.push(exported["half_plus_two"], "half")
    return repository.base("half")


@pytest.fixture
def process(base: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`stoker serve` with TensorFlow Serving's flags, in its spelling."""
    flags = ["--model_name", "renamed", "--model_base_path", str(base), "--port", "0"]
    flags += ["--rest_api_port", "0", "--ready-file", str(tmp_path / "ready.json"), "--json"]
    flags += ["--enable_batching=true", "--enable_signature_method_name_check=false"]
    running = subprocess.Popen(
        [*COMMAND, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield running
    if running.poll() is None:
        running.kill()
    running.communicate()


def test_sigterm_turns_readiness_off_answers_what_is_under_way_and_exits_0(
    process: subprocess.Popen[str], tmp_path: Path, ask_at: Callable[..., Any]
) -> None:
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    assert said == json.loads((tmp_path / "ready.json").read_text())
    assert (said["pid"], said["models"]) == (process.pid, ["renamed"])
    port = said["rest_port"]
    statuses: list[int] = []

    def load() -> None:
        """Ask until the answers say that clients should turn away."""
        closing = False
        while not closing:
            answer = ask_at(port, "/v1/models/renamed:predict", {"instances": [[1.0]]})
            statuses.append(answer.status)
            closing = answer.headers.get("connection") == "close"

    client = threading.Thread(target=load)
    client.start()
    body = b'{"instances": [[2.0]]}'
    head = "POST /v1/models/renamed:predict HTTP/1.1\r\nHost: x\r\nContent-Length:"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as slow:
        slow.sendall(f"{head} {len(body)}\r\n\r\n".encode() + body[:5])
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        during = ask_at(port, "/readyz")
        assert (during.status, during.headers.get("connection")) == (503, "close")
        time.sleep(1.0)
        slow.sendall(body[5:])
        with slow.makefile("rb") as whole:
            answer = whole.read()
    client.join(timeout=30)
    process.wait(timeout=30)

    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b'{"predictions": [[3.0]]}')
    assert process.returncode == 0
    assert set(statuses) == {200}
    assert process.stderr is not None
    stderr = process.stderr.read()
    assert "Traceback" not in stderr
    assert "deprecated" not in stderr


@pytest.mark.parametrize("taken", ["rest_port", "grpc_port"])
def test_a_port_that_is_taken_is_said_in_one_line(base: Path, taken: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        ports = {"rest_port": 0, "grpc_port": 0, taken: holder.getsockname()[1]}

        with pytest.raises(ConfigError, match="port must be free"):
            Server(ServeConfig(models={"half": base}, **ports))
