"""`train.sample_weight`: rows that weigh nothing change nothing, whatever their labels are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.app.chain import ChainResult, run_chain
from stoker.app.experiment import load_experiment
from stoker.app.stage_outputs import open_transform
from stoker.core.errors import ConfigError, DataError
from stoker.train.checkpoints.store import best

from .conftest import Recorder

STOKER_YAML = """\
name: weighed
data: {source: data.csv, split_by: id}
model: model:build
preprocessing: model:preprocessing_fn
label: y
train: {epochs: 1, batch_size: 32, deterministic: true, sample_weight: w}
"""

MODEL_PY = """\
import keras
from keras import layers


def preprocessing_fn(inputs):
    return {"a": inputs["a"], "b": inputs["b"]}


def build(features):
    numbers = [keras.ops.expand_dims(features[name], -1) for name in ("a", "b")]
    x = layers.Dense(4, activation="tanh")(layers.Concatenate()(numbers))
    model = keras.Model(features, layers.Dense(1)(x))
    model.compile(optimizer="adam", loss="mse", weighted_metrics=["mae"])
    return model
"""


def write(path: Path, *, unweighed: float, weight: float = 2.0, worst: str = "0.0") -> Path:
    """Every second row weighs 0 and has the label `unweighed`, the last row weighs `worst`."""
    rng = np.random.default_rng(1)
    lines = ["id,a,b,y,w"]
    for row in range(200):
        a, b = rng.normal(size=2)
        y, w = (unweighed, 0.0) if row % 2 else (a - 2 * b, weight)
        lines.append(f"k{row},{a:.5f},{b:.5f},{y:.5f},{worst if row == 199 else w}")
    path.mkdir()
    (path / "data.csv").write_text("\n".join(lines) + "\n")
    (path / "stoker.yaml").write_text(STOKER_YAML)
    (path / "model.py").write_text(MODEL_PY)
    return path


def run(path: Path, *overrides: str, until: str = "train") -> ChainResult:
    return run_chain(load_experiment(path, overrides=overrides), Recorder(), until=until)


def trained(chain: ChainResult) -> dict[str, NDArray[np.float32]]:
    arrays = best(chain.output("train") / "checkpoints").arrays()
    return {name: array for name, array in arrays.items() if name.startswith("model/")}


def same(one: ChainResult, other: ChainResult) -> bool:
    first, second = trained(one), trained(other)
    assert first.keys() == second.keys()
    assert len(first) == 4
    return all(np.array_equal(array, second[name]) for name, array in first.items())


def test_rows_of_weight_0_change_neither_weights_nor_validation(tmp_path: Path) -> None:
    one = run(write(tmp_path / "one", unweighed=3.0))
    other = run(write(tmp_path / "other", unweighed=-70.0))
    counted = run(tmp_path / "other", "train.sample_weight=null")

    assert same(one, other)
    assert not same(other, counted)
    metrics, others = one.results["train"]["metrics"], other.results["train"]["metrics"]
    assert metrics == others
    assert metrics["val_loss"] < counted.results["train"]["metrics"]["val_loss"] / 100
    transform = open_transform(load_experiment(tmp_path / "one"), one.output("transform"))
    assert [column.name for column in transform.serving_columns] == ["a", "b"]


def test_a_weight_that_cannot_be_ends_before_training_and_the_record_is_named(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "bad", unweighed=0.0, worst="-0.5")

    with pytest.raises(DataError, match=r"sample_weight 'w' must be a number of 0 or more.*-0\.5"):
        run(path)
    with pytest.raises(ConfigError, match=r"train\.sample_weight must be a raw column.*'v'"):
        run(path, "train.sample_weight=v", until="transform")
    (path / "runs").rename(path / "others")
    with pytest.raises(ConfigError, match=r"train\.sample_weight must be a column.*'v'"):
        run(path, "train.sample_weight=v", "preprocessing=null", until="ingest")
    (path / "stoker.yaml").write_text("name: own\ndata: model:dataset\nmodel: model:build\n")
    with pytest.raises(ConfigError, match=r"train\.sample_weight must be left out"):
        load_experiment(path, overrides=["train.sample_weight=w"])
