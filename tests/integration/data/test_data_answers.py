"""Validation's answers by the quick decoder, held against those by the exported graph's."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from stoker.core.errors import DataError
from stoker.data.dataset import Dataset
from stoker.data.features.image_decoding import decode_images, decode_whole
from stoker.data.features.preprocessing.build import build_transform
from stoker.data.features.preprocessing.transform import Transform
from stoker.data.feed.agreement import TIE, compare_answers, other_answers, pixels_agree
from stoker.data.feed.images.decode import Engine, Target
from stoker.data.feed.images.decode_engines import choose_engine
from stoker.data.feed.images.image_feed import ImageFeed, ImageRows
from stoker.data.feed.images.split_images import ImageSplit
from stoker.data.feed.pipeline import Feed, Raw
from stoker.data.ingest import IngestConfig, ingest
from stoker.data.ingest.image_index import read_image_index
from stoker.data.user_dataset.feed import AnyFeed
from stoker.train.callbacks.callbacks import Callbacks
from stoker.train.config import TrainConfig
from stoker.train.loop.validation import agreed_metrics, make_validate
from stoker.train.setup.build_model import BuiltModel
from stoker.train.setup.feeds import compare_with_reference, open_feeds
from stoker.train.setup.strategy import one_device

ROWS = 400
NEVER_KEPT = 0


class Lighter:
    """An engine that makes some images lighter than they are: the rows that no sample looked at."""

    name = "lighter"

    def __init__(self, engine: Engine, *, levels: int, crcs: set[int]) -> None:
        self.engine, self.levels, self.crcs = engine, levels, crcs

    def decode(self, jobs: NDArray[np.void], target: Target) -> NDArray[np.uint8]:
        pixels = self.engine.decode(jobs, target)
        for at in np.flatnonzero([int(crc) in self.crcs for crc in jobs["crc32c"]]):
            pixels[at] += self.levels
        return pixels


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Noise about a gray of its own each: half of them lighter than the middle, and some by little."""
    root = tmp_path_factory.mktemp("grays") / "source"
    rng = np.random.default_rng(0)
    for number in range(ROWS):
        gray = 127 - number % 3 if number % 2 else 128 + number % 90
        noise = np.full((12, 10, 3), gray) + rng.integers(-1, 2, (12, 10, 1)) * (number % 2 == 0)
        noise[0, 0] = number % 251  # no two images are one record
        path = root / ("light" if number % 2 == 0 else "dark") / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), noise.astype(np.uint8))
    config = IngestConfig(source=str(root), splits={"train": 0.4, "eval": 0.6})
    return ingest(config, root.parent / "data")


@pytest.fixture(scope="module")
def transform(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Transform:
    return build_transform(dataset, None, tmp_path_factory.mktemp("transform"), label="label")


def is_light(features: dict[str, tf.Tensor]) -> tf.Tensor:
    """A model that finds the middle of the grays."""
    return tf.reduce_mean(tf.cast(features["image"], tf.float32), axis=[1, 2, 3]) / 255


def by_the_graph(dataset: Dataset, data: list[bytes]) -> NDArray[np.uint8]:
    assert dataset.image is not None
    return np.asarray(decode_images(tf.constant(data), dataset.image))


def feed_of(dataset: Dataset, transform: Transform, engine: Engine) -> tuple[Feed, ImageSplit]:
    images = ImageSplit(dataset, "eval", column=dataset.column("image"), engine=engine)

    def rows(feed: ImageFeed) -> ImageRows:
        each = {"image": feed}
        return ImageRows(dataset, "eval", columns=transform.columns, training=each, evaluation=each)

    def prepare(raw: Raw) -> Any:
        return raw["image"], transform.apply_label(raw)

    def finish(element: Any) -> Any:
        return {"image": ImageFeed.finish(element[0])}, element[1]

    graph = ImageFeed(images, reference=lambda data: by_the_graph(dataset, data))
    feed = Feed(
        rows(ImageFeed(images)),
        prepare=prepare,
        finish=finish,
        memory_bytes=NEVER_KEPT,
        reference=rows(graph),
    )
    return feed, images


def test_the_quick_path_gives_the_graphs_answers_on_every_row(
    dataset: Dataset, transform: Transform
) -> None:
    _, held_out = open_feeds(dataset, transform, config=TrainConfig(), memory_bytes=1 << 30)

    feed, found = compare_with_reference(held_out, is_light, thresholds=[0.5], batch_size=64)

    assert feed is held_out
    assert found is not None
    assert found.holds
    assert found.rows == dataset.rows("eval")


def unseen_lighter(dataset: Dataset) -> Lighter:
    """An engine that is wrong on no image that is looked at before training."""
    rows = dataset.rows("eval")
    sample = np.unique(np.linspace(0, rows - 1, 64).astype(np.int64))
    index = [read_image_index(dataset.root, shard)[0] for shard in dataset.splits["eval"]]
    crcs = np.concatenate(index)["crc32c"][np.setdiff1d(np.arange(rows), sample)]
    return Lighter(choose_engine(decode_whole), levels=2, crcs=set(crcs.tolist()))


def test_where_one_answer_differs_validation_goes_by_the_graph_and_says_so(
    dataset: Dataset, transform: Transform, caplog: pytest.LogCaptureFixture
) -> None:
    honest, _ = feed_of(dataset, transform, choose_engine(decode_whole))
    quick, images = feed_of(dataset, transform, unseen_lighter(dataset))
    assert pixels_agree(images, lambda data: by_the_graph(dataset, data)), "the sample sees nothing"

    with caplog.at_level(logging.WARNING):
        feed, found = compare_with_reference(quick, is_light, thresholds=[0.5], batch_size=64)

    assert found is not None
    wrong = answers(quick) != answers(honest)
    assert found.differ == wrong.sum() > 0
    assert f"{found.differ} of {images.rows} eval rows differently" in caplog.text
    assert (answers(feed) == answers(honest)).all()
    assert compare_with_reference(feed, is_light, thresholds=[0.5], batch_size=64) == (feed, None)


def answers(feed: Any) -> NDArray[np.bool_]:
    with feed.in_order(batch_size=50) as batches:
        return np.concatenate([is_light(feed.load(each)[0]).numpy() > 0.5 for each in batches])


def test_the_metrics_of_a_trained_model_are_made_again_where_an_answer_differs(
    dataset: Dataset, transform: Transform
) -> None:
    honest, _ = feed_of(dataset, transform, choose_engine(decode_whole))
    quick, _ = feed_of(dataset, transform, unseen_lighter(dataset))
    built = brightness_model()
    remake = partial(validated, built)
    right, wrong = (validated(built, feed) for feed in (honest, quick))
    assert right["val_accuracy"] > wrong["val_accuracy"]

    kept, recorded = agreed_metrics(built, honest, right, batch_size=64, validate=remake)
    assert kept == right
    assert recorded == {
        "rows": dataset.rows("eval"),
        "differ": 0,
        "tolerance": TIE,
        "path": "quick",
    }

    remade, recorded = agreed_metrics(
        built, quick, wrong | {"loss": 3.0}, batch_size=64, validate=remake
    )
    assert remade == right | {"loss": 3.0}
    assert recorded is not None
    assert recorded["path"] == "reference"
    lost = right["val_accuracy"] - wrong["val_accuracy"]
    assert recorded["differ"] / recorded["rows"] >= lost - 1e-6


def brightness_model() -> BuiltModel:
    """Yes from the middle of the grays on."""
    image = keras.Input((12, 10, 3), dtype="uint8")
    gray = keras.layers.GlobalAveragePooling2D()(keras.layers.Rescaling(1 / 255)(image))
    answer = keras.layers.Dense(1)
    model = keras.Model(image, answer(gray))
    answer.set_weights([np.full((3, 1), 100.0), np.array([-150.0])])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    accuracy = keras.metrics.BinaryAccuracy("accuracy", threshold=0.0)
    model.compile(optimizer="sgd", loss=loss, metrics=[accuracy])
    return BuiltModel(model=model, adapt=lambda features: features["image"])


def validated(built: BuiltModel, feed: AnyFeed) -> dict[str, float]:
    validate = make_validate(built, feed.load, distribution=one_device())
    with feed.in_order(batch_size=64) as batches:
        first = feed.load(next(iter(batches)))
        built.model.compute_metrics(x=first[0], y=first[1], y_pred=built.model(first[0]["image"]))
        return validate(batches, Callbacks(built.model, [], steps=1, epochs=1))


def test_a_shard_damaged_meanwhile_is_an_error_and_no_agreement(
    dataset: Dataset, transform: Transform
) -> None:
    feed, _ = feed_of(dataset, transform, choose_engine(decode_whole))
    reference = feed.by_reference()
    assert reference is not None
    path: Path = dataset.paths("eval")[0]
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:-1])
        with pytest.raises(DataError, match="must be"):
            compare_answers(feed, reference, answer=is_light, thresholds=[0.5], batch_size=64)
    finally:
        path.write_bytes(whole)


scores = arrays(np.float32, (7, 4), elements=st.floats(-1e3, 1e3, width=32))


@given(scores, st.permutations(range(4)))
def test_scores_agree_with_themselves_and_another_first_class_is_another_answer(
    given_scores: NDArray[np.float32], order: list[int]
) -> None:
    assert not other_answers(given_scores, given_scores, threshold=0.5).any()

    moved = given_scores[:, order]
    clear = np.diff(np.sort(given_scores, axis=1)[:, -2:])[:, 0] > 2e-5 * 1e3
    same_place = given_scores.argmax(1) == moved.argmax(1)
    found = other_answers(given_scores, moved, threshold=0.5)
    assert (found[clear] == ~same_place[clear]).all()


@given(scores)
def test_a_tie_is_not_another_answer(given_scores: NDArray[np.float32]) -> None:
    top = np.abs(given_scores).max(axis=1, keepdims=True).astype(np.float64) + 1
    tied = np.concatenate([given_scores, top, top * (1 - TIE / 4)], axis=1)
    turned = np.concatenate([given_scores, top * (1 - TIE / 4), top], axis=1)

    assert not other_answers(tied, turned, threshold=0.5).any()


def test_a_yes_or_no_is_judged_by_its_threshold() -> None:
    yes, no = np.array([[0.7], [0.2], [0.5]]), np.array([[0.3], [0.1], [0.5 + TIE / 2]])

    assert other_answers(yes, no, threshold=0.5).tolist() == [True, False, False]
    assert other_answers(yes, no, threshold=0.0).tolist() == [False, False, False]
