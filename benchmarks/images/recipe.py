"""The recipe that is taught: TFRecord, interleave, parallel map, batch, prefetch."""

from __future__ import annotations

import argparse
from pathlib import Path

import tensorflow as tf
from measure import BATCH, CROP, RATIO, SCALE, report

FILES = 4


def records(photos: Path) -> list[str]:
    """The photographs as TFRecord files; written once."""
    folder = photos.parent / "tfrecord"
    paths = [folder / f"{number}.tfrecord" for number in range(FILES)]
    if not (folder / "done").is_file():
        folder.mkdir(exist_ok=True)
        for number, path in enumerate(paths):
            with tf.io.TFRecordWriter(str(path)) as writer:
                for photo in sorted(photos.rglob("*.jpg"))[number::FILES]:
                    writer.write(_example(photo.read_bytes(), number))
        (folder / "done").write_text("whole\n")
    return [str(path) for path in paths]


def _example(image: bytes, label: int) -> bytes:
    feature = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def decoded(record: tf.Tensor) -> tf.Tensor:
    """One record -> a random crop, flipped at random, uint8."""
    spec = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    image = tf.io.decode_jpeg(tf.io.parse_single_example(record, spec)["image"], channels=3)
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.shape(image),
        tf.zeros([1, 0, 4]),
        area_range=SCALE,
        aspect_ratio_range=RATIO,
        use_image_if_no_bounding_boxes=True,
    )
    image = tf.image.resize(tf.slice(image, begin, size), [CROP, CROP])
    return tf.cast(tf.image.random_flip_left_right(image), tf.uint8)


def batches(paths: list[str]) -> tf.data.Dataset:
    """As the TensorFlow guide on input pipelines writes it."""
    return (
        tf.data.Dataset.from_tensor_slices(paths)
        .interleave(
            tf.data.TFRecordDataset, cycle_length=FILES, num_parallel_calls=tf.data.AUTOTUNE
        )
        .repeat()
        .map(decoded, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(BATCH)
        .prefetch(tf.data.AUTOTUNE)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("photos", type=Path)
    parser.add_argument("--measured", type=int, required=True)
    given = parser.parse_args()
    report(batches(records(given.photos)), warm_up=6, measured=given.measured)
