"""The experiments that the parts train: `stoker.yaml` and `model.py`, as a user writes them."""

from __future__ import annotations

import json
from pathlib import Path

from sizes import Sizes

UNTIL = "BENCH_UNTIL"
"""Environment variable with a time (time.time): training ends with the first epoch that ends after
it, but not before `MIN_EPOCHS`."""

MIN_EPOCHS = 5
"""Least number of epochs, however slow: an epoch may be one call, the first call is left out of a
rate, and the first three have costs that others have not (`goodput.ONE_TIME_EPOCHS`)."""

MIN_TEXT_EPOCHS = 3
"""The same for texts, which have two calls an epoch, and of which only the rate is measured."""

IMAGES_YAML = """\
name: photographs
data:
  source: {source}
  splits: {{train: 0.95, eval: 0.05}}
  images: {{size: [{crop}, {crop}], fit: crop, store: original}}
label: label
model: model:build
train:
  epochs: 1000
  batch_size: {batch}
  callbacks: model:callbacks
  augment: {{flip: 0.5, random_resized_crop: {{scale: [0.08, 1.0]}}}}
"""

IMAGES_PY = '''\
import os
import time

import keras
from keras import layers

NETWORK, CLASSES = "{network}", 4


def block(x, filters):
    shortcut = layers.Conv2D(filters, 1, strides=2)(x)
    for strides in (2, 1):
        x = layers.Conv2D(filters, 3, strides=strides, padding="same")(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return layers.Add()([x, shortcut])


def network(images):
    """[batch, height, width, 3] uint8 -> [batch, CLASSES] float32 logits."""
    x = layers.Rescaling(1 / 127.5, offset=-1)(images)
    if NETWORK == "resnet50":
        x = keras.applications.ResNet50(weights=None, include_top=False, input_tensor=x).output
    else:
        x = block(x, 8)
    x = layers.GlobalAveragePooling2D()(x)
    return layers.Dense(CLASSES, dtype="float32")(x)


def compiled(inputs, images, **settings):
    model = keras.Model(inputs, network(images))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, loss, metrics=["accuracy"], **settings)
    return model


def build(features):
    return compiled(features, features["image"])


class EndInTime(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch + 1 >= {least} and time.time() > float(os.environ.get("{until}", "inf")):
            self.model.stop_training = True


def callbacks():
    return [EndInTime()]
'''

TEXTS_YAML = """\
name: texts
data: model:dataset
model: model:build
train: {epochs: 1000, callbacks: model:callbacks}
"""

TEXTS_PY = '''\
import os
import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers

LAYERS, UNITS, HEADS, WORDS, LENGTH, TEXTS, STEPS = {numbers}


class Positions(layers.Layer):
    """Adds a learned vector to each place of a text."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], name="table")

    def call(self, x):
        return x + keras.ops.cast(self.table, x.dtype)


def encoder(tokens):
    """[batch, LENGTH] int32 -> [batch, 2] float32 logits: BERT's encoder and its pooled head.

    Source: Devlin et al., BERT (arXiv 1810.04805), base: 12 layers, 768 units, 12 heads, 3072 inside.
    """
    x = Positions()(layers.Embedding(WORDS, UNITS)(tokens))
    x = layers.Dropout(0.1)(layers.LayerNormalization(epsilon=1e-12)(x))
    for _ in range(LAYERS):
        seen = layers.MultiHeadAttention(HEADS, UNITS // HEADS, dropout=0.1)(x, x)
        x = layers.LayerNormalization(epsilon=1e-12)(x + layers.Dropout(0.1)(seen))
        inner = layers.Dense(4 * UNITS, activation="gelu")(x)
        inner = layers.Dropout(0.1)(layers.Dense(UNITS)(inner))
        x = layers.LayerNormalization(epsilon=1e-12)(x + inner)
    x = layers.Dense(UNITS, activation="tanh")(x[:, 0])
    return layers.Dense(2, dtype="float32")(x)


def step_flops():
    """Floating-point operations of one training step: 2 a weight and token, 3 times for both passes.

    Source: Kaplan et al. (arXiv 2001.08361), appendix B; the embedding is a look-up and counts nothing.
    """
    dense = LAYERS * 12 * UNITS**2
    attention = LAYERS * 2 * LENGTH * UNITS
    return 6 * (dense + attention) * LENGTH * TEXTS


def compiled(inputs, tokens, **settings):
    model = keras.Model(inputs, encoder(tokens))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-5), loss, metrics=["accuracy"], **settings)
    return model


def build(features):
    return compiled(features, features["inputs"])


def dataset(split):
    """Random texts that lie in memory; their class is whether the first token is an even number."""
    rng = np.random.default_rng(split == "train")
    rows = TEXTS * (STEPS if split == "train" else 2)
    tokens = rng.integers(0, WORDS, (rows, LENGTH)).astype(np.int32)
    labels = (tokens[:, 0] % 2).astype(np.int64)
    return tf.data.Dataset.from_tensor_slices((tokens, labels)).batch(TEXTS, drop_remainder=True)


class EndInTime(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch + 1 >= {least} and time.time() > float(os.environ.get("{until}", "inf")):
            self.model.stop_training = True


def callbacks():
    return [EndInTime()]
'''


def images(folder: Path, source: Path, sizes: Sizes) -> Path:
    """ResNet-50 on photographs."""
    text = IMAGES_YAML.format(source=json.dumps(str(source)), crop=sizes.crop, batch=sizes.batch)
    code = (
        IMAGES_PY.replace("{network}", sizes.network)
        .replace("{until}", UNTIL)
        .replace("{least}", str(MIN_EPOCHS))
    )
    return _write(folder, text, code)


def texts(folder: Path, sizes: Sizes) -> Path:
    """A BERT-size encoder on random texts."""
    numbers = (
        sizes.layers, sizes.units, sizes.heads, sizes.words,
        sizes.length, sizes.texts, sizes.text_steps,
    )  # fmt: skip
    code = (
        TEXTS_PY.replace("{numbers}", str(numbers))
        .replace("{until}", UNTIL)
        .replace("{least}", str(MIN_TEXT_EPOCHS))
    )
    return _write(folder, TEXTS_YAML, code)


def _write(folder: Path, settings: str, code: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("stoker.yaml", settings), ("model.py", code)):
        path = folder / name
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
    return folder
