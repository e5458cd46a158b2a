"""The input-bound experiment: large JPEG files, and a step that is emulated or computed on one core."""

from __future__ import annotations

import textwrap
from pathlib import Path

import cv2
import numpy as np

COUNT, HEIGHT, WIDTH = 800, 1200, 1600
"""Files, and their size in pixels: what a telephone makes is larger. Of so many an epoch has 40 steps,
and a call as many: what Python does between two calls is little of a step, as with real data."""

CLASSES = ("left", "right")

EXPERIMENT = """\
name: photographs
data:
  source: photographs
  images: {{size: [224, 224], fit: crop, store: original}}
label: label
model: model:{build}
# Augmented, so that decoded images are not kept in memory from the first epoch on.
train: {{epochs: 2, batch_size: 16, augment: {{flip: 0.5}}{threads}}}
"""

MODEL = '''\
import keras
import tensorflow as tf
from keras import layers

STEP_S = 0.010


class Device(layers.Layer):
    """Stands for a device that computes for STEP_S and leaves the CPU to others meanwhile.

    TensorFlow itself sleeps, on a thread that no operation needs: no Python runs in the step, which
    would have to wait for its turn among what else is Python, as no GPU does.
    """

    def __init__(self):
        super().__init__()
        beats = tf.data.Dataset.from_tensors(0.0).repeat()
        asleep = tf.raw_ops.SleepDataset(
            input_dataset=tf.data.experimental.to_variant(beats),
            sleep_microseconds=int(1e6 * STEP_S),
            output_types=[tf.float32],
            output_shapes=[[]],
        )
        options = tf.data.Options()
        # Nothing may sleep ahead of its step.
        options.experimental_optimization.apply_default_optimizations = False
        options.autotune.enabled = False
        beats = tf.data.experimental.from_variant(asleep, beats.element_spec)
        self._beats = iter(beats.with_options(options))

    def call(self, images):
        # The device reads a complete batch; a little of its output is enough here.
        with tf.control_dependencies([images]), tf.control_dependencies([next(self._beats)]):
            return tf.identity(images[:, ::32, ::32])


def build_emulated(features):
    x = layers.Rescaling(1 / 255)(Device()(features["image"]))
    x = layers.GlobalAveragePooling2D()(x)
    return _compiled(features, x)


def build_real(features):
    x = layers.Rescaling(1 / 255)(features["image"])
    for filters in (8, 16, 32):
        x = layers.Conv2D(filters, 3, strides=2, activation="relu")(x)
    x = layers.GlobalAveragePooling2D()(x)
    return _compiled(features, x)


def _compiled(features, x):
    answer = layers.Dense(2, activation="softmax", name="probability")(x)
    model = keras.Model(features, answer)
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    return model
'''


def write(folder: Path, *, real: bool) -> Path:
    """Write files and experiment; the folder."""
    draw = np.random.default_rng(0)
    for number in range(COUNT):
        name = CLASSES[number % 2]
        path = folder / "photographs" / name / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = draw.integers(0, 256, (HEIGHT // 16, WIDTH // 16, 3), np.uint8)
        picture = cv2.resize(coarse, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
        half = slice(0, WIDTH // 2) if name == "left" else slice(WIDTH // 2, WIDTH)
        picture[:, half] //= 2
        grain = draw.integers(0, 12, picture.shape, np.uint8)
        cv2.imwrite(str(path), cv2.add(picture, grain), [cv2.IMWRITE_JPEG_QUALITY, 88])
    settings = EXPERIMENT.format(
        build="build_real" if real else "build_emulated",
        # The step has one core and the input the other.
        threads=", intra_op_threads: 1, inter_op_threads: 1" if real else "",
    )
    (folder / "stoker.yaml").write_text(settings)
    (folder / "model.py").write_text(textwrap.dedent(MODEL))
    return folder
