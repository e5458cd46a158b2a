"""`train.feed`: however batches are made ready, the step gets the same ones in the same order."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
import tensorflow as tf
from tests.dataset_graph import set_to

from stoker.core.errors import ConfigError
from stoker.core.native_build import NotBuilt
from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.build import build_transform
from stoker.data.features.preprocessing.transform import Transform
from stoker.data.feed.calls import Calls
from stoker.data.feed.config import Decoder, FeedConfig
from stoker.data.feed.images import decode_engines
from stoker.data.feed.images.augment import AugmentConfig
from stoker.data.feed.pipeline import Feed
from stoker.data.ingest import ImagesConfig, IngestConfig, ingest
from stoker.train.config import TrainConfig
from stoker.train.setup.feeds import open_feeds

Data = tuple[Dataset, Transform]

FLIPPED = AugmentConfig(flip=0.5)
"""Exact whatever decodes: nothing is resized at random."""

OF_ALL = (
    FeedConfig(threads=1),
    FeedConfig(threads=7, prefetch=2),
    FeedConfig(prefetch=64),
)
OF_IMAGES = (
    FeedConfig(decoder="opencv"),
    FeedConfig(decoder="native", threads=3),
    FeedConfig(parallel_batches=5),
    FeedConfig(parallel_batches=1, threads=1, prefetch=1, decoder="opencv"),
)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Data:
    root = tmp_path_factory.mktemp("photographs")
    draw = np.random.default_rng(0)
    for number in range(60):
        path = root / "source" / ("left", "right")[number % 2] / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = draw.integers(0, 256, (6, 8, 3), np.uint8)
        cv2.imwrite(str(path), cv2.resize(coarse, (96, 72), interpolation=cv2.INTER_CUBIC))
    config = IngestConfig(
        source=str(root / "source"), images=ImagesConfig(size=(32, 32), store="original")
    )
    dataset = ingest(config, root / "data")
    return dataset, build_transform(dataset, None, root / "transform", label="label")


def batches(data: Data, config: FeedConfig, *, augment: AugmentConfig | None) -> list[Any]:
    """Two epochs of training, and the eval split, as the step sees them."""
    feed, held_out = open_feeds(
        *data, config=TrainConfig(augment=augment, seed=3, feed=config), memory_bytes=0
    )
    assert isinstance(feed, Feed)
    assert isinstance(held_out, Feed)
    calls = Calls(rows=feed.rows, batch_size=8, steps_per_call=2, seed=5, first=0, last=0)
    calls = Calls(
        rows=feed.rows, batch_size=8, steps_per_call=2, seed=5, first=0, last=2 * calls.per_epoch
    )
    with feed.shuffled(calls) as shuffled:
        found = [feed.load(element) for element in shuffled]
    with held_out.in_order(batch_size=16) as ordered:
        return found + [held_out.load(element) for element in ordered]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected) > 4
    tf.nest.assert_same_structure(found, expected)
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def test_rows_of_a_table_are_the_same(dataset: Dataset, transform: Transform) -> None:
    data = dataset, transform
    expected = batches(data, FeedConfig(), augment=None)

    for config in OF_ALL:
        assert_same(batches(data, config, augment=None), expected)


@pytest.fixture(scope="module")
def plain_images(photographs: Data) -> list[Any]:
    """The batches of a feed without settings."""
    return batches(photographs, FeedConfig(), augment=FLIPPED)


@pytest.mark.parametrize("config", [*OF_ALL, *OF_IMAGES], ids=repr)
def test_images_are_the_same(
    photographs: Data, plain_images: list[Any], config: FeedConfig
) -> None:
    assert_same(batches(photographs, config, augment=FLIPPED), plain_images)


def pipeline(data: Data, config: FeedConfig, *, augment: AugmentConfig | None = None) -> Any:
    """What the step's batches come from."""
    feed, _ = open_feeds(
        *data, config=TrainConfig(augment=augment, seed=3, feed=config), memory_bytes=0
    )
    assert isinstance(feed, Feed)
    calls = Calls(rows=feed.rows, batch_size=8, steps_per_call=2, seed=5, first=0, last=2)
    with feed.shuffled(calls) as shuffled:
        return shuffled


def test_the_configured_number_of_threads_and_batches_is_at_work(
    dataset: Dataset, transform: Transform, photographs: Data
) -> None:
    table = dataset, transform
    configured, plainly = (
        pipeline(table, FeedConfig(threads=7, prefetch=3)),
        pipeline(table, FeedConfig()),
    )
    assert set_to(configured, "ParallelMapDataset", -1)[-1] == 7
    assert set_to(configured, "PrefetchDataset", 1)[-1] == 3
    assert set_to(plainly, "PrefetchDataset", 1)[-1] == 1, "a table's calls"

    configured = pipeline(photographs, FeedConfig(parallel_batches=5, threads=7, prefetch=9))
    plainly = pipeline(photographs, FeedConfig())
    assert set_to(configured, "ParallelMapDataset", -1) == [5, 7]
    assert set_to(configured, "PrefetchDataset", 1)[-1] == 9
    assert set_to(plainly, "ParallelMapDataset", -1)[0] == 2
    assert set_to(plainly, "PrefetchDataset", 1)[-1] == 8


@pytest.mark.parametrize("decoder", ["native", "opencv"])
def test_the_configured_decoder_has_the_configured_threads(
    photographs: Data, monkeypatch: pytest.MonkeyPatch, decoder: Decoder
) -> None:
    started = []
    for name in ("NativeEngine", "OpenCvEngine"):
        kind = getattr(decode_engines, name)

        def start(decode_whole: Any, *, threads: int, kind: Any = kind) -> Any:
            started.append((kind.__name__, threads))
            return kind(decode_whole, threads=threads)

        monkeypatch.setattr(decode_engines, name, start)

    assert batches(photographs, FeedConfig(decoder=decoder, threads=3), augment=FLIPPED)

    assert set(started) == {({"native": "NativeEngine", "opencv": "OpenCvEngine"}[decoder], 3)}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (FeedConfig(decoder="opencv"), "train.feed.decoder needs images that Stoker reads"),
        (FeedConfig(parallel_batches=3), "train.feed.parallel_batches needs images"),
        (FeedConfig(slack=True), "train.feed.slack needs a dataset of your own"),
        (FeedConfig(autotune=False), "train.feed.autotune needs a dataset of your own"),
        (FeedConfig(uint8={"a": "x"}), "train.feed.uint8 needs a dataset of your own"),
    ],
)
def test_what_would_have_no_effect_is_refused(
    dataset: Dataset, transform: Transform, config: FeedConfig, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        batches((dataset, transform), config, augment=None)


def test_a_requested_decoder_that_cannot_be_built_is_an_error(
    photographs: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise NotBuilt("no C compiler was found")

    monkeypatch.setattr(decode_engines, "NativeEngine", missing)

    with pytest.raises(
        ConfigError,
        match=r"native needs a decoder that is compiled on this machine[\s\S]*no C compiler",
    ):
        batches(photographs, FeedConfig(decoder="native"), augment=FLIPPED)
    assert batches(photographs, FeedConfig(), augment=FLIPPED)
