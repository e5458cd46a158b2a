"""A training's time: parts that add up, also after a kill, and U measured between calls."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.train.killed import TIMEOUT_S, Trainer, newest, until, write_table
from tests.scrape_flood import flood

from stoker.monitor.goodput import goodput_of
from stoker.telemetry.run_time import seconds_of_run
from stoker.telemetry.targets import FOLDER, live_targets
from stoker.telemetry.wall_time import NAMES

SLEEPS_YAML = """\
name: sleeps
data: model:dataset
model: model:build
train: {epochs: 1, steps_per_call: 2, precision: float32, xla: false, tensorboard: {gradients: false}}
"""

SLEEPS_PY = """\
import os
import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def slept(seconds):
    def sleep(values):
        time.sleep(seconds)  # so long, however busy the machine is
        return values
    return sleep


class Slow(layers.Layer):
    def call(self, inputs):
        waited = tf.numpy_function(slept(0.03), [inputs], inputs.dtype)
        return inputs + 0.0 * tf.stop_gradient(tf.ensure_shape(waited, inputs.shape))


def dataset(split):
    x = np.random.default_rng(0).normal(size=(320, 3)).astype(np.float32)
    made = tf.data.Dataset.from_tensor_slices(({"x": x}, (x.sum(1) > 0).astype(np.int64)))
    if split == "eval":
        return made.take(32).batch(8)
    read = slept(float(os.environ["INPUT_S"]))

    def wait(features, label):
        x = tf.ensure_shape(tf.numpy_function(read, [features["x"]], tf.float32), [None, 3])
        return {"x": x}, label

    return made.batch(8).map(wait)


def build(features):
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(Slow()(features["x"])))
    model.compile("sgd", "binary_crossentropy")
    return model
"""


def printed(trainer: Trainer) -> dict[str, Any]:
    """The JSON in the output of the last command."""
    said = trainer._log.read_text()
    facts: dict[str, Any] = json.loads(said[said.index("{\n") : said.rindex("}") + 1])
    return facts


def test_the_parts_of_a_training_add_up_to_the_time_that_its_parent_sees(
    trainer: Trainer, tmp_path: Path
) -> None:
    write_table(tmp_path / "small")
    trainer.start(tmp_path / "small", tmp_path / "runs", "--json")
    begun_s = time.monotonic()
    code = trainer.end()
    took_s = time.monotonic() - begun_s

    assert code == 0, trainer.said()
    facts = printed(trainer)
    process, run = facts["wall_time"]["process"], facts["wall_time"]["run"]
    assert process["wall_s"] == pytest.approx(took_s, rel=0.02, abs=0.3)
    for account in (process, run):
        assert list(account["parts"]) == list(NAMES)
        assert sum(account["parts"].values()) == pytest.approx(account["wall_s"], abs=1e-3)
    parts = process["parts"]
    for part in NAMES:
        assert (parts[part] > 0) is (part != "repeated"), part
    trained_s = process["wall_s"] - parts["other_stages"]
    assert facts["goodput"] == pytest.approx(parts["steps"] / trained_s, rel=0.01)
    assert "goodput" in trainer.said()
    assert "was steps; most of the rest: " in trainer.said()
    lines = (newest_folder(tmp_path / "runs") / "metrics.jsonl").read_text().splitlines()
    result = [json.loads(line)["goodput"] for line in lines if "goodput" in line]
    # After each of three epochs, and at the end.
    assert len(result) == 4
    assert all(0 < share < 1 for share in result)


def newest_folder(runs: Path) -> Path:
    (found,) = runs.glob("*/*/train")
    return found


def test_a_killed_run_goes_on_with_its_wall_time_and_without_a_listener(
    trainer: Trainer, tmp_path: Path
) -> None:
    folder, runs = tmp_path / "small", tmp_path / "runs"
    write_table(folder)
    environment = {"STEP_S": "0.03", "STOKER_TEAM": "vision"}
    served = ("--set", "train.metrics_port=0", "--set", "train.metrics_host=127.0.0.2")
    process = trainer.start(folder, runs, *served, environment=environment)
    begun_s = time.monotonic()
    try:
        account(runs, until_step=0)
        until(lambda: live_targets(runs))
        (target,) = live_targets(runs)
        (address,) = target["targets"]
        # Fault 103, until the checkpoint of step 40, the first one after step 30 that ends a call.
        with flood(address, "/metrics") as answers:
            account(runs, until_step=60)
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            scraped = answer.read().decode()
    finally:
        os.kill(process, signal.SIGKILL)
    assert trainer.end() == -signal.SIGKILL
    assert address.startswith("127.0.0.2:")
    # Forty steps, from the second call on, take at least 0.03 s each.
    assert len(answers) > 60, "it was a flood"
    assert set(answers) == {200}
    before = account(runs, until_step=0)
    saved = newest(runs).step
    killed_s = time.monotonic() - begun_s
    check_scrape(scraped, run=newest_folder(runs).parent.name)
    assert list((runs / FOLDER).iterdir())
    assert live_targets(runs) == [], "a killed run is not a target"

    with nothing_to_report_to(newest_folder(runs)) as (broken, variables):
        code = trainer.run(folder, runs, *broken, "--json", environment=environment | variables)

    assert code == 0, trainer.said()
    for warning in (
        "training continues without files for TensorBoard: ",
        "metrics are not served, training goes on: ",
        "stoker.prom cannot be written, training goes on: ",
        "metrics are not sent by OTLP, training goes on: ",
    ):
        assert trainer.said().count(warning) == 1, (warning, trainer.said())
    assert list((runs / FOLDER).iterdir()) == []
    facts = printed(trainer)
    run, parts = facts["wall_time"]["run"], seconds_of_run(facts["wall_time"])
    assert (run["processes"], run["repeated_steps"]) == (2, before["step"] - saved)
    assert sum(parts.values()) == pytest.approx(run["wall_s"], abs=1e-3)
    first_s = run["wall_s"] - facts["wall_time"]["process"]["wall_s"]
    assert first_s == pytest.approx(sum(before["parts"].values()), abs=0.01)
    assert first_s <= killed_s + 1.0
    # Each of its steps takes at least 0.03 s.
    assert parts["repeated"] >= 0.9 * 0.03 * run["repeated_steps"]
    assert parts["steps"] >= 0.9 * 0.03 * facts["steps"]
    assert run["restarts"] == {"killed": 1}
    split = goodput_of(newest_folder(runs).parent)
    seconds = {part.name: part.seconds for part in split.parts}
    assert seconds["waiting"] == pytest.approx(run["waiting_s"])
    assert seconds["steps"] + seconds["input_wait"] == pytest.approx(parts["steps"])
    assert split.wall_s == pytest.approx(run["wall_s"] + run["waiting_s"], rel=0.05)
    # The processes and the time between them are all of the time since the first one began.
    assert split.wall_s == pytest.approx(time.monotonic() - begun_s, rel=0.05, abs=1.0)


@contextlib.contextmanager
def nothing_to_report_to(stage: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Fault 106: no folder for TensorBoard, a port that is taken, no folder for the textfile, no collector."""
    shutil.rmtree(stage / "tensorboard")
    (stage / "tensorboard").write_text("in the way")
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        port, collector = taken.getsockname()[1], gone.getsockname()[1]
        textfile = stage / "tensorboard" / "stoker.prom"
        yield (
            ["--set", f"train.metrics_port={port}", "--set", f"train.metrics_textfile={textfile}"],
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector}",
                "OTEL_EXPORTER_OTLP_TIMEOUT": "0.2",
                "OTEL_METRIC_EXPORT_INTERVAL": "50",
            },
        )


def check_scrape(text: str, *, run: str) -> None:
    """What a run says of itself while it trains, read as Prometheus's client library reads it."""
    found = {
        (sample.name, *sample.labels.items()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    own = ("run", run)
    assert 0 < found["stoker_train_loss", own] < 10
    assert found["stoker_train_steps_total", own] >= 60
    assert found["stoker_train_step_seconds_count", own] == found["stoker_train_steps_total", own]
    # Each step sleeps so long.
    assert found["stoker_train_step_seconds_bucket", own, ("le", "0.025")] == 0
    assert 0 <= found["stoker_train_checkpoint_age_seconds", own] < 60
    assert found["stoker_train_remaining_seconds", own] > 0
    assert found["stoker_train_epoch", own] >= 1
    assert 0 < found["stoker_train_goodput_ratio", own] < 1
    assert 0 < found["stoker_train_metric", own, ("name", "val_loss")] < 10
    assert found["stoker_train_wall_seconds_total", own, ("part", "steps")] > 60 * 0.02
    assert found["stoker_train_gradient_norm", own] > 0
    (info,) = [key for key in found if key[0] == "stoker_run_info"]
    assert {own, ("experiment", "small"), ("team", "vision")} <= set(info)


def account(runs: Path, *, until_step: int) -> dict[str, Any]:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        for path in runs.glob("*/*/train/wall_time.json"):
            try:
                found: dict[str, Any] = json.loads(path.read_text())
            except ValueError:
                continue
            if found["step"] >= until_step:
                return found
        time.sleep(0.02)
    raise TimeoutError("the run has not come so far")


@pytest.mark.parametrize(("input_s", "is_busy"), [(0.12, False), (0.0, True)])
def test_u_tells_a_slow_input_from_a_quick_one(
    trainer: Trainer, tmp_path: Path, input_s: float, is_busy: bool
) -> None:
    folder = tmp_path / "sleeps"
    folder.mkdir()
    (folder / "stoker.yaml").write_text(SLEEPS_YAML)
    (folder / "model.py").write_text(SLEEPS_PY)

    code = trainer.run(folder, tmp_path / "runs", "--json", environment={"INPUT_S": str(input_s)})

    assert code == 0, trainer.said()
    facts = printed(trainer)
    # A step takes a quarter of the time of its input, or is all that there is.
    busy, wait = facts["busy_fraction"], facts["input_wait"]
    assert (busy > 0.6, wait < 0.4) == (is_busy, is_busy), facts
    assert facts["ceiling_step_time_s"] >= 0.03
