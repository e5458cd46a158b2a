"""The stages of a feed of images, each run alone on real files."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
import tensorflow as tf

from stoker.data.dataset import Dataset
from stoker.data.features.image_decoding import decode_images, decode_whole
from stoker.data.feed.images.augment import AugmentConfig, RandomResizedCrop
from stoker.data.feed.images.decode_engines import choose_engine
from stoker.data.feed.images.image_feed import ImageFeed, ImageRows
from stoker.data.feed.images.split_images import ImageSplit
from stoker.data.feed.pipeline import Feed, Raw
from stoker.data.feed.stages import bottleneck, measure_stages
from stoker.data.ingest import ImagesConfig, IngestConfig, ingest

ENGINES = ("native", "opencv")
CROPPED = AugmentConfig(random_resized_crop=RandomResizedCrop())


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Some JPEGs and PNGs of 400 x 300, brought to 64 x 64."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(24):
        coarse = rng.integers(0, 256, (12, 16, 3), np.uint8)
        path = (
            root
            / "files"
            / f"class{number % 2}"
            / f"{number}.{'png' if number % 6 == 5 else 'jpg'}"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), cv2.resize(coarse, (400, 300)))
    config = IngestConfig(source=str(root / "files"), images=ImagesConfig(size=(64, 64)))
    return ingest(config, root / "data")


def split_of(photos: Dataset, engine: str) -> ImageSplit:
    chosen = choose_engine(decode_whole, prefer=engine)  # type: ignore[arg-type]  # a string of a Literal
    return ImageSplit(photos, "train", column=photos.column("image"), engine=chosen)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("augment", [None, CROPPED], ids=["as stored", "augmented"])
def test_bytes_that_were_read_before_decode_to_the_same_pixels(
    photos: Dataset, engine: str, augment: AugmentConfig | None
) -> None:
    images = split_of(photos, engine)
    rows = np.array([3, 0, 11, 5])
    views = images.views(rows, augment=augment, seed=1, epoch=2)

    found = images.decoded(images.encoded(rows), rows, views)

    assert np.array_equal(found, images.viewed(rows, views))


@pytest.mark.parametrize("augment", [None, CROPPED], ids=["as stored", "augmented"])
def test_the_stages_of_images_in_their_order(
    photos: Dataset, augment: AugmentConfig | None
) -> None:
    images = split_of(photos, "native")

    def by_the_graph(stored: list[bytes]) -> Any:
        assert photos.image is not None
        return decode_images(tf.constant(stored), photos.image).numpy()

    for reference in (None, by_the_graph):
        each = {"image": ImageFeed(images, augment=augment, seed=1, reference=reference)}
        rows = ImageRows(photos, "train", columns=photos.columns, training=each, evaluation=each)

        @tf.function
        def prepare(raw: Raw) -> Any:
            return raw["image"], tf.strings.length(raw["label"])

        feed = Feed(rows, prepare=prepare, finish=lambda made: made, memory_bytes=0)
        stages = measure_stages(feed.stages(batch_size=8, samples=16, seed=0))

        names = [stage.name for stage in stages]
        assert names == ["read image", "decode image", "columns", "batch", "transform"]
        assert all(stage.cpu_s_per_sample > 0 for stage in stages)
        assert sum(stage.share for stage in stages) == pytest.approx(1.0)
        assert bottleneck(stages).name == "decode image"
