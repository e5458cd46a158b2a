from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from tests.integration.train.killed import Trainer

from stoker.core.errors import DataError
from stoker.train.checkpoints.seeds import host_seeds, restore_host_seeds
from stoker.train.checkpoints.state import TrainingState
from stoker.train.checkpoints.tensors import read_tensors, write_tensors

CHILD = Path(__file__).parent / "state_child.py"


class Noise(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    def call(self, inputs: Any) -> Any:
        return inputs + 0.1 * keras.random.normal(keras.ops.shape(inputs))


def make(seed: int, *, units: int = 7, dtype: str = "float32") -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(units, dtype=dtype)(inputs)
    hidden = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(hidden))
    model = keras.Model(inputs, keras.layers.Dense(1)(Noise()(hidden)))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    model.compute_metrics(None, tf.zeros((2, 1)), tf.zeros((2, 1)), None)
    return model


def train(model: keras.Model, begin: int, end: int) -> None:
    for number in range(begin, end):
        x = tf.random.stateless_normal((6, 4), (number, 0))
        y = tf.reduce_sum(x, axis=1, keepdims=True)
        with tf.GradientTape() as tape:
            answers = model(x, training=True)
            loss = model.optimizer.scale_loss(model.compute_loss(x, y, answers))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        model.optimizer.apply(gradients, model.trainable_variables)
        model.compute_metrics(x, y, answers, None)


def bits(state: TrainingState) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state.capture().items()}


def test_a_run_that_goes_on_from_a_file_ends_with_the_same_bits(tmp_path: Path) -> None:
    model = make(1)
    state = TrainingState(model)
    train(model, 0, 3)
    write_tensors(tmp_path / "state", state.capture())
    train(model, 3, 6)
    straight = bits(state)

    other = make(2)
    again = TrainingState(other)
    again.restore(read_tensors(tmp_path / "state"))
    # Updates are in place: they must not reach the file that the values were mapped from.
    train(other, 3, 6)

    assert bits(again) == straight
    assert {name.partition("/")[0] for name in straight} == {
        *("model", "optimizer", "metrics", "seeds")
    }
    names = " ".join(straight)
    for part in ("dense/kernel", "seed_generator_state", "moving_mean", "dynamic_scale"):
        assert part in names
    assert "seeds/keras" in straight


def test_the_state_can_be_put_back_in_the_same_run() -> None:
    model = make(3)
    state = TrainingState(model)
    train(model, 0, 2)
    before = state.capture()
    train(model, 2, 4)

    state.restore(before)

    assert bits(state) == {name: array.tobytes() for name, array in before.items()}


def test_another_model_is_refused_by_name_and_nothing_is_changed() -> None:
    captured = TrainingState(make(1)).capture()
    other = TrainingState(make(1, units=8))
    before = bits(other)

    with pytest.raises(DataError, match=r"dense/kernel is float32 \[4, 8\].* is float32 \[4, 7\]"):
        other.restore(captured)
    del captured["model/dense/kernel"]
    with pytest.raises(DataError, match="and the checkpoint has none"):
        other.restore(captured)
    extra = TrainingState(make(1, units=8)).capture() | {"model/more": np.zeros(3)}
    with pytest.raises(DataError, match="the model has no model/more"):
        other.restore(extra)
    assert bits(other) == before


def test_groups_of_others_are_passed_over() -> None:
    state = TrainingState(make(1))
    state.restore(state.capture() | {"callbacks/early_stopping/best_weights": np.zeros(3)})


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    state = TrainingState(make(1, dtype="bfloat16"))
    captured = state.capture()
    assert captured["model/dense/kernel"].dtype == ml_dtypes.bfloat16

    write_tensors(tmp_path / "state", captured)
    other = TrainingState(make(2, dtype="bfloat16"))
    other.restore(read_tensors(tmp_path / "state"))

    assert bits(other) == bits(state)


def test_what_a_callback_draws_goes_on_where_it_stood() -> None:
    random.seed(1)
    np.random.seed(1)
    random.gauss()
    np.random.normal()
    seeds = json.loads(json.dumps(host_seeds()))
    drawn = [random.gauss(), random.random(), np.random.normal(), np.random.random()]

    restore_host_seeds(seeds)

    assert drawn == [random.gauss(), random.random(), np.random.normal(), np.random.random()]


def result(output: str) -> dict[str, Any]:
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def check(found: dict[str, Any]) -> None:
    assert found["changed"]
    assert found["again"] == found["straight"]
    assert found["sums"][0] == found["sums"][1] == pytest.approx(found["total"])
    assert found["drawn"][0] == found["drawn"][1]
    assert set(found["rows"].values()) == {2}
    differ = " ".join(found["differ"])
    for part in ("loop/loss_sum", "metrics/", "moving_mean"):
        assert part in differ
    assert "kernel" not in differ
    assert "seed" not in differ


def test_two_replicas_go_on_with_the_bits_that_each_of_them_had(trainer: Trainer) -> None:
    check(result(trainer.script(CHILD, "mirrored")))


@pytest.mark.soak
@pytest.mark.multiworker
def test_two_workers_go_on_with_the_bits_that_each_of_them_had() -> None:
    sockets = [socket.socket() for _ in range(2)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    cluster = {"worker": [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]}
    for one in sockets:
        one.close()
    workers = [
        subprocess.Popen(
            [sys.executable, CHILD, "workers"],
            env=os.environ
            | {
                "CUDA_VISIBLE_DEVICES": "-1",
                "TF_CONFIG": json.dumps(
                    {"cluster": cluster, "task": {"type": "worker", "index": rank}}
                ),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = []
    try:
        for worker in workers:
            out, errors = worker.communicate(timeout=600)
            assert worker.returncode == 0, errors
            results.append(result(out))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    check(results[0])
    assert results[0] == results[1]
