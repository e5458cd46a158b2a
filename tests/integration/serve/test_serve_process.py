"""The server as its users start and end it: a process with flags and signals."""

from __future__ import annotations

import json
import os
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
from stoker.registry.repository import Repository
from stoker.serve.config import ServeConfig
from stoker.serve.process.server import Server

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
        time.sleep(0.2)  # the server has read the first part of the body
        process.send_signal(signal.SIGTERM)
        give_up_s = time.monotonic() + 30
        while (during := ask_at(port, "/readyz")).status != 503:
            assert time.monotonic() < give_up_s, "it got a signal to end"
            time.sleep(0.02)  # a signal on its way
        assert during.headers.get("connection") == "close"
        time.sleep(1.0)  # the server waits for the rest, and does not cut it off
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
def test_a_port_that_is_taken_is_reported_in_one_line(base: Path, taken: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        ports = {"rest_port": 0, "grpc_port": 0, taken: holder.getsockname()[1]}

        with pytest.raises(ConfigError, match="port must be free"):
            Server(ServeConfig(models={"half": base}, **ports))


def children_of(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        found |= set(map(int, (task / "children").read_text().split()))
    return found


COUNT = ":tensorflow:serving:request_count"


def counted(exposition: str, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = [line for line in exposition.splitlines() if line.startswith(name + "{")]
    return sum(float(line.split()[-1]) for line in lines)


def running_workers(exposition: str) -> set[int]:
    lines = [x for x in exposition.splitlines() if x.startswith('stoker_worker_pid{worker="')]
    return {int(float(line.split()[-1])) for line in lines if 'worker="parent"' not in line}


def test_workers_share_the_ports_are_replaced_and_end_without_a_lost_request(
    base: Path, tmp_path: Path, ask_at: Callable[..., Any]
) -> None:
    """Two processes by flags in TensorFlow Serving's spelling; one is killed, then both are ended."""
    (tmp_path / "models.config").write_text(
        f'model_config_list {{ config {{ name: "half" base_path: "{base}" }} }}'
    )
    (tmp_path / "batching").write_text("max_batch_size { value: 8 }")
    (tmp_path / "monitoring").write_text('prometheus_config { enable: true path: "/metrics" }')
    flags = [f"--model_config_file={tmp_path / 'models.config'}", "--rest_api_port=0", "--port=0"]
    flags += [f"--batching_parameters_file={tmp_path / 'batching'}", "--enable_batching=true"]
    flags += [f"--monitoring_config_file={tmp_path / 'monitoring'}", "--workers", "2", "--json"]
    with subprocess.Popen(
        [*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stdout is not None
            assert running.stderr is not None
            said = json.loads(running.stdout.readline())
            assert (said["pid"], said["models"]) == (running.pid, ["half"])
            first = children_of(running.pid)
            assert len(first) == 2
            port = said["rest_port"]
            assert ask_at(port, "/metrics").status == 200

            for _ in range(10):
                assert ask_at(port, "/v1/models/half:predict", {"instances": [[1.0]]}).status == 200
            assert {counted(ask_at(port, "/metrics").body, COUNT) for _ in range(8)} == {10}
            victim = min(first)
            os.kill(victim, signal.SIGKILL)
            end_s = time.monotonic() + 60
            while len(children_of(running.pid) - {victim}) < 2:
                assert time.monotonic() < end_s
                time.sleep(0.05)
            body = {"instances": [[1.0]]}
            answers = [ask_at(port, "/v1/models/half:predict", body) for _ in range(20)]
            assert {answer.status for answer in answers} == {200}
            while not counted(ask_at(port, "/metrics").body, "stoker_workers_replaced"):
                assert time.monotonic() < end_s
                time.sleep(0.05)
            while len(running_workers(ask_at(port, "/metrics").body) - {victim}) < 2:
                assert time.monotonic() < end_s
                time.sleep(0.05)
            truths = {counted(ask_at(port, "/metrics").body, COUNT) for _ in range(8)}
            assert truths == {10 + 20}, "each worker tells of all, also of the one that was killed"

            statuses: list[int] = []

            def load() -> None:
                closing = False
                while not closing:
                    answer = ask_at(port, "/v1/models/half:predict", body)
                    statuses.append(answer.status)
                    closing = answer.headers.get("connection") == "close"

            client = threading.Thread(target=load)
            client.start()
            time.sleep(0.2)  # the load runs when the signal comes
            running.send_signal(signal.SIGTERM)
            client.join(timeout=30)
            assert running.wait(timeout=60) == 0
            assert set(statuses) == {200}
            assert "Traceback" not in running.stderr.read()
        finally:
            if running.poll() is None:
                running.terminate()
                running.wait(60)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--model_config_file=WRONG"],
            "Error parsing text-format tensorflow.serving.ModelServerConfig",
        ),
        (["BASE", "--model_config_file=WRONG"], "no folder can be served with it"),
        (["BASE", "--host", "0.0.0.0"], "must not be served without authentication"),
        (["BASE", "--no-batching", "--enable_batching"], "must not be combined with"),
        (["BASE", "--batching_parameters_file=WRONG"], "tensorflow.serving.BatchingParameters"),
        (["BASE", "--ssl_config_file=WRONG"], "tensorflow.serving.SSLConfig"),
        (["BASE", "--workers=0"], "at least 1"),
        (["BASE", "--grpc_channel_arguments=max=1"], "grpc.NAME=VALUE"),
    ],
)
def test_wrong_flags_end_in_one_line(
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    said: str,
) -> None:
    """In this process, whose TensorFlow is imported: no server comes of it."""
    from stoker.cli.main import invoke

    (tmp_path / "wrong").write_text("nonsense {")
    wrong = str(tmp_path / "wrong")
    given = [flag.replace("WRONG", wrong).replace("BASE", str(base)) for flag in flags]

    code = invoke(["serve", *given, "--rest_api_port=0", "--port=0", "--max-run-s=0"], debug=False)

    assert code == 2
    assert said in capsys.readouterr().err


def test_ports_open_when_every_model_can_be_called_and_one_that_cannot_be_loaded_ends_the_start(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken" / "1"
    broken.mkdir(parents=True)
    (broken / "saved_model.pb").write_bytes(b"not a model")
    flags = ["--model_name", "broken", "--model_base_path", str(broken.parent), "--poll-s", "0.05"]
    flags += ["--port", "0", "--rest_api_port", "0"]

    ended = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60)

    assert ended.returncode == 2
    said = "Failed to start server. Error: 1 servable(s) did not become available: {{name: broken"
    assert said in ended.stderr
    assert "a saved_model.pb that is damaged" in ended.stderr


def test_a_model_without_a_version_is_waited_for_without_a_port(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    repository = Repository(tmp_path / "models")
    repository.push(exported["half_plus_two"], "half")
    (tmp_path / "models" / "later").mkdir()
    models = {name: repository.base(name) for name in ("half", "later")}
    server = Server(ServeConfig(models=models, rest_port=0, grpc_port=0, poll_s=0.02))
    server.load()
    try:
        assert wait_for(lambda: server.models.available()["half"])
        assert wait_for(server.models.all_tried)
        assert not server.may_listen()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.rest_port), timeout=5)
        repository.push(exported["half_plus_two"], "later")
        assert wait_for(server.may_listen)
    finally:
        server.models.close()
        server.stop()


def test_sigterm_while_a_model_is_waited_for_opens_no_port(tmp_path: Path) -> None:
    (tmp_path / "later").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--model_name", "later", "--model_base_path", str(tmp_path / "later"), "--port", "0"]
    flags += ["--rest_api_port", str(port), "--max-run-s", "0"]
    connected: list[int] = []

    def hears() -> bool:
        status = Path(f"/proc/{running.pid}/status").read_text()
        (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    def has_ended() -> bool:
        with socket.socket() as client:
            if not client.connect_ex(("127.0.0.1", port)):
                connected.append(port)
        return running.poll() is not None

    with subprocess.Popen([*COMMAND, *flags], stderr=subprocess.PIPE, text=True) as running:
        try:
            assert wait_for(hears)
            running.send_signal(signal.SIGTERM)
            assert wait_for(has_ended)
        finally:
            running.kill()
        assert running.stderr is not None
        said = running.stderr.read()

    assert running.returncode == 0, said
    assert "Traceback" not in said
    assert not connected


def wait_for(holds: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + 30
    while not holds() and time.monotonic() < until_s:
        time.sleep(0.02)
    return holds()
