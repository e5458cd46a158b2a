"""A small experiment, written into a temporary folder as a user would write it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from stoker.app.chain import ChainResult, StageOutcome, run_chain
from stoker.app.experiment import Experiment, load_experiment
from stoker.data.columns import to_numpy
from stoker.data.dataset import load_dataset
from stoker.data.features.preprocessing.transform import Transform, load_transform
from stoker.train.context import utilization

RECIPES = Path(__file__).resolve().parents[3] / "recipes"

STOKER_YAML = """\
name: small
data: {source: data.csv, split_by: id}
model: model:build
preprocessing: model:preprocessing_fn
label: bought
label_only: [spent]
train: {epochs: 2, batch_size: 32, deterministic: true}
evaluate:
  metrics: [auc, accuracy]
  slices: [city]
  gates: {auc: {min: 0.5}}
"""

MODEL_PY = """\
import keras
import tensorflow as tf
from keras import layers

import stoker.transform as st

UNITS = 8


def preprocessing_fn(inputs):
    age = st.scale_to_z_score(inputs["age"])
    return {
        "age": tf.where(tf.math.is_nan(age), 0.0, age),
        "city": st.compute_and_apply_vocabulary(inputs["city"], num_oov_buckets=1),
        "bought": tf.cast(inputs["spent"] > 10.0, tf.int64),
    }


def build(features, transform):
    size = transform.num_buckets("city")
    city = layers.Flatten()(layers.Embedding(size, 4)(keras.ops.expand_dims(features["city"], -1)))
    x = layers.Concatenate()([keras.ops.expand_dims(features["age"], -1), city])
    x = layers.Dropout(0.1)(layers.Dense(UNITS, activation="relu")(x))
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy")
    return model
"""


def write_csv(path: Path, *, rows: int = 600, noise: float = 0.0) -> None:
    """A table in which older people in some cities spend more; `note` is of no use."""
    rng = np.random.default_rng(0)
    lines = ["id,age,city,spent,note"]
    for row in range(rows):
        age, city = rng.uniform(18, 80), rng.choice(["Rome", "Oslo", "Lima"])
        spent = (age - 40) / 2 + (8 if city == "Oslo" else 0) + rng.normal(0, 4) + noise
        shown = "" if row % 17 == 3 else f"{age:.1f}"
        lines.append(f"{row},{shown},{city},{spent:.2f},n{row % 7}")
    path.write_text("\n".join(lines) + "\n")


@dataclass
class Recorder:
    """A listener that remembers."""

    lines: list[str] = field(default_factory=list)
    began: list[str] = field(default_factory=list)
    ended: list[StageOutcome] = field(default_factory=list)

    def log(self, line: str) -> None:
        self.lines.append(line)

    def stage_began(self, stage: str) -> None:
        self.began.append(stage)

    def progress(self, line: str, share: float | None) -> None:
        assert share is None or 0 <= share <= 1

    def stage_ended(self, outcome: StageOutcome) -> None:
        self.ended.append(outcome)

    @property
    def worked(self) -> list[str]:
        """The stages that did their work."""
        return [outcome.stage for outcome in self.ended if not outcome.skipped]


@dataclass
class Folder:
    """An experiment's folder, and what can be done with it."""

    path: Path

    def edit(self, name: str, old: str, new: str) -> None:
        file = self.path / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    def run(self, *overrides: str, until: str = "push") -> tuple[ChainResult, Recorder]:
        recorder = Recorder()
        experiment = load_experiment(self.path, overrides=overrides)
        return run_chain(experiment, recorder, until=until), recorder


class Trained:
    """A finished run, its transform and its dataset."""

    def __init__(self, folder: Path) -> None:
        self.experiment: Experiment = load_experiment(folder)
        self.chain: ChainResult = stoker.run(self.experiment)
        self.transform: Transform = load_transform(self.chain.output("transform"))
        self.dataset = load_dataset(self.chain.output("ingest"))

    def rows(self, split: str) -> dict[str, Any]:
        """Serving column -> a split's raw values."""
        columns = self.transform.serving_columns
        table = self.dataset.table(split, columns=[column.name for column in columns])
        return {column.name: to_numpy(column, table.column(column.name)) for column in columns}


@contextmanager
def brief_ceiling_of_utilization() -> Iterator[None]:
    """Utilization does not matter here, and to measure it takes a second of every training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilization, "CEILING_S", 0.02)
        yield


@pytest.fixture(scope="module", autouse=True)
def brief_ceiling() -> Iterator[None]:
    with brief_ceiling_of_utilization():
        yield


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[[], Folder]:
    """Makes the small experiment."""

    def make() -> Folder:
        path = tmp_path / "small"
        path.mkdir()
        (path / "stoker.yaml").write_text(STOKER_YAML)
        (path / "model.py").write_text(MODEL_PY)
        write_csv(path / "data.csv")
        return Folder(path)

    return make


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The small experiment, run once in a process of tests; they copy it before they change it."""
    path = tmp_path_factory.mktemp("finished") / "small"
    path.mkdir()
    (path / "stoker.yaml").write_text(STOKER_YAML)
    (path / "model.py").write_text(MODEL_PY)
    write_csv(path / "data.csv")
    folder = Folder(path)
    with brief_ceiling_of_utilization():
        folder.run()
    return folder


@pytest.fixture
def folder(finished: Folder, tmp_path: Path) -> Folder:
    """A copy of the finished small experiment."""
    shutil.copytree(finished.path, tmp_path / "small")
    return Folder(tmp_path / "small")
