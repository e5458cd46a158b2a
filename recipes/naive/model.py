"""A network and its data as a first script has them; slow on purpose, and right."""

import inspect
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

SIDE = 256
"""Height and width of a file, pixels; a camera's would be larger still."""

SIZE = 48
"""Height and width that the network sees, pixels."""


def write_digits(folder: Path) -> None:
    """Write 1,438 files for training and 359 for evaluation: folder/<split>/<digit>/<number>.jpg."""
    digits = load_digits()
    # Under another name until all are there: a folder that is there is whole.
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for number, (image, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
            split = "eval" if number % 5 == 4 else "train"
            path = made / split / str(digit) / f"{number:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            # scikit-learn's gray levels run from 0 to 16.
            gray = Image.fromarray(np.round(image * (255 / 16)).astype(np.uint8))
            gray.resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB").save(path)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


IMAGES = Path(inspect.getfile(write_digits)).parent / "data"
"""Next to this file. `__file__` would make all that lies there count as code of the experiment, and what
lies there is made by `write_digits`, which counts already."""


def dataset(split: str) -> "tf.data.Dataset[Any]":
    """Batches of 32 images, [32, 48, 48, 3] float32, and their digits."""
    if not IMAGES.is_dir():
        write_digits(IMAGES)
    files = sorted(IMAGES.glob(f"{split}/*/*.jpg"))
    random.Random(0).shuffle(files)

    def generate() -> Iterator[tuple[NDArray[np.float32], int]]:
        for file in files:
            # PIL's decoder and resize.
            image = keras.utils.load_img(file, target_size=(SIZE, SIZE), interpolation="bilinear")
            yield np.asarray(image, np.float32) / np.float32(255), int(file.parent.name)

    signature = (tf.TensorSpec([SIZE, SIZE, 3], tf.float32), tf.TensorSpec([], tf.int64))
    return tf.data.Dataset.from_generator(generate, output_signature=signature).batch(32)


def build(features: dict[str, keras.KerasTensor]) -> keras.Model:
    """Classify an image; the answer is one probability a digit."""
    x = features["inputs"]
    for filters in (16, 32, 64):
        x = layers.Conv2D(filters, 3, strides=2, padding="same", activation="relu")(x)
    x = layers.Flatten()(x)
    answer = layers.Dense(10, activation="softmax", name="probability")(x)

    model = keras.Model(features, answer)
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model
