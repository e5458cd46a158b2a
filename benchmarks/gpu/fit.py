"""The peer: `keras.Model.fit` with the input pipeline of Keras's and TensorFlow's guides.

python fit.py images|texts EXPERIMENT --lines FILE --seconds N [--jit] [--precision P] [--records ...]

Writes a line of JSON for each step: when it ended (time.time), and samples trained so far.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Of a random resized crop: share of the image's area, and width over height."""

MIN_STEPS = 12
"""Least number of steps in a training, however slow: fewer give no rate."""

ENDLESS = 1_000_000
"""Steps per epoch: so many that the peer never pays for the end of an epoch."""


def parsed(crop: int) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """A function that makes a random crop, flipped at random, and its label from one record."""
    spec = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        example = tf.io.parse_single_example(record, spec)
        image = tf.io.decode_jpeg(example["image"], channels=3)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.shape(image),
            tf.zeros([1, 0, 4]),
            area_range=SCALE,
            aspect_ratio_range=RATIO,
            use_image_if_no_bounding_boxes=True,
        )
        image = tf.image.resize(tf.slice(image, begin, size), [crop, crop])
        return tf.cast(tf.image.random_flip_left_right(image), tf.uint8), example["label"]

    return parse


def taught(records: list[str], *, crop: int, batch: int) -> tf.data.Dataset[Any]:
    """Interleave, shuffle, parallel map, batch, prefetch."""
    return (
        tf.data.Dataset.from_tensor_slices(records)
        .interleave(
            tf.data.TFRecordDataset, cycle_length=len(records), num_parallel_calls=tf.data.AUTOTUNE
        )
        .shuffle(1024)
        .repeat()
        .map(parsed(crop), num_parallel_calls=tf.data.AUTOTUNE)
        .batch(batch, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )


class Clock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Records when each step ended, and ends the training in time."""

    def __init__(self, lines: Path, *, until_s: float, after_s: float, batch: int) -> None:
        super().__init__()
        self._stream = lines.open("w", buffering=1)
        self._until_s, self._after_s, self._batch = until_s, after_s, batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note it."""
        now = time.time()
        if batch == 0:
            self._until_s = min(self._until_s, now + self._after_s)
        line = {"at": now, "samples": (batch + 1) * self._batch}
        self._stream.write(json.dumps(line) + "\n")
        if now > self._until_s and batch >= MIN_STEPS:
            # Reading a metric waits for the device, so the counted steps are computed.
            float(logs["loss"])
            self._stream.write(json.dumps(line | {"at": time.time(), "end": True}) + "\n")
            self.model.stop_training = True


def main() -> None:
    """Train until the time is up."""
    began_s = time.time()
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("images", "texts"))
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument(
        "--after", type=float, default=float("inf"), help="seconds after the first step"
    )
    parser.add_argument("--jit", action="store_true")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--records", nargs="*", default=[])
    parser.add_argument("--crop", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    given = parser.parse_args()
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, enable=True)
    keras.mixed_precision.set_dtype_policy(given.precision)
    keras.utils.set_random_seed(0)
    sys.path.insert(0, str(given.experiment))
    import model as user

    if given.kind == "images":
        batches = taught(given.records, crop=given.crop, batch=given.batch)
        inputs = keras.Input((given.crop, given.crop, 3), dtype="uint8", name="image")
    else:
        batches = user.dataset("train").repeat().prefetch(tf.data.AUTOTUNE)
        inputs = keras.Input((user.LENGTH,), dtype="int32", name="inputs")
    made = user.compiled(inputs, inputs, jit_compile=given.jit)
    clock = Clock(
        given.lines, until_s=began_s + given.seconds, after_s=given.after, batch=given.batch
    )
    made.fit(batches, steps_per_epoch=ENDLESS, verbose=0, callbacks=[clock])


if __name__ == "__main__":
    main()
