"""Images in every store, augmented or not, from the folder to the served model's own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from stoker.app.chain import ChainResult, run_chain
from stoker.app.experiment import load_experiment
from stoker.core.errors import ConfigError
from stoker.data.dataset import load_dataset
from stoker.data.ingest.image_store import is_raw

from .conftest import Recorder

SETTINGS = """
name: stripes
data:
  source: {source}
  images: {{size: [32, 32]}}
model: model:build
label: label
train: {{epochs: 20, batch_size: 16}}
evaluate: {{metrics: [accuracy], gates: {{accuracy: {{min: 0.9}}}}}}
"""

MODEL = """
import keras
from keras import layers

def build(features):
    pixels = layers.Rescaling(1 / 255)(features["image"])
    seen = layers.Conv2D(8, 5, strides=2, activation="gelu")(pixels)
    seen = layers.GlobalAveragePooling2D()(layers.Conv2D(16, 3, activation="gelu")(seen))
    model = keras.Model(features, layers.Dense(2, activation="softmax")(seen))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.optimizer.learning_rate = 0.005
    return model
"""


def picture(rng: np.random.Generator, *, lying: bool) -> np.ndarray[Any, Any]:
    """Stripes of some width and color, standing or lying, of some size."""
    height, width = rng.integers(60, 100, 2)
    wave = np.sin(np.arange(width) * rng.uniform(0.5, 0.9) + rng.uniform(0, 6))
    stripes = np.broadcast_to(wave, (height, width))
    pixels = 128 + 90 * stripes[..., None] * rng.uniform(0.5, 1, 3)
    noisy = np.clip(pixels + rng.normal(0, 8, pixels.shape), 0, 255).astype(np.uint8)
    return noisy.transpose(1, 0, 2) if lying else noisy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for name, lying in (("standing", False), ("lying", True)):
        (root / "data" / name).mkdir(parents=True)
        for number in range(160):
            ending = ".png" if number % 8 == 0 else ".jpg"
            pixels = np.ascontiguousarray(picture(rng, lying=lying))
            cv2.imwrite(str(root / "data" / name / f"{number}{ending}"), pixels)
    (root / "stoker.yaml").write_text(SETTINGS.format(source=root / "data"))
    (root / "model.py").write_text(MODEL)
    return root


def run(folder: Path, tmp_path: Path, *overrides: str) -> ChainResult:
    places = [f"runs={tmp_path}/runs", f"models={tmp_path}/models"]
    return run_chain(load_experiment(folder, overrides=[*places, *overrides]), Recorder())


AUGMENTED = (
    "train.augment.random_resized_crop.scale=[0.4, 1.0]",
    "train.augment.flip=0.5",
    "train.augment.color_jitter={brightness: 0.3, contrast: 0.3, saturation: 0.3}",
    "train.epochs=30",
)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(AUGMENTED, id="original"),
        pytest.param(
            ("data.images.store=resized", "data.images.store_size=40", "data.images.fit=crop"),
            id="resized",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            ("data.images.store=raw", "data.images.allow_lossy=true", *AUGMENTED),
            id="raw",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_model_learns_from_every_store_and_is_judged_on_originals(
    folder: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    result = run(folder, tmp_path, *overrides)

    assert result.results["evaluate"]["metrics"]["accuracy"] >= 0.9
    dataset = load_dataset(result.output("ingest"))
    held_out = dataset.table("eval", columns=["image", "path"]).to_pylist()
    for record in held_out:
        assert record["image"] == (folder / "data" / record["path"]).read_bytes()
    stored = dataset.table("train", columns=["image"])["image"].to_pylist()
    assert all(map(is_raw, stored)) == ("data.images.store=raw" in overrides)


def test_augmentation_without_an_image_is_refused(tmp_path: Path) -> None:
    rows = "".join(f"{n},{n % 2}\n" for n in range(200))
    (tmp_path / "data.csv").write_text("n,y\n" + rows)
    (tmp_path / "stoker.yaml").write_text(
        f"name: t\ndata: {{source: {tmp_path}/data.csv}}\nmodel: model:build\nlabel: y\n"
        "train: {augment: {flip: 0.5}}\n"
    )
    (tmp_path / "model.py").write_text(
        "import keras\n"
        "def build(features):\n"
        "    column = keras.ops.expand_dims(keras.ops.cast(features['n'], 'float32'), -1)\n"
        "    model = keras.Model(features, keras.layers.Dense(1)(column))\n"
        "    model.compile('sgd', 'mse')\n"
        "    return model\n"
    )

    with pytest.raises(ConfigError, match=r"train\.augment needs a column of images"):
        run(tmp_path, tmp_path)
