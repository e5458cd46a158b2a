"""`data.pipeline` through all stages: a cache changes no weight, and batches have the configured sizes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.integration.train.killed import TIMEOUT_S, Trainer

from stoker.app.chain import ChainResult, run_chain
from stoker.app.experiment import load_experiment
from stoker.train.checkpoints.store import STATE, best

from .conftest import Recorder

SETTINGS = """\
name: mine
data: model:dataset
model: model:build
train: {epochs: 3, deterministic: true, steps_per_call: 5, checkpoint: {every_steps: 5}}
evaluate: {metrics: [accuracy]}
"""

MODEL_PY = """\
import os
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers

BATCH = 32
SLOW_S = 0.2 if os.path.exists(os.path.join(os.path.dirname(__file__), "slow")) else 0.0


def dataset(split):
    rng = np.random.default_rng(len(split))
    rows = 320 if split == "train" else 64
    numbers = rng.normal(size=(rows, 4)).astype(np.float32)
    label = (numbers[:, 0] > 0.3).astype(np.int64)
    weight = rng.uniform(0.5, 1.0, rows).astype(np.float32)
    made = tf.data.Dataset.from_tensor_slices(({"numbers": numbers}, label, weight))
    if split == "train":
        made = made.shuffle(rows, seed=1, reshuffle_each_iteration=False)
    return made.batch(BATCH)


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(SLOW_S)


def callbacks():
    return [Slow()]


def build(features):
    x = layers.Dropout(0.2)(layers.Dense(8, activation="relu")(features["numbers"]))
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy")
    return model
"""

MEMORY = "data.pipeline.cache=memory"


def write(path: Path, *, model: str = MODEL_PY, settings: str = SETTINGS) -> Path:
    path.mkdir(parents=True)
    (path / "stoker.yaml").write_text(settings)
    (path / "model.py").write_text(model)
    return path


def train(path: Path, *overrides: str) -> tuple[ChainResult, list[str]]:
    listener = Recorder()
    result = run_chain(load_experiment(path, overrides=overrides), listener, until="train")
    return result, listener.worked


def weights(result: ChainResult) -> str:
    return best(result.output("train") / "checkpoints").manifest.hashes[STATE]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The experiment trained as it is, and its weights."""
    path = write(tmp_path_factory.mktemp("plain") / "mine")
    result, worked = train(path)
    assert worked == ["ingest", "analyze", "transform", "train"]
    return path, weights(result)


def test_a_cache_changes_no_weight_and_only_training_runs_again(plain: tuple[Path, str]) -> None:
    path, expected = plain

    result, worked = train(path, MEMORY)

    assert worked == ["train"]
    assert weights(result) == expected
    assert train(path, MEMORY)[1] == []


def test_other_batches_train_as_if_the_dataset_gave_them(
    plain: tuple[Path, str], tmp_path: Path
) -> None:
    path, in_batches_of_32 = plain
    own = MODEL_PY.replace("BATCH = 32", "BATCH = 50")
    expected, _ = train(write(tmp_path / "mine", model=own))

    result, worked = train(path, "data.pipeline.batch_size=50")

    # The analysis has counted rows, so that it need not look again.
    assert worked == ["train"]
    facts = result.results["train"]
    assert (facts["resolved"]["batch_size"], facts["steps"]) == (50, 3 * 7)
    assert weights(result) == weights(expected) != in_batches_of_32


def test_a_run_with_a_cache_that_is_killed_ends_with_the_same_weights(
    plain: tuple[Path, str], tmp_path: Path, trainer: Trainer
) -> None:
    _, expected = plain
    settings = SETTINGS.replace(
        "data: model:dataset", "data: {dataset: 'model:dataset', pipeline: {cache: memory}}"
    )
    slow = settings.replace("epochs: 3,", "epochs: 3, callbacks: model:callbacks,")
    path = write(tmp_path / "mine", settings=slow)
    kill_in_second_epoch(trainer, path)
    (run,) = path.glob("runs/mine/[!.]*")
    assert not list(run.glob("stages/train.json"))

    result, worked = train(path)

    assert worked == ["train"]
    assert result.run == run
    assert weights(result) == expected


def kill_in_second_epoch(trainer: Trainer, path: Path) -> None:
    """Start it, and kill it once a checkpoint inside the second of three epochs stands."""
    (path / "slow").touch()
    process = trainer.start(path, path / "runs")
    give_up_s = time.monotonic() + TIMEOUT_S
    while not list(path.glob("runs/mine/*/train/checkpoints/step-*1[1-9]/manifest.json")):
        assert Path(f"/proc/{process}").exists(), trainer.said()
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    assert trainer.end() == -signal.SIGKILL, trainer.said()
    (path / "slow").unlink()
