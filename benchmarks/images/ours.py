"""Stoker's own feed, as training reads it: shards -> uint8 batches through `tf.data`."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import tensorflow as tf
from measure import BATCH, CROP, RATIO, SCALE, report

from stoker.data.dataset import Dataset
from stoker.data.features.image_decoding import decode_whole
from stoker.data.feed.images.augment import AugmentConfig, RandomResizedCrop
from stoker.data.feed.images.decode_engines import choose_engine
from stoker.data.feed.images.image_feed import PARALLEL_CALLS, ImageFeed
from stoker.data.feed.images.split_images import ImageSplit
from stoker.data.feed.order import shuffled_indices
from stoker.data.ingest import ImagesConfig, IngestConfig, ingest


def dataset(photos: Path, store: str) -> Dataset:
    """What ingest makes of the photographs; made once."""
    images = ImagesConfig(size=(CROP, CROP), store=store)
    config = IngestConfig(source=str(photos), images=images, splits={"train": 0.98, "eval": 0.02})
    return ingest(config, photos.parent / f"stoker-{store}")


def batches(data: Dataset, engine: str) -> tf.data.Dataset:
    """Shuffled, cropped, flipped, for ever."""
    split = ImageSplit(
        data,
        "train",
        column=data.column("image"),
        engine=choose_engine(decode_whole, prefer=engine),
    )
    augment = AugmentConfig(
        random_resized_crop=RandomResizedCrop(scale=SCALE, ratio=RATIO), flip=0.5
    )
    feed = ImageFeed(split, augment=augment)
    steps = split.rows // BATCH

    def rows_of(step: np.int64) -> np.ndarray:
        epoch, within = divmod(int(step), steps)
        places = np.arange(within * BATCH, (within + 1) * BATCH)
        return shuffled_indices(places, size=split.rows, seed=0, epoch=epoch)

    def read(step: tf.Tensor) -> dict[str, tf.Tensor]:
        rows = tf.ensure_shape(tf.numpy_function(rows_of, [step], tf.int64), [None])
        return feed.read(rows, step // steps)

    endless = tf.data.Dataset.range(1 << 40)
    return endless.map(read, num_parallel_calls=PARALLEL_CALLS, deterministic=True).prefetch(4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("photos", type=Path)
    parser.add_argument("store")
    parser.add_argument("engine")
    parser.add_argument("--measured", type=int, required=True)
    given = parser.parse_args()
    report(
        batches(dataset(given.photos, given.store), given.engine),
        warm_up=6,
        measured=given.measured,
    )
