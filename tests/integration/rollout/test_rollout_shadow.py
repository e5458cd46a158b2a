"""Shadow traffic through a real server: copies are compared, and nothing that the candidate does reaches a client."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from keras.export import ExportArchive
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

from stoker.cli.main import invoke
from stoker.core.errors import EXIT_DONE
from stoker.registry.repository import Repository
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.shadow.channel import ShadowTarget
from stoker.rollout.shadow.compare import Comparison
from stoker.rollout.shadow.counts import ShadowSummary
from stoker.rollout.shadow.shadow import Shadow, ShadowLimits
from stoker.rollout.state.state import Phase, RolloutState
from stoker.serve.routing import RequestCopy, Route

LIMIT_S = 240.0
"""Longest wait for anything here; on a quiet machine the longest is the import of TensorFlow."""

RUN_S = 3.0
"""Longest call of a version in shadow without a server."""

PAUSE_S = 0.03
"""Time between two looks."""

FAST = ["--step-time", "1s", "--warm-up", "0s", "--min-requests", "50"]
UNMEASURED = ["--dry-run", "slow_p99", "--dry-run", "slow_p50"]


def exported(
    path: Path, *, fails_at: float = -1.0, nan_at: float = -1.0, ends: bool = True
) -> Path:
    """y = x + 1, `judge` classifies and `value` regresses Examples."""
    spec = [tf.TensorSpec([None], tf.string, name="inputs")]
    parsed: Any = {"x": tf.io.FixedLenFeature([], tf.float32, 0.0)}

    def x_of(rows: tf.Tensor) -> Any:
        return tf.io.parse_example(rows, parsed)["x"]

    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.control_dependencies([tf.debugging.assert_none_equal(x, fails_at)]):
            y = tf.where(tf.equal(x, nan_at), np.nan, x + 1.0)
        if not ends:  # never true, which only the run shows
            y = tf.while_loop(lambda y: tf.reduce_all(y < np.inf), lambda y: [y * 0.5], [y])[0]
        return {"y": y}

    def judge(inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        score = tf.sigmoid(x_of(inputs))
        classes = tf.tile(tf.constant([["low", "high"]]), tf.stack([tf.shape(inputs)[0], 1]))
        return {"scores": tf.stack([1.0 - score, score], 1), "classes": classes}

    def value(inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"outputs": x_of(inputs)[:, None] * 0.5}

    archive = ExportArchive()
    x = [tf.TensorSpec([None, 1], tf.float32, name="x")]
    archive.add_endpoint("serving_default", tf.function(call), input_signature=x)
    archive.add_endpoint("judge", tf.function(judge), input_signature=spec)
    archive.add_endpoint("value", tf.function(value), input_signature=spec)
    archive.write_out(str(path), verbose=False)
    return path


NOTHING = ShadowSummary(
    copied=0,
    compared=0,
    dropped=0,
    bad=0,
    baseline_bad=0,
    different=0,
    rows=0,
    class_changes=0,
    distance=0.0,
    latency_s={},
)


@dataclass
class Serving:
    """A server process."""

    models: Path
    process: subprocess.Popen[str]
    rest_port: int
    grpc_port: int
    answers: list[tuple[int, float | None]] = field(default_factory=list)
    """Status and y - x of each prediction."""

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        return self._ask("POST", path, json.dumps(body))

    def checked(self, path: str, body: Any) -> None:
        """Ask for an answer that must be good."""
        status, answer = self.post(path, body)
        assert status == 200, answer

    def predict(self, x: float) -> None:
        status, body = self.post("/v1/models/m:predict", {"instances": [[x]]})
        self.answers.append((status, body["predictions"][0][0] - x if status == 200 else None))

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.rest_port, timeout=30)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        return response.status, text if body is None else json.loads(text)

    def copies(self, result: str) -> float:
        """The metric of copies with this result."""
        _, text = self._ask("GET", "/monitoring/prometheus/metrics")
        found = re.search(rf'stoker_rollout_copies{{model_name="m",result="{result}"}} (\S+)', text)
        return float(found[1]) if found else 0.0

    def state(self) -> RolloutState:
        return ModelRollouts(self.models, "m").status().state

    def shadow(self) -> ShadowSummary:
        """The figures of the shadow stage."""
        stages = ModelRollouts(self.models, "m").status().shadow_stages()
        return stages.get(0, NOTHING)

    def shadow_pid(self) -> int:
        """The process that runs the candidate."""
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                text = command.read_bytes()
                if b"rollout.shadow.process" in text and str(self.models).encode() in text:
                    return int(command.parent.name)
        raise AssertionError("no process runs the candidate")


def rollout(models: Path, *arguments: str) -> int:
    """The exit code of a command."""
    return invoke(["rollout", *arguments, "--models", str(models)], debug=False)


def wait_for(claim: Callable[[], bool], what: str, act: Callable[[], Any] = lambda: None) -> None:
    """Act again and again until a claim holds."""
    end_s = time.monotonic() + LIMIT_S
    while not claim():
        assert time.monotonic() < end_s, what
        act()
        time.sleep(PAUSE_S)  # what has the lowest priority needs its turn


def push(repository: Repository, model: Path) -> None:
    """Add a version that no label names, else the server would load it for requests by label."""
    repository.push(model, "m")
    repository.set_alias("m", "champion", version=1)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("shadow")
    repository = Repository(folder / "models")
    for version in (1, 2):
        push(repository, exported(folder / str(version)))
    arguments = ["start", "m", "2", "--detach", "--canary", "shadow:1h,100", *FAST, *UNMEASURED]
    assert rollout(repository.root, *arguments) == EXIT_DONE
    flags = ["--rest_api_port", "0", "--port", "0", "--json", "--poll-s", "0.2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker", "serve", str(repository.root), *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    yield Serving(
        models=repository.root,
        process=process,
        rest_port=ready["rest_port"],
        grpc_port=ready["grpc_port"],
    )
    process.kill()
    process.wait()
    process.stdout.close()


def asks(serving: Serving, channel: grpc.Channel) -> dict[str, Callable[[], Any]]:
    """Each kind of request."""
    stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
    predict = predict_pb2.PredictRequest()
    predict.model_spec.name = "m"
    predict.inputs["x"].CopyFrom(tf.make_tensor_proto([[1.0]]))
    examples = {"examples": [{"x": 1.0}]}
    v2 = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}
    judge, value = ({"signature_name": name, **examples} for name in ("judge", "value"))
    return {
        "REST predict": lambda: serving.predict(1.0),
        "gRPC predict": lambda: stub.Predict(predict, timeout=30),
        "REST classify": lambda: serving.checked("/v1/models/m:classify", judge),
        "REST regress": lambda: serving.checked("/v1/models/m:regress", value),
        "open inference": lambda: serving.checked("/v2/models/m/infer", v2),
    }


def test_each_kind_of_request_is_copied_and_an_equal_version_goes_on(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel:
        for kind, ask in asks(serving, channel).items():
            most = serving.copies("compared") + 1  # one of the kind before may be under way
            wait_for(lambda: serving.copies("compared") > most, kind, ask)  # noqa: B023 - called here
    # The server does not load the candidate, so nothing that it does can reach a client.
    assert serving.post("/v1/models/m/versions/2:predict", {"instances": [[1.0]]})[0] == 404
    wait_for(lambda: serving.shadow().compared >= 50, "counts", lambda: serving.predict(1.0))
    found = serving.shadow()
    assert found.copied == found.compared + found.dropped
    assert (found.bad, found.baseline_bad, found.different, found.class_changes) == (0, 0, 0, 0)
    assert found.rows > 0
    assert set(found.latency_s) == {"1", "2"}
    assert rollout(serving.models, "status", "m") == EXIT_DONE
    assert re.search(r"shadow: \d+ copied, \d+ compared, .* 0 different", capsys.readouterr().out)

    # Its process dies: clients do not notice, and the copy that it had counts as a bad answer.
    os.kill(serving.shadow_pid(), signal.SIGKILL)
    wait_for(lambda: serving.shadow().bad == 1, "a death", lambda: serving.predict(1.0))
    assert rollout(serving.models, "promote", "m", "--full") == EXIT_DONE
    path = "/v1/models/m/versions/2:predict"
    wait_for(lambda: serving.post(path, {"instances": [[1.0]]})[0] == 200, "version 2 is loaded")
    assert serving.state().phase is Phase.COMPLETED
    assert set(serving.answers) == {(200, 1.0)}


def test_a_bad_version_is_rolled_back_without_a_request_of_a_client(
    serving: Serving, tmp_path: Path
) -> None:
    push(Repository(serving.models), exported(tmp_path / "3", fails_at=3.0, nan_at=7.0))
    arguments = ["start", "m", "3", "--detach", "--canary", "shadow:1h,100", *FAST, *UNMEASURED]
    assert rollout(serving.models, *arguments) == EXIT_DONE
    serving.answers.clear()

    def ask() -> None:
        # In order, a pause after each copy might let the same ones through each time.
        for x in random.sample(range(10), 10):
            serving.predict(float(x))

    wait_for(lambda: serving.state().phase is Phase.ROLLED_BACK, "a rollback", ask)
    state, found = serving.state(), serving.shadow()
    assert state.reason.startswith("bad_answers: candidate ")
    assert state.rejected == (3,)
    assert found.bad > 10
    assert (found.baseline_bad, found.different) == (0, 0)
    assert set(serving.answers) == {(200, 1.0)}


class Shadowed:
    """A version in shadow without a server, and what became of its copies."""

    def __init__(self, folder: Path, *, candidate: int) -> None:
        self.found: list[Comparison | None] = []
        self.offered = 0
        self.waits = False
        target = ShadowTarget(
            model="m",
            baseline=str(folder / "1"),
            candidate=str(folder / str(candidate)),
            tolerance=1e-3,
        )
        limits = ShadowLimits(run_s=RUN_S, ends=1)
        self.shadow = Shadow(target, lambda _route, _copy, each: self.found.append(each), limits)

    def offer(self) -> None:
        self.offered += 1
        copy = RequestCopy(
            signature="serving_default",
            inputs={"x": np.ones((1, 1), np.float32)},
            outputs={"y": np.full((1, 1), 2.0, np.float32)},
            took_s=0.001,
            primary_waits=lambda: self.waits,
            on_result=lambda _: None,
        )
        began_s = time.thread_time()
        self.shadow.offer(Route(version=1, otherwise=1, copied=True), copy)
        assert time.thread_time() - began_s < 0.1

    @property
    def compared(self) -> list[Comparison]:
        return [each for each in self.found if each is not None]


@pytest.mark.soak
def test_a_version_that_hangs_or_is_damaged_is_given_up_and_keeps_no_request_waiting(
    tmp_path: Path,
) -> None:
    exported(tmp_path / "1")
    exported(tmp_path / "2", ends=False)
    damaged = tmp_path / "3"
    damaged.mkdir()
    (damaged / "saved_model.pb").write_bytes(b"damaged")
    hangs, fails = (Shadowed(tmp_path, candidate=version) for version in (2, 3))
    hangs.offer()
    assert hangs.found == [None]  # nothing waits for a version that is being loaded

    wait_for(lambda: hangs.offered > len(hangs.found), "a copy that is taken", hangs.offer)
    for _ in range(40):
        hangs.offer()
    assert hangs.offered == len(hangs.found) + 1  # only one is not dropped
    assert not hangs.compared
    hangs.shadow.join(LIMIT_S)
    assert [each.bad for each in hangs.compared] == [f"a call ran longer than {RUN_S:g} s"]
    assert hangs.shadow.failure.startswith("in shadow a call ran longer than")

    fails.shadow.join(LIMIT_S)
    assert fails.shadow.failure.startswith("in shadow it cannot be loaded: ")
    assert not fails.compared
    for each in (hangs, fails):
        each.offer()
        assert len(each.found) == each.offered  # each copy is counted once
        assert each.shadow.pid is None
