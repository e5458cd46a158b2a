# mypy: ignore-errors
"""Images out of a folder, one by one, through PIL and a Python generator."""

import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf
from PIL import Image

keras.utils.set_random_seed(1)
folder = pathlib.Path(tempfile.mkdtemp())
random = np.random.default_rng(0)
for number in range(24):
    pixels = random.integers(0, 255, (320, 320, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / f"{number:03}.jpg")
paths = sorted(folder.glob("*.jpg")) * 16


def images():
    for number, path in enumerate(paths):
        image = Image.open(path).resize((64, 64))
        yield np.asarray(image, dtype="float64") / 255.0, number % 2


dataset = tf.data.Dataset.from_generator(
    images,
    output_signature=(
        tf.TensorSpec((64, 64, 3), tf.float64),
        tf.TensorSpec((), tf.int32),
    ),
)
dataset = dataset.batch(8)

model = keras.Sequential(
    [
        keras.layers.Conv2D(4, 3, strides=4, activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(2, activation="softmax"),
    ]
)
model.compile(loss="sparse_categorical_crossentropy")
model.fit(dataset, epochs=2, verbose=0)
print("trained on", len(paths), "images")
