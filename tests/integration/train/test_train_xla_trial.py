"""XLA tried while a run trains: nothing waits for it, both forms of the step are one training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from numpy.typing import NDArray
from tests.integration.train.small import on_one_device, unwatched

from stoker.data.dataset import Dataset
from stoker.data.features.transform import Transform
from stoker.train import xla_trial
from stoker.train.checkpoints.store import newest_good
from stoker.train.config import TrainConfig
from stoker.train.loop import fit
from stoker.train.model import BuiltModel, build_model, prepare_process
from stoker.train.strategy import one_device
from stoker.train.surroundings import Progress, TrainResult

MEANWHILE = 3
"""Calls that training makes, at least, while XLA compiles."""


def build(features: dict[str, keras.KerasTensor]) -> keras.Model:
    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    # Both have kernels of their own where XLA does not compile: BatchNormalization and Adam.
    x = layers.BatchNormalization()(layers.Dense(4, activation="relu")(x))
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(layers.Dropout(0.1)(x)))
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
    return model


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run is too short; the compiler is waited for after some calls, however slow it is."""
    monkeypatch.setattr(xla_trial, "LEAST_LEFT_S", 0.0)
    monkeypatch.setattr(xla_trial, "SWITCH_S", -1e9)
    monkeypatch.setattr(xla_trial, "CALL_S", 0.0)
    asked: dict[int, int] = {}

    def ended(compiling: Any) -> bool:
        number = asked[id(compiling)] = asked.get(id(compiling), 0) + 1
        if number > MEANWHILE:
            compiling._thread.join()
        return number > MEANWHILE

    monkeypatch.setattr(xla_trial._Compiling, "ended", property(ended))


def run(
    dataset: Dataset,
    transform: Transform,
    folder: Path,
    *,
    function: Any = build,
    seen: list[Progress] | None = None,
    **changes: Any,
) -> tuple[TrainResult, BuiltModel]:
    config = TrainConfig(epochs=24, batch_size=32)
    prepare_process(precision="float32", seed=0, deterministic=False)
    built = build_model(function, transform, what="model:build")
    result = fit(
        built,
        dataset,
        transform,
        config=config,
        resolved=on_one_device(**({"xla_trial": True} | changes)),
        distribution=one_device(),
        around=unwatched(folder, on_progress=(seen if seen is not None else []).append),
    )
    return result, built


def weights(built: BuiltModel) -> list[NDArray[Any]]:
    model = built.model
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.asarray(variable.numpy()) for variable in variables]


@pytest.fixture(scope="module")
def plain(
    dataset: Dataset, transform: Transform, tmp_path_factory: pytest.TempPathFactory
) -> list[NDArray[Any]]:
    return weights(run(dataset, transform, tmp_path_factory.mktemp("p"), xla_trial=False)[1])


def test_the_faster_step_stays_from_a_checkpoint_on_and_learns_the_same(
    dataset: Dataset,
    transform: Transform,
    tmp_path: Path,
    plain: list[NDArray[Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(xla_trial, "MARGIN", 0.0)

    _, built = run(dataset, transform, tmp_path)

    found = newest_good(tmp_path)
    assert found is not None
    position = found.facts["position"]
    assert position["xla"] is True
    (said,) = [r.message for r in caplog.records if r.message.startswith("XLA: ")]
    assert said == f"XLA: {position['xla_why']}"
    assert "used from the checkpoint at step" in said
    for one, other in zip(weights(built), plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
