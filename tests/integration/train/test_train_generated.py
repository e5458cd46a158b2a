"""Generated models, trained by Stoker and by `Model.fit` on the same batches in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.integration.train import generated

import stoker
from stoker.train.checkpoints.store import newest_good
from stoker.train.watch.config import TensorBoardConfig

MODELS = int(os.environ.get("STOKER_GENERATED_MODELS", "1"))
"""To be 8 here and 300 in `make soak`, once the generator leaves out what is known to differ from `fit`:
repeated rows of an Embedding, which are summed first (decision 0013), a bias before a BatchNormalization,
whose gradient is rounding that Adam makes large, and the state of a dropout's seed."""

EPOCHS = 2

NOTHING_MORE = TensorBoardConfig(histograms_every_steps=0, gradients=False, graph=False)

MODEL_PY = """\
from tests.integration.train import generated


def dataset(split):
    return generated.dataset({seed}, split)


def build(features):
    return generated.build({seed}, features)
"""


def by_stoker(seed: int, folder: Path) -> dict[str, NDArray[Any]]:
    """The weights at the end by their paths."""
    (folder / "model.py").write_text(MODEL_PY.format(seed=seed))
    experiment = stoker.Experiment(
        name="generated",
        data="model:dataset",
        model="model:build",
        train=stoker.Train(epochs=EPOCHS, tensorboard=NOTHING_MORE),
        folder=folder,
    )
    stoker.run(experiment, until="train")
    (checkpoints,) = folder.glob("runs/generated/*/train/checkpoints")
    newest = newest_good(checkpoints)
    assert newest is not None
    return {
        name.removeprefix("model/"): value
        for name, value in newest.arrays().items()
        if name.startswith("model/")
    }


def by_fit(seed: int) -> keras.Model:
    batches = generated.dataset(seed, "train")
    element: Any = batches.element_spec
    spec = element[0]
    features = spec if isinstance(spec, dict) else {"inputs": spec}
    inputs = {
        name: keras.Input(part.shape[1:], dtype=part.dtype.name, name=name)
        for name, part in features.items()
    }
    model = generated.build(seed, inputs)
    if not isinstance(spec, dict):
        batches = batches.map(lambda x, *rest: ({"inputs": x}, *rest))
    model.fit(batches, epochs=EPOCHS, verbose=0, shuffle=False)
    return model


@pytest.mark.parametrize("seed", range(MODELS))
def test_a_generated_model_gets_the_weights_that_fit_gives_it(seed: int, tmp_path: Path) -> None:
    weights = by_stoker(seed, tmp_path)
    keras.backend.clear_session()
    model = by_fit(seed)

    assert set(weights) == {variable.path for variable in model.variables}
    for variable in model.variables:
        np.testing.assert_allclose(
            weights[variable.path], variable.numpy(), rtol=1e-5, atol=1e-5, err_msg=variable.path
        )
