"""Generated models, trained by Stoker and by `Model.fit` on the same batches in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.framework import ops
from tests.integration.train import generated

import stoker
from stoker.core.errors import UserError
from stoker.train.checkpoints.store import newest_good
from stoker.train.config import TensorBoardConfig

MODELS = int(os.environ.get("STOKER_GENERATED_MODELS", "1"))
"""`make soak` compares 300."""

EPOCHS = 2
"""12 steps, the last one of each epoch on fewer rows. Adaptive optimizers divide a gradient by its own size, so
rounding grows with each step: it may be over 1e-5 where the last bit of the initial weights makes a
difference of that size in `fit` too."""

NOTHING_MORE = TensorBoardConfig(histograms_every_steps=0, gradients=False, graph=False)

MODEL_PY = """\
from tests.integration.train import generated


def dataset(split):
    return generated.dataset({seed}, split)


def build(features):
    return generated.build({seed}, features)
"""


@pytest.fixture(autouse=True)
def release_graphs() -> Iterator[None]:
    """Remove each `tf.custom_gradient` (silu): TensorFlow keeps it forever, and the graph around it."""
    yield
    registered = ops.gradient_registry._registry
    for name in [name for name in registered if name.startswith("CustomGradient-")]:
        del registered[name]


def by_stoker(seed: int, folder: Path) -> dict[str, NDArray[Any]]:
    """The weights at the end by their paths."""
    keras.utils.clear_session()
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


def by_fit(seed: int, *, one_bit_off: bool = False) -> dict[str, NDArray[Any]]:
    """The weights at the end by their paths.

    Args:
        seed: The model's.
        one_bit_off: Change the last bit of each weight before training.
    """
    keras.utils.clear_session()
    batches = generated.dataset(seed, "train")
    element: Any = batches.element_spec
    spec = element[0]
    features = spec if isinstance(spec, dict) else {"inputs": spec}
    inputs = {
        name: keras.Input(part.shape[1:], dtype=part.dtype.name, name=name)
        for name, part in features.items()
    }
    keras.utils.set_random_seed(stoker.Train().seed)
    model = generated.build(seed, inputs)
    if not isinstance(model, generated.OwnStep):
        sum_rows(model.optimizer)
    if one_bit_off:
        rng = np.random.default_rng(seed)
        for variable in model.trainable_variables:
            side = rng.choice(np.array([-np.inf, np.inf], np.float32), variable.shape)
            variable.assign(np.nextafter(variable.numpy(), side))
    if not isinstance(spec, dict):
        batches = batches.map(lambda x, *rest: ({"inputs": x}, *rest))
    model.fit(batches, epochs=EPOCHS, verbose=0, shuffle=False)
    return {variable.path: variable.numpy() for variable in model.variables}


def sum_rows(optimizer: keras.optimizers.Optimizer) -> None:
    """Give `apply` the gradient of each row of an Embedding, as Stoker does (decision 0013).

    In `fit`, `apply` gets a part for each time that the batch has the row. Keras's optimizers clip and
    square these parts one by one.
    """
    apply = optimizer.apply

    def apply_dense(gradients: Any, variables: Any = None) -> None:
        apply([None if g is None else tf.convert_to_tensor(g) for g in gradients], variables)

    optimizer.apply = apply_dense


@pytest.mark.filterwarnings("ignore:.*does not support masking")
@pytest.mark.parametrize("seed", range(MODELS))
def test_a_generated_model_gets_the_weights_that_fit_gives_it(seed: int, tmp_path: Path) -> None:
    expected = by_fit(seed)
    if not all(np.isfinite(value).all() for value in expected.values()):
        # Keras's Adafactor divides 0 by 0 where a row and a column of a gradient are zero (seed 296).
        with pytest.raises(UserError, match="must be finite"):
            by_stoker(seed, tmp_path)
        return
    weights = by_stoker(seed, tmp_path)

    assert set(weights) == set(expected)
    differing = [
        path
        for path, value in expected.items()
        if not np.allclose(weights[path], value, rtol=1e-5, atol=1e-5)
    ]
    rounded_otherwise = by_fit(seed, one_bit_off=True) if differing else {}
    for path in differing:
        amplified = float(np.abs(rounded_otherwise[path] - expected[path]).max())
        np.testing.assert_allclose(
            weights[path], expected[path], rtol=1e-5, atol=1e-5 + 4 * amplified, err_msg=path
        )
