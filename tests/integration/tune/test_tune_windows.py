"""Windows of a training whose input and step take times that are known, since both sleep."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from stoker.app.experiment import load_experiment
from stoker.app.tuning.trials import Trials
from stoker.tune.client import TrialClient, TrialLimits
from stoker.tune.profile import Profile

INPUT_S, STEP_S = 0.010, 0.004
"""A batch, and a step: the input is what is waited for, on any machine."""

READY = 32
"""Batches that may lie ready: 0.32 s of the input's work, which steps alone would take in 0.13 s."""

MODEL = f"""\
import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def dataset(split):
    def batches():
        for number in range(50):
            time.sleep({INPUT_S})  # an input of known speed
            yield {{"x": np.full((4, 2), number, np.float32)}}, np.arange(4, dtype=np.int64) % 2

    signature = ({{"x": tf.TensorSpec((4, 2))}}, tf.TensorSpec((4,), tf.int64))
    made = tf.data.Dataset.from_generator(batches, output_signature=signature)
    return made.apply(tf.data.experimental.assert_cardinality(50)).prefetch({READY})


class Slow(layers.Layer):
    def call(self, x):
        waited = tf.numpy_function(_wait, [tf.zeros([])], tf.float32)
        with tf.control_dependencies([tf.ensure_shape(waited, [])]):
            return tf.identity(x)


def _wait(value):
    time.sleep({STEP_S})  # a step of known length
    return value


def build(features):
    x = layers.Dense(2, activation="softmax")(Slow()(features["x"]))
    model = keras.Model(features, x)
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    return model
"""

YAML = """\
name: windows
data: {dataset: "model:dataset"}
model: model:build
train: {epochs: 1, steps_per_call: 5}
"""


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialClient]:
    folder = tmp_path_factory.mktemp("windows")
    (folder / "model.py").write_text(MODEL)
    (folder / "stoker.yaml").write_text(YAML)
    trials = Trials(load_experiment(folder), folder / "trials", progress=print)
    limits = TrialLimits(left_s=lambda: 200.0, max_s=200.0, window_s=0.3)
    opened = trials.open({}, name="one", limits=limits)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def profile(trial: TrialClient) -> Profile:
    return trial.profile()


def test_prefetched_batches_do_not_count_as_speed_of_the_input(profile: Profile) -> None:
    # Before each window of training lies one of the step in memory, during which batches are made.
    seconds = [real["wall_s"] / real["steps"] for _, real in profile.turns]

    assert median(seconds) > 0.95 * INPUT_S
    assert profile.input_wait > 0.1


def test_the_speed_of_the_machine_does_not_depend_on_the_step(profile: Profile) -> None:
    # The step sleeps; products of matrices do not. Any CPU that TensorFlow runs on reaches a
    # hundredth of a core's 32 operations at each of 10^9 beats, and none of today 10^14.
    assert profile.pace is not None
    assert 3e8 < profile.pace < 1e14


def test_a_paused_trial_prepares_no_batches(trial: TrialClient) -> None:
    trial.speed()
    before = _cpu_ticks(trial.pid)
    time.sleep(READY * INPUT_S)  # as long as its input would need to fill all buffers
    assert _cpu_ticks(trial.pid) == before

    assert 4 / trial.speed() > 0.95 * INPUT_S


def _cpu_ticks(pid: int) -> list[Any]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]


def test_the_gradients_that_replicas_would_exchange_are_counted(trial: TrialClient) -> None:
    # Two by two weights and two biases, in float32.
    assert trial.situation.model.gradient_bytes == 24
    assert trial.situation.train.reduction_bytes_per_pack == 0
