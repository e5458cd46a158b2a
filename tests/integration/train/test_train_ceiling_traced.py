"""On a GPU the ceiling's step is traced while the first call runs; here the CPU does it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from tests.integration.train.small import on_one_device, unwatched

from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.transform import Transform
from stoker.train.config import TrainConfig
from stoker.train.context.run_context import TrainResult
from stoker.train.loop.loop import fit
from stoker.train.setup.build_model import build_model, prepare_process
from stoker.train.setup.strategy import one_device
from stoker.train.step.compiled import CompiledStep

CALLS: list[tuple[bool, bool]] = []
"""Of each call of the layer's Python in training: in the main thread; while a call of steps runs."""


class Noted(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Returns its input."""

    def call(self, inputs: Any, *, training: bool = False) -> Any:
        if training:
            runs = any(thread.name.startswith("stoker-step") for thread in threading.enumerate())
            CALLS.append((threading.current_thread() is threading.main_thread(), runs))
        return inputs


def build(features: dict[str, keras.KerasTensor]) -> keras.Model:
    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    x = layers.Dropout(0.1)(layers.BatchNormalization()(layers.Dense(4)(Noted()(x))))
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy")
    return model


def trained(
    dataset: Dataset, transform: Transform, folder: Path
) -> tuple[TrainResult, list[Any], list[tuple[bool, bool]]]:
    prepare_process(precision="float32", seed=0, deterministic=False)
    built = build_model(build, transform, what="model:build")
    CALLS.clear()
    result = fit(
        built,
        (dataset, transform),
        config=TrainConfig(epochs=3, batch_size=32),
        resolved=on_one_device(),
        distribution=one_device(),
        context=unwatched(folder),
    )
    return result, [variable.numpy() for variable in built.model.variables], [*CALLS]


def test_the_trace_for_the_ceiling_runs_next_to_the_first_call_and_changes_no_bit(
    dataset: Dataset, transform: Transform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plain, before = trained(dataset, transform, tmp_path / "plain")
    monkeypatch.setattr(CompiledStep, "may_trace_meanwhile", property(lambda _: True))

    result, weights, calls = trained(dataset, transform, tmp_path / "meanwhile")

    # The first batch, the step and the ceiling, each once: only the last one has moved.
    assert before == [(True, False)] * len(calls)
    assert calls == [(True, False)] * (len(calls) - 1) + [(True, True)]
    assert result.busy.busy_fraction > 0
    for one, other in zip(plain, weights, strict=True):
        np.testing.assert_array_equal(one, other)
