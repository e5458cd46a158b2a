"""TensorFlow's profiler service on the gRPC port: what TensorBoard's "capture profile" asks."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2
from tests.integration.serve.conftest import ask_port, started

from stoker.registry.repository import Repository
from stoker.serve.config import ServeConfig
from stoker.serve.grpc.descriptions import PROFILER
from stoker.serve.process.server import Server

MESSAGES = PROFILER.messages
PREDICT = "/v1/models/half:predict"
ROW = {"instances": [[1.0]]}
CLIENT = """\
import sys
import tensorflow as tf
tf.profiler.experimental.client.trace(sys.argv[1], sys.argv[2], 300, num_tracing_attempts=5)
"""


@contextmanager
def serving(exported: dict[str, Path], folder: Path, **more: Any) -> Iterator[Server]:
    repository = Repository(folder / "models")
    repository.push(exported["half_plus_two"], "half")
    config = ServeConfig(
        models={"half": repository.base("half")},
        rest_port=0,
        grpc_port=0,
        poll_s=0.1,
        lame_duck_s=0.0,
        drain_s=5,
        **more,
    )
    with started(config) as server:
        yield server


@pytest.fixture(scope="module")
def served(exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(exported, tmp_path_factory.mktemp("profiled")) as server:
        yield server


@contextmanager
def busy(server: Server) -> Iterator[None]:
    """Requests, one after the other, until the block ends."""
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.01):
            ask_port(server.rest_port, PREDICT, ROW)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def call(
    server: Server, method: str, *, key: str = "", timeout_s: float = 30, **fields: Any
) -> Any:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        ask = channel.unary_unary(
            f"/{PROFILER.service}/{method}",
            request_serializer=MESSAGES[f"{method}Request"].SerializeToString,
            response_deserializer=MESSAGES[f"{method}Response"].FromString,
        )
        metadata = (("x-api-key", key),) if key else ()
        return ask(MESSAGES[f"{method}Request"](**fields), timeout=timeout_s, metadata=metadata)


def profile(server: Server, duration_ms: int, **more: Any) -> Any:
    options = MESSAGES["ProfileOptions"](duration_ms=duration_ms, **more.pop("options", {}))
    return call(server, "Profile", opts=options, **more)


def refusal(ask: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        ask()
    error: Any = caught.value
    return error.code().name, error.details()


def refused_by(server: Server) -> tuple[str, str] | None:
    """How a short trace is refused, None if it is not."""
    try:
        profile(server, 1)
    except grpc.RpcError as error:
        rpc_error: Any = error
        return rpc_error.code().name, rpc_error.details()
    return None


def events(response: Any) -> set[str]:
    (tool,) = response.tool_data
    space = xplane_pb2.XSpace.FromString(tool.data)
    return {found.name for plane in space.planes for found in plane.event_metadata.values()}


def test_a_trace_has_the_models_operations_and_an_idle_servers_is_empty(served: Server) -> None:
    with busy(served):
        traced = profile(served, 200)
    idle = profile(served, 50)

    assert [tool.name for tool in traced.tool_data] == ["xplane.pb"]
    assert not traced.empty_trace
    assert any("mul" in name.lower() for name in events(traced))
    assert idle.empty_trace
    assert not idle.tool_data


def test_a_client_chooses_when_a_trace_begins(served: Server) -> None:
    begin_ns = time.time_ns() + 400_000_000
    with busy(served):
        options = {"start_timestamp_ns": begin_ns, "version": 1, "host_tracer_level": 1}
        later = profile(served, 100, options=options)

    assert time.time_ns() >= begin_ns + 100_000_000
    assert not later.empty_trace


def test_tensorflows_client_writes_the_trace_where_tensorboard_looks(
    served: Server, tmp_path: Path
) -> None:
    with busy(served):
        subprocess.run(
            [sys.executable, "-c", CLIENT, f"localhost:{served.grpc_port}", str(tmp_path)],
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
            check=True,
            capture_output=True,
            timeout=300,
        )

    (file,) = tmp_path.glob("plugins/profile/*/*")
    assert file.name == f"localhost_{served.grpc_port}.xplane.pb"


def test_one_trace_at_a_time_which_terminate_and_a_client_that_leaves_end(served: Server) -> None:
    began_s = time.monotonic()
    found: list[Any] = []

    def trace() -> None:
        while not found:  # the short ones below may be first
            with contextlib.suppress(grpc.RpcError):
                found.append(profile(served, 50_000, session_id="first"))

    long = threading.Thread(target=trace)
    long.start()
    while (refused := refused_by(served)) is None:  # until the first one has begun
        assert time.monotonic() - began_s < 40, "two traces are taken at once"
    assert refused == ("INTERNAL", "Another profiling session active.")
    call(served, "Terminate", session_id="another")
    assert long.is_alive()
    call(served, "Terminate", session_id="first")
    long.join(20)
    assert len(found) == 1

    assert refusal(lambda: profile(served, 50_000, timeout_s=0.3))[0] == "DEADLINE_EXCEEDED"
    while refused_by(served) is not None:  # its trace ends a moment later
        assert time.monotonic() - began_s < 40, "the trace of a client that left goes on"


def test_what_would_take_too_long_or_is_of_a_tpu_is_refused(served: Server) -> None:
    too_long = ("INVALID_ARGUMENT", "a trace must end within 60 s, not 61 s")
    far = {"start_timestamp_ns": time.time_ns() + 10**12}

    assert refusal(lambda: profile(served, 61_000)) == too_long
    assert refusal(lambda: profile(served, 1, options=far))[0] == "INVALID_ARGUMENT"
    assert refusal(lambda: call(served, "Monitor")) == ("UNIMPLEMENTED", "unimplemented.")


def test_with_keys_only_an_admin_traces_and_the_end_of_the_server_ends_a_trace(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "- {name: r, role: predict, key: a-reader-of-the-model}\n"
        "- {name: a, role: admin, key: an-admin-of-the-model}\n"
    )
    with serving(exported, tmp_path, keys_file=keys) as server:
        for key, code in (("", "UNAUTHENTICATED"), ("a-reader-of-the-model", "PERMISSION_DENIED")):
            for method in ("Profile", "Terminate", "Monitor"):
                refused = refusal(functools.partial(call, server, method, key=key))
                assert refused[0] == code
        found: list[Any] = []
        admin = "an-admin-of-the-model"
        thread = threading.Thread(target=lambda: found.append(profile(server, 20_000, key=admin)))
        thread.start()
        time.sleep(0.3)  # the profile runs when the server is closed
        began_s = time.monotonic()
    thread.join(20)

    assert len(found) == 1
    assert time.monotonic() - began_s < 4


def test_without_it_there_is_no_such_service(exported: dict[str, Path], tmp_path: Path) -> None:
    with serving(exported, tmp_path, profiler=False) as server:
        assert refusal(lambda: profile(server, 1))[0] == "UNIMPLEMENTED"
