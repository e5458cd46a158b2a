# mypy: ignore-errors
# A user's file as they are: without types.
"""A small convolution over images in memory, and the problems that are planted into it."""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

ROWS = {"train": 1024, "eval": 128}
SIDE = 24


def dataset(split, cost=0, batch=32):
    """Images in memory; with a cost each is made by Python, which sorts so many times."""
    rng = np.random.default_rng(len(split))
    labels = rng.integers(0, 4, ROWS[split])
    images = rng.normal(size=(ROWS[split], SIDE, SIDE, 3)).astype(np.float32)
    images[np.arange(ROWS[split]), labels] += 1
    if not cost:
        return tf.data.Dataset.from_tensor_slices(({"image": images}, labels)).batch(batch)

    def rows():
        for image, label in zip(images, labels, strict=True):
            for _ in range(cost):
                np.sort(rng.random(12_000))
            yield {"image": image}, label

    signature = (
        {"image": tf.TensorSpec((SIDE, SIDE, 3), tf.float32)},
        tf.TensorSpec((), tf.int64),
    )
    made = tf.data.Dataset.from_generator(rows, output_signature=signature)
    counted = tf.data.experimental.assert_cardinality(ROWS[split])
    return made.apply(counted).batch(batch)


def build(features):
    """Convolutions: the step is long against Python."""
    x = layers.Conv2D(16, 3, activation="relu")(features["image"])
    x = layers.Conv2D(16, 3, strides=2, activation="relu")(x)
    x = layers.Dense(64, activation="relu")(layers.Flatten()(x))
    return _compiled(features, layers.Dense(4, activation="softmax", dtype="float32")(x))


def build_biased(features):
    """A bias that BatchNormalization cancels; the step is shorter than that of `build`."""
    x = layers.Conv2D(8, 3, strides=2, name="biased")(features["image"])
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Dense(64, activation="relu")(layers.Flatten()(x))
    return _compiled(features, layers.Dense(4, activation="softmax", dtype="float32")(x))


def build_large(features):
    """At its best on any CPU: convolutions that XLA does not make faster, in the precision they name.

    A policy of lower precision changes no operation, whether or not this CPU multiplies bfloat16;
    and there are enough of them that other stages do not count.
    """
    x = features["image"]
    for strides in (1, 1, 2):
        x = layers.Conv2D(64, 3, strides=strides, activation="relu", dtype="float32")(x)
    x = layers.Flatten(dtype="float32")(x)
    x = layers.Dense(64, activation="relu", dtype="float32")(x)
    return _compiled(features, layers.Dense(4, activation="softmax", dtype="float32")(x))


def build_small(features):
    """One layer: the step is short against Python."""
    x = layers.Flatten()(features["image"])
    return _compiled(features, layers.Dense(4, activation="softmax", dtype="float32")(x))


def build_blocks(features):
    """A block that holds layers, which may be computed again."""
    block = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(8)], name="encoder")
    x = block(layers.Flatten()(features["image"]))
    return _compiled(features, layers.Dense(4, activation="softmax", dtype="float32")(x))


class _Sorted(layers.Layer):
    """Asks NumPy, of which XLA knows nothing."""

    def call(self, x):
        made = tf.numpy_function(np.sort, [x], x.dtype)
        return x + 0.0 * tf.stop_gradient(tf.ensure_shape(made, x.shape))


def build_without_xla(features):
    """TensorFlow computes it, XLA does not compile it."""
    x = _Sorted()(layers.Flatten()(features["image"]))
    return _compiled(features, layers.Dense(4, activation="softmax", dtype="float32")(x))


def build_crashing(features):
    """Ends its process without a message if the precision is bfloat16."""
    if keras.mixed_precision.dtype_policy().name == "mixed_bfloat16":
        os._exit(9)
    return build_small(features)


def _compiled(features, outputs):
    model = keras.Model(features, outputs)
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    return model
