"""Versions that come and go under load: no answer is lost, wrong, mixed or stale.

`make soak` swaps 20 times.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc
from tests.integration.serve.conftest import half_plus

from stoker.registry.repository import Repository

SWAPS = int(os.environ.get("STOKER_SWAPS", "2"))
"""How often the version that serves is replaced by the next one."""

SMALL, LARGE = 3, 5000
"""Rows of a request: one that is answered in the loop, and one that is not."""

LONG_S = 120.0
"""Longest that a swap may take; a hang, on any machine."""


States = dict[int, str]
"""Version -> state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One request and what became of it."""

    sent_s: float
    """When it was sent, by the monotonic clock."""

    version: int
    """Which version it is the answer of, by its numbers; each version adds its own number."""


class Client(threading.Thread):
    """Asks one after the other until it is stopped; each request has rows of its own."""

    def __init__(self, number: int, ask: Callable[[list[float]], list[float]], rows: int) -> None:
        """Args: number: tells its rows from others'; ask: one request; rows: of each."""
        super().__init__(daemon=True)
        self._first = 10**6 * number
        self._ask, self._rows = ask, rows
        self._over = threading.Event()
        self.answers: list[Answered] = []
        self.failure = ""

    def run(self) -> None:
        """Send requests, and compare each answer with its request."""
        for count in itertools.count():
            if self._over.is_set() or self.failure:
                return
            rows = [float(self._first + 2 * (count % 1000 + k)) for k in range(self._rows)]
            sent_s = time.monotonic()
            try:
                found = self._ask(rows)
            except Exception as error:  # noqa: BLE001 - whatever it is, a request was lost
                self.failure = f"request {count}: {type(error).__name__}: {error}"
                return
            added = {y - x / 2 for x, y in zip(rows, found, strict=True)}
            if len(added) != 1 or min(added) < 1:
                self.failure = f"request {count} of {rows[:3]}: {found[:3]}, which adds {added}"
                return
            self.answers.append(Answered(sent_s=sent_s, version=round(added.pop())))

    def stop(self) -> None:
        """End it; fails where a request did."""
        self._over.set()
        self.join(timeout=LONG_S)
        assert not self.is_alive(), "a request was not answered"
        assert not self.failure, self.failure


def by_rest(port: int, stack: ExitStack) -> Callable[[list[float]], list[float]]:
    """One connection that is kept; one that the server ends is an answer lost."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)
    stack.callback(connection.close)

    def ask(rows: list[float]) -> list[float]:
        body = json.dumps({"instances": [[x] for x in rows]})
        connection.request("POST", "/v1/models/half:predict", body)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        assert answer.status == 200, found
        return [y for (y,) in found["predictions"]]

    return ask


def by_grpc(port: int, stack: ExitStack) -> Callable[[list[float]], list[float]]:
    channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}"))
    stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)

    def ask(rows: list[float]) -> list[float]:
        request = predict_pb2.PredictRequest()
        request.model_spec.name = "half"
        request.inputs["x"].CopyFrom(tf.make_tensor_proto(np.array(rows, np.float32)[:, None]))
        answer = stub.Predict(request, timeout=LONG_S)
        found = tf.make_ndarray(answer.outputs["y"])[:, 0].tolist()
        added = {y - x / 2 for x, y in zip(rows, found, strict=True)}
        assert added == {float(answer.model_spec.version.value)}, "it names another version"
        return found

    return ask


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """With version 1, which adds 1."""
    repository = Repository(tmp_path / "models")
    repository.push(half_plus(tmp_path / "1", addend=1.0), "half")
    return repository


@pytest.fixture
def ports(repository: Repository, tmp_path: Path) -> Iterator[tuple[int, int]]:
    """REST and gRPC of a server that is a process, as users start it."""
    command = [sys.executable, "-m", "stoker", "serve", str(repository.root), "--poll-s", "0.1"]
    command += ["--rest_api_port", "0", "--port", "0", "--json"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            yield said["rest_port"], said["grpc_port"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=LONG_S) == 0
        finally:
            process.kill()
            process.communicate()


def push_corrupted(repository: Repository, scratch: Path, number: int) -> None:
    """A version whose weights have a flipped bit before anybody can see it."""
    bad = half_plus(scratch / f"bad{number}", addend=-1.0)
    path = Repository(scratch / "elsewhere").push(bad, "half").path
    weights = next((path / "variables").glob("variables.data*"))
    raw = bytearray(weights.read_bytes())
    raw[len(raw) // 2] ^= 1
    weights.write_bytes(raw)
    path.rename(repository.base("half") / str(number))


def has_ended(version: int) -> Callable[[States], bool]:
    return lambda found: found.get(version) == "END"


class Status:
    """What the server says of its versions."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        """Args: ask: gives the answer to a status request."""
        self._ask = ask

    def states(self) -> States:
        """Version -> state."""
        found = self._ask().json()["model_version_status"]
        return {int(each["version"]): each["state"] for each in found}

    def until(self, is_so: Callable[[States], bool]) -> float:
        """When it was seen first."""
        end_s = time.monotonic() + LONG_S
        while not is_so(self.states()):
            assert time.monotonic() < end_s, self.states()
            time.sleep(0.02)  # a state of another process: it is looked at
        return time.monotonic()


def serves_alone(version: int) -> Callable[[States], bool]:
    def look(found: States) -> bool:
        serving = {v for v, state in found.items() if state != "END"}
        return serving == {version} and found[version] == "AVAILABLE"

    return look


def let_all_go_on(clients: list[Client]) -> None:
    """Until each of them was answered once more."""
    had = [len(client.answers) for client in clients]
    end_s = time.monotonic() + LONG_S
    while any(
        len(client.answers) <= count and not client.failure
        for client, count in zip(clients, had, strict=True)
    ):
        assert time.monotonic() < end_s, "somebody is not answered"
        time.sleep(0.01)  # other threads ask


def check(client: Client, alone_s: dict[int, float]) -> None:
    """Hold its answers against since when each version served alone."""
    versions = [answer.version for answer in client.answers]
    assert versions == sorted(versions), "an older version answered behind a newer one"
    assert set(versions) <= set(alone_s)
    assert versions[-1] == max(alone_s)
    for version, since_s in alone_s.items():
        stale = [a for a in client.answers if a.sent_s > since_s and a.version < version]
        assert not stale, f"{len(stale)} answers of what was gone"


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * SWAPS)
def test_swaps_under_load_lose_mix_and_delay_nothing(
    repository: Repository, ports: tuple[int, int], tmp_path: Path, ask_at: Callable[..., Any]
) -> None:
    """Before every other good version comes a corrupt one: it ends, and the old one serves on."""
    rest, rpc = ports
    status = Status(lambda: ask_at(rest, "/v1/models/half"))
    alone_s, last = {1: status.until(serves_alone(1))}, 1
    with ExitStack() as stack:
        clients = [Client(number, by_rest(rest, stack), SMALL) for number in (1, 2)]
        clients += [Client(3, by_rest(rest, stack), LARGE), Client(4, by_grpc(rpc, stack), SMALL)]
        for client in clients:
            client.start()
        for swap in range(SWAPS):
            let_all_go_on(clients)
            number = last + 1
            if swap % 2:
                push_corrupted(repository, tmp_path, number)
                status.until(has_ended(number))
                assert serves_alone(last)(status.states())
                number += 1
            # Each version adds its own number.
            good = half_plus(tmp_path / str(number), addend=float(number))
            assert int(repository.push(good, "half").path.name) == number
            alone_s[number] = status.until(serves_alone(number))
            last = number
        let_all_go_on(clients)
        for client in clients:
            client.stop()
    for client in clients:
        check(client, alone_s)
