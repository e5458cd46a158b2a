"""What a user watches of a run, through the loop and the stage as they are run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.integration.app.conftest import MODEL_PY, STOKER_YAML, Folder, write_csv
from tests.integration.train.killed import (
    Trainer,
    checkpoints,
    newest,
    until,
    write_images,
    write_table,
)
from tests.integration.train.small import on_one_device, unwatched

from stoker.core.errors import EXIT_PREEMPTED, ConfigError
from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.transform import Transform
from stoker.telemetry.writers.tensorboard import TensorBoard
from stoker.train.checkpoints.store import best, newest_good
from stoker.train.config import TensorBoardConfig, TrainConfig
from stoker.train.loop.loop import fit
from stoker.train.setup.build_model import build_model, prepare_process
from stoker.train.setup.strategy import one_device
from stoker.train.watch.profile import REQUEST
from stoker.train.watch.watch import RunWatch, Watch

UNWATCHED = (
    "train.tensorboard.histograms_every_steps=0",
    "train.tensorboard.gradients=false",
    "train.tensorboard.graph=false",
)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "small").mkdir()
    write_csv(tmp_path / "small" / "data.csv")
    (tmp_path / "small" / "stoker.yaml").write_text(STOKER_YAML)
    (tmp_path / "small" / "model.py").write_text(MODEL_PY)
    return Folder(tmp_path / "small")


def read(folder: Path) -> EventAccumulator:
    guidance = {"tensors": 0, "scalars": 0}
    return EventAccumulator(str(folder), size_guidance=guidance).Reload()


def profiles(folder: Path) -> list[Path]:
    return [path for path in folder.glob("plugins/profile/*/*.xplane.pb") if path.stat().st_size]


def test_a_run_shows_its_model_in_tensorboard_and_watching_changes_no_weight(
    folder: Folder, tmp_path: Path
) -> None:
    """Dropout's seeds, the optimizer, and the call that a profile cuts in three included."""
    watched, _ = folder.run(
        "train.tensorboard.histograms_every_steps=5",
        "train.tensorboard.embeddings={embedding: city}",
        "train.tensorboard.profile='4:6'",
        f"runs={tmp_path}/watched",
        until="train",
    )
    quiet, _ = folder.run(*UNWATCHED, f"runs={tmp_path}/quiet", until="train")

    board = watched.output("train") / "tensorboard"
    train, validation, run = (read(board / name) for name in ("train", "validation", "."))
    steps = watched.results["train"]["steps"]
    for tag in ("weights/dense/kernel", "gradients/dense/kernel", "gradients/embedding/embeddings"):
        shown = [event.step for event in train.Tensors(tag)]
        assert shown[0] == 0
        assert len(shown) >= 4
        assert shown[-1] <= steps
    assert any("while" in node.op.lower() for node in train.Graph().node)
    assert len(train.Scalars("epoch_loss")) == len(validation.Scalars("epoch_loss")) == 2
    assert "_hparams_/session_end_info" in run.Tags()["tensors"]
    assert run.Scalars("best/val_loss")[0].value == pytest.approx(
        watched.results["train"]["metrics"]["val_loss"]
    )
    labels = (board / "embeddings" / "embedding.labels.tsv").read_text().split("\n")
    assert sorted(labels[:3]) == ["Lima", "Oslo", "Rome"]
    assert len(profiles(board)) == 1

    unseen = read(quiet.output("train") / "tensorboard" / "train")
    assert not unseen.Tags()["tensors"]
    assert not unseen.Tags()["graph"]
    kept = [newest_weights(result.output("train")) for result in (watched, quiet)]
    assert kept[0] == kept[1]


def newest_weights(train: Path) -> dict[str, bytes]:
    found = newest_good(train / "checkpoints")
    assert found is not None
    return {name: value.tobytes() for name, value in found.arrays().items()}


def test_what_tensorboard_shows_is_not_a_reason_to_train_again(folder: Folder) -> None:
    first, _ = folder.run(until="train")
    assert first.results["train"]["agreement"] is None

    _, watched_run = folder.run("train.tensorboard.histograms_every_steps=1", until="train")

    assert watched_run.worked == []


def test_an_embedding_that_is_not_there_ends_the_run_before_its_first_step(folder: Folder) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'embedding'"):
        folder.run("train.tensorboard.embeddings={embeding: city}", until="train")
    with pytest.raises(ConfigError, match="Did you mean 'city'"):
        folder.run("train.tensorboard.embeddings={embedding: cty}", until="train")

    (lines,) = folder.path.glob("runs/*/*/train/metrics.jsonl")
    assert lines.read_text() == ""


def build(features: dict[str, keras.KerasTensor]) -> keras.Model:
    x = keras.layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    x = keras.layers.Dropout(0.2)(keras.layers.Dense(8, activation="relu")(x))
    model = keras.Model(features, keras.layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer="adam", loss="binary_crossentropy")
    return model


@pytest.fixture
def trained(dataset: Dataset, transform: Transform) -> Callable[..., list[Any]]:
    """Trains, watched by a file or not at all; the weights."""

    def train(folder: Path, *, memory_bytes: int, ask: bool, alone: bool = True) -> list[Any]:
        config = TrainConfig(epochs=3, batch_size=32)
        resolved = on_one_device(steps_per_call=7)
        prepare_process(precision="float32", seed=0, deterministic=False)
        built = build_model(build, transform, what="model:build")
        board = TensorBoard(folder / "tensorboard")
        watch = RunWatch(board, config=TensorBoardConfig(), terms={}, folder=folder, alone=alone)
        if ask:
            (folder / REQUEST).write_text("3")
        fit(
            built,
            (dataset, transform),
            config=config,
            resolved=resolved,
            distribution=one_device(),
            context=unwatched(
                folder / "checkpoints",
                memory_bytes=memory_bytes,
                writer=board,
                watch=watch if ask else Watch(),
            ),
        )
        board.close()
        return [np.asarray(variable.numpy()) for variable in built.model.variables]

    return train


@pytest.mark.parametrize(
    "memory_bytes",
    [pytest.param(0, marks=pytest.mark.soak), 1 << 34],
    ids=["streamed", "kept in memory"],
)
def test_a_file_asks_for_a_profile_of_so_many_steps_and_the_run_learns_the_same(
    trained: Callable[..., list[Any]], tmp_path: Path, memory_bytes: int
) -> None:
    """A call's rows that are kept in memory come as one element, of which the profile cuts a part."""
    evaluated = trained(tmp_path / "requested", memory_bytes=memory_bytes, ask=True)
    never = trained(tmp_path / "never", memory_bytes=memory_bytes, ask=False)

    assert len(profiles(tmp_path / "requested" / "tensorboard")) == 1
    assert not (tmp_path / "requested" / REQUEST).exists()
    ends = [event.step for event in read(tmp_path / "requested/tensorboard/train").Scalars("loss")]
    assert ends == [3, 7, 14, 21]
    for one, two in zip(evaluated, never, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


def test_with_other_workers_a_profile_cuts_no_call(
    trained: Callable[..., list[Any]], tmp_path: Path
) -> None:
    trained(tmp_path, memory_bytes=0, ask=True, alone=False)

    assert len(profiles(tmp_path / "tensorboard")) == 1
    train = read(tmp_path / "tensorboard" / "train")
    assert [event.step for event in train.Scalars("loss")] == [7, 14, 21]
    assert {tag.partition("/")[0] for tag in train.Tags()["tensors"]} == {"weights"}


LAST = """
from pathlib import Path


class Last(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        kernel = next(v for v in self.model.trainable_variables if v.name == "kernel")
        Path({path!r}).write_bytes(kernel.value.numpy().tobytes())


def callbacks():
    return [Last()]
"""


def test_an_image_run_records_that_validation_answers_as_the_graph_and_ends_with_its_last_weights(
    tmp_path: Path,
) -> None:
    write_images(tmp_path / "images")
    path = str(tmp_path / "last.bin")
    code = (tmp_path / "images" / "model.py").read_text().partition("def callbacks")[0]
    (tmp_path / "images" / "model.py").write_text(code + LAST.format(path=path))
    run, _ = Folder(tmp_path / "images").run(until="train")

    facts, train = run.results["train"], run.output("train")
    rows = run.results["ingest"]["rows"]["eval"]
    assert facts["agreement"] == {"rows": rows, "differ": 0, "tolerance": 1e-5, "path": "quick"}
    assert facts["best_epoch"] < facts["epochs"]
    ended, kept = newest_weights(train), best(train / "checkpoints").arrays()
    served = Path(path).read_bytes()
    (name,) = (name for name, value in ended.items() if value == served)
    assert name.startswith("model/")
    assert kept[name].tobytes() != served


@pytest.mark.soak
def test_an_epoch_that_is_validated_twice_after_a_kill_is_once_in_the_metrics(
    trainer: Trainer, tmp_path: Path
) -> None:
    """Ended in the validation, so that the checkpoint is before it; killed after, before the next."""
    write_table(tmp_path / "small")
    runs, mark = tmp_path / "runs", tmp_path / "validating"
    slow = {"STEP_S": "0.1", "MARK": str(mark)}
    pid = trainer.start(tmp_path / "small", runs, "--set", "train.epochs=2", environment=slow)
    until(mark.exists)
    os.kill(pid, signal.SIGTERM)
    assert trainer.end() == EXIT_PREEMPTED, trainer.said()
    assert newest(runs).facts["position"]["validated"] is False
    assert epochs(runs) == []

    pid = trainer.start(tmp_path / "small", runs, "--set", "train.epochs=2", environment=slow)
    until(lambda: epochs(runs) == [1])
    os.kill(pid, signal.SIGKILL)
    assert trainer.end() == -signal.SIGKILL
    assert newest(runs).facts["position"]["validated"] is False

    assert trainer.run(tmp_path / "small", runs, "--set", "train.epochs=2") == 0, trainer.said()

    assert epochs(runs) == [1, 2]
    board = checkpoints(runs).parent / "tensorboard"
    for part in ("train", "validation"):
        assert len(read(board / part).Scalars("epoch_loss")) == 2


def epochs(runs: Path) -> list[float]:
    """The epochs whose metrics are written down, line by line."""
    found = list(runs.glob("small/*/train/metrics.jsonl"))
    lines = found[0].read_text().split("\n")[:-1] if found else []
    return [json.loads(line)["epoch"] for line in lines if '"epoch"' in line]
