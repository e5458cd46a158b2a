"""A real training with a slow input and a real server that fails: what Prometheus gets, and who is called."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tests.integration.monitor.stack import Stack, chosen, panels, stoker, watching
from tests.small_disk import mounted

from stoker.core.errors import EXIT_DONE
from stoker.registry.repository import Repository
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.state.settings import RolloutSettings
from stoker.telemetry.targets import live_targets

SETTINGS = """\
name: stalled
data: model:dataset
model: model:build
train: {epochs: 100000, metrics_port: 0, xla: false, checkpoint: {every_s: 2}}
evaluate: {metrics: [accuracy]}
"""

MODEL_PY = """\
import time

import keras
import numpy as np
import tensorflow as tf


def slow(number):
    time.sleep(0.02)
    return number


def dataset(split):
    numbers = np.random.default_rng(0).normal(size=(160, 4)).astype(np.float32)
    made = tf.data.Dataset.from_tensor_slices((numbers, numbers[:, 0] > 0)).batch(16)
    if split == "train":
        stalled = lambda x: tf.ensure_shape(tf.numpy_function(slow, [x], tf.float32), [None, 4])
        made = made.map(lambda x, y: ({"numbers": stalled(x)}, y))
    else:
        made = made.map(lambda x, y: ({"numbers": x}, y))
    return made


def build(features):
    model = keras.Model(features, keras.layers.Dense(1, activation="sigmoid")(features["numbers"]))
    model.compile(optimizer="sgd", loss="binary_crossentropy", metrics=["accuracy"])
    return model
"""

NOT_HERE = (
    # Of GPUs, 16-bit floats, several workers, and gradients in TensorBoard's histograms.
    *("stoker_gpu", "stoker_exporter", "mfu", "loss_scale", "local_step", "gradient_norm"),
    # Of a run that was killed, requests that wait, shadow traffic, and models with training statistics.
    *("restarts", "queu", "copies", "prediction_skew", "prediction_drift"),
)
"""Parts of names of metrics that this machine does not have; a query of any other must have data."""


@dataclass
class Watched:
    """Both processes, and what watches them."""

    stack: Stack
    training: subprocess.Popen[str]
    runs: Path
    server: str
    """HOST:PORT of its REST."""
    why_no_disk: str
    """Why the time series are not on a small disk; empty if they are."""


def write_model(path: Path) -> None:
    """A model that has lost a variable, which it reads for numbers below 0: its own error (INTERNAL)."""

    def lost() -> tf.Tensor:
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="lost")
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, name="x")])
    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        scale = tf.cond(tf.reduce_any(x < 0.0), lost, lambda: tf.constant(2.0))
        return {"answer": x * scale}

    module: Any = tf.Module()  # whose functions are attributes
    module.call = call
    tf.saved_model.save(module, str(path), signatures={"serving_default": call})


@contextmanager
def started(*arguments: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """A `stoker` process; it is ended at the end."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "stoker", *arguments],
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def ask(port: int, over: threading.Event) -> None:
    """Send 30 requests a second, of which three of ten fail in the model."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    while not over.wait(1 / 30):
        x = -1.0 if random.random() < 0.3 else 1.0
        body = json.dumps({"instances": [x]})
        connection.request("POST", "/v1/models/scale:predict", body)
        connection.getresponse().read()
    connection.close()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("real")
    experiment, runs = folder / "stalled", folder / "stalled" / "runs"
    experiment.mkdir()
    (experiment / "stoker.yaml").write_text(SETTINGS)
    (experiment / "model.py").write_text(MODEL_PY)
    repository = Repository(folder / "models")
    for version in ("1", "2"):
        write_model(folder / version)
        repository.push(folder / version, "scale")
    settings = RolloutSettings(stages="50:10h,100", dry_run=("slow_p99", "slow_p50"))
    ModelRollouts(repository.root, "scale").start(2, settings, why="", baseline=1)
    over = threading.Event()
    ports = ("--rest_api_port", "0", "--port", "0", "--json")
    with (
        started("run", str(experiment), log=folder / "run.log") as training,
        started("serve", str(repository.root), *ports, log=folder / "serve.log") as server,
    ):
        assert server.stdout is not None
        port = json.loads(server.stdout.readline())["rest_port"]
        client = threading.Thread(target=ask, args=(port, over))
        client.start()
        try:
            options = (str(experiment), "--server", f"127.0.0.1:{port}")
            with (
                mounted(folder / "state" / "series", size="24m") as why_no_disk,
                watching(folder, *options) as stack,
            ):
                yield Watched(stack, training, runs, f"127.0.0.1:{port}", why_no_disk)
        finally:
            over.set()
            client.join()


def test_a_slow_input_and_a_failing_server_reach_the_webhook(watched: Watched) -> None:
    wanted = {"Watchdog", "StokerInputBound", "StokerErrorBudgetBurn"}

    assert watched.stack.notes.wait_for(wanted, 90.0) == wanted

    bound = next(
        alert
        for content in watched.stack.notes.contents
        for alert in content["alerts"]
        if alert["labels"]["alertname"] == "StokerInputBound"
    )
    (run,) = (path.stem for path in (watched.runs / ".targets").glob("*.json"))
    assert bound["labels"]["run"] == run
    assert bound["annotations"]["runbook_url"].endswith("runbooks.md#stokerinputbound")


def test_every_panel_of_what_runs_here_has_data(watched: Watched) -> None:
    queried = [each for each in panels() if not any(part in each[1] for part in NOT_HERE)]

    without = [title for title, expr in queried if not watched.stack.wait_for(chosen(expr), 10.0)]

    assert without == []
    assert len(queried) > 30


def steps_of(runs: Path) -> float:
    """Steps of the training, as it says itself."""
    end_s = time.monotonic() + 600.0
    while not (targets := live_targets(runs)) and time.monotonic() < end_s:
        time.sleep(0.2)  # its process has just begun
    (target,) = targets
    with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found = re.search(r"^stoker_train_steps_total{.*} (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


def test_a_full_disk_under_the_time_series_is_one_line_and_all_else_goes_on(
    watched: Watched,
) -> None:
    if watched.why_no_disk:
        pytest.skip(watched.why_no_disk)
    stack, series = watched.stack, watched.stack.state / "series"
    filler, before = series / "filler", steps_of(watched.runs)
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    said = f"(the disk of {series} is full: new data is lost; free some space)"
    shown = stoker("status", "--state", str(stack.state))

    assert f"Prometheus: ready, http://{stack.address} {said}\n" in shown.stdout
    assert shown.stdout.count(said) == 1
    assert shown.returncode == EXIT_DONE
    assert "Traceback" not in shown.stderr
    assert watched.training.poll() is None
    end_s = time.monotonic() + 600.0
    while steps_of(watched.runs) <= before:
        assert time.monotonic() < end_s, "training stands still"
        time.sleep(0.2)
    with urllib.request.urlopen(
        f"http://{watched.server}/v1/models/scale:predict", b'{"instances": [1.0]}', timeout=20
    ) as answer:
        assert json.loads(answer.read()) == {"predictions": [2.0]}

    filler.unlink()
    after_s = time.time()
    assert stack.wait_for(f'timestamp(up{{job="stoker-train"}}) > {after_s}')


def test_a_run_that_has_ended_is_not_a_target(watched: Watched) -> None:
    """The last of these tests."""
    assert len(live_targets(watched.runs)) == 1

    watched.training.send_signal(signal.SIGTERM)
    watched.training.wait(60)

    assert live_targets(watched.runs) == []
    end_s = time.monotonic() + 30.0
    while watched.stack.ask('up{job="stoker-train"}') and time.monotonic() < end_s:
        time.sleep(0.2)
    assert watched.stack.ask('up{job="stoker-train"}') == []
    fired = 'max_over_time(ALERTS{alertname="StokerTargetDown",alertstate="firing"}[10m])'
    assert watched.stack.ask(fired) == []
