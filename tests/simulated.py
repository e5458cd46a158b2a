"""Data with the columns, types and ranges of the real files, for a clone without `../shared`."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


def write_taxi(path: Path) -> None:
    """15,000 trips of the recipe's own simulation."""
    spec = importlib.util.spec_from_file_location("taxi_prepare", RECIPES / "taxi" / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    prepare.write_trips(path)


def write_penguins(path: Path) -> None:
    """334 penguins of three species by four measures from 0 to 1."""
    rng = np.random.default_rng(0)
    means = {0: (0.24, 0.62, 0.31, 0.28), 1: (0.61, 0.63, 0.40, 0.29), 2: (0.56, 0.23, 0.77, 0.66)}
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        measures = ("culmen_length_mm", "culmen_depth_mm", "flipper_length_mm", "body_mass_g")
        writer.writerow(("species", *measures))
        for species, count in ((0, 146), (1, 68), (2, 120)):
            for row in rng.normal(means[species], 0.1, (count, 4)).clip(0, 1):
                writer.writerow((species, *(repr(float(value)) for value in row)))


def write_mnist(path: Path) -> None:
    """1,000 digits of 784 numbers from -0.5 to 0.5, as tf.train.Example: a bright band for each class."""
    import tensorflow as tf

    rng = np.random.default_rng(0)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(1000):
            image = rng.uniform(-0.5, 0.0, (28, 28))
            image[2 * (number % 10) : 2 * (number % 10) + 4] += 0.5
            feature = {
                "image_class": tf.train.Feature(int64_list=tf.train.Int64List(value=[number % 10])),
                "image_floats": tf.train.Feature(
                    float_list=tf.train.FloatList(value=image.ravel())
                ),
            }
            features = tf.train.Features(feature=feature)
            writer.write(tf.train.Example(features=features).SerializeToString())


WRITERS: dict[str, Callable[[Path], None]] = {
    "taxi.csv": write_taxi,
    "penguins.csv": write_penguins,
    "mnist.tfrecord": write_mnist,
}
"""Name of a real file -> what writes one like it."""
