"""Opens the feeds: the batches that training and validation read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from stoker.core.errors import ConfigError, Plain
from stoker.core.native_build import NotBuilt
from stoker.data.columns import Column
from stoker.data.dataset import Dataset
from stoker.data.features.image_decoding import decode_images, decode_whole
from stoker.data.features.preprocessing.transform import Transform
from stoker.data.feed.agreement import TIE, AnswerAgreement, compare_answers, pixels_agree
from stoker.data.feed.config import FeedConfig
from stoker.data.feed.images.augment import AugmentConfig
from stoker.data.feed.images.decode import Engine
from stoker.data.feed.images.decode_engines import choose_engine
from stoker.data.feed.images.image_feed import ImageFeed, ImageRows, Reference
from stoker.data.feed.images.split_images import ImageSplit
from stoker.data.feed.pipeline import Feed, Raw, RawRows, as_it_is
from stoker.data.feed.service.reading import ServiceFeed
from stoker.data.feed.service.records import copied
from stoker.data.feed.tables.rows import TableRows
from stoker.data.sources.config import ServiceConfig
from stoker.data.user_dataset.features import AnyTransform, OwnFeatures
from stoker.data.user_dataset.feed import AnyFeed, OwnFeed
from stoker.data.user_dataset.load_dataset import AnyDataset, OwnDataset
from stoker.train.config import TrainConfig

_LOG = logging.getLogger(__name__)

Feeds = tuple[AnyFeed | ServiceFeed, AnyFeed]
"""The feed of the training split, and the feed of the eval split."""

KEPT_SHARE = 0.25
"""Maximum share of the machine's memory for the transformed features of a split."""


def open_feeds(
    dataset: AnyDataset,
    transform: AnyTransform,
    *,
    config: TrainConfig,
    memory_bytes: int,
    service: ServiceConfig | None = None,
    work_dir: Path | None = None,
) -> Feeds:
    """Open the feeds of the training and the eval split.

    Args:
        dataset: The shards, or a user-defined dataset.
        transform: Converts raw columns to features and label.
        config: The section `train`: augmentation and its seed, and how batches are prepared.
        memory_bytes: Memory of this machine; a part of it may store transformed features.
        service: tf.data service whose workers prepare the training batches; None: this process does.
        work_dir: Folder for the copy of the training split that the service's workers read.

    Raises:
        ConfigError: A setting does not apply to this data; images are augmented but no feature is an
            image; the label is made from an image; or the service is missing or does not support a
            setting.
        DataError: A shard is missing, truncated or damaged.
    """
    _check_feed(config.feed, dataset, transform)
    if isinstance(dataset, OwnDataset):
        train, held_out = (
            OwnFeed(dataset, split, config=config.feed) for split in ("train", "eval")
        )
        return train, held_out
    if isinstance(transform, OwnFeatures):
        raise RuntimeError("a dataset in shards needs a transform")
    local = _local_feeds(dataset, transform, config, int(memory_bytes * KEPT_SHARE))
    if service is None or work_dir is None:
        return local("train"), local("eval")
    if config.augment is not None:
        raise ConfigError(
            "train.augment cannot be used with data.service, which does not run Stoker's augmentations",
            got=Plain("both train.augment and data.service"),
            fix="Remove one of them.",
        )
    copy = copied(dataset, "train", work_dir / "records", columns=transform.columns)
    return ServiceFeed(copy, _of_table(transform), service=service), local("eval")


def _local_feeds(
    dataset: Dataset, transform: Transform, config: TrainConfig, kept_bytes: int
) -> Callable[[str], Feed]:
    """Return a function that opens the feed of a split, whose batches this process prepares."""
    images = [column for column in transform.serving_columns if column.dtype == "image"]
    _check(transform, images, config.augment)
    if images:
        prepare, finish = _of_images(transform, [column.name for column in images])
    else:
        prepare, finish = _of_table(transform), as_it_is
    feeds = {column.name: _image_feeds(dataset, column, config) for column in images}

    def local(split: str) -> Feed:
        rows: RawRows = (
            _image_rows(dataset, split, transform, feeds, config=config.feed)
            if feeds
            else TableRows(dataset, split, columns=transform.columns, threads=config.feed.threads)
        )
        return Feed(
            rows,
            prepare=prepare,
            finish=finish,
            memory_bytes=kept_bytes,
            reference=_reference_rows(dataset, transform, feeds) if split == "eval" else None,
            config=config.feed,
        )

    return local


def _check(transform: Transform, images: list[Column], augment: AugmentConfig | None) -> None:
    if augment is not None and not images:
        raise ConfigError(
            "train.augment needs a feature that is an image",
            got=Plain("features from columns of a table only"),
            fix="Remove train.augment.",
        )
    of_image = [column.name for column in transform.target_columns if column.dtype == "image"]
    if of_image:
        raise ConfigError(
            "label and sample weight must not be computed from an image",
            got=of_image[0],
            fix="Write them into a separate column.",
        )


def _check_feed(config: FeedConfig, dataset: AnyDataset, transform: AnyTransform) -> None:
    """Reject settings that would have no effect."""
    own = isinstance(dataset, OwnDataset)
    images = not own and any(column.dtype == "image" for column in transform.serving_columns)
    of_images = {"decoder": config.decoder != "auto", "parallel_batches": config.parallel_batches}
    of_own = {"uint8": config.uint8, "slack": config.slack, "autotune": not config.autotune}
    for needed, there, settings in (
        ("images that Stoker reads", images, of_images),
        ("a dataset of your own (data.dataset)", own, of_own),
    ):
        given = [f"train.feed.{name}" for name, is_set in settings.items() if is_set]
        if given and not there:
            raise ConfigError(
                f"{given[0]} needs {needed}",
                got=Plain("an experiment without it"),
                fix=f"Remove {given[0]}.",
            )


def _engine(config: FeedConfig) -> Engine:
    try:
        return choose_engine(decode_whole, prefer=config.decoder, threads=config.threads)
    except NotBuilt as error:
        raise ConfigError(
            "train.feed.decoder: native needs a decoder that is compiled on this machine",
            got=Plain(str(error)),
            fix="Remove the setting, to decode with OpenCV; or install a C compiler.",
        ) from None


def _of_table(transform: Transform) -> Callable[[Raw], Any]:
    @tf.function(reduce_retracing=True, autograph=False)
    def prepare(raw: Raw) -> Any:
        return transform.apply_features(raw), *transform.apply_targets(raw)

    return prepare


def _of_images(
    transform: Transform, images: list[str]
) -> tuple[Callable[[Raw], Any], Callable[[Any], Any]]:
    """Return the two parts of the transform of rows with images: on the host, and in the step.

    Images are sent to the device as uint8, and the step applies the transform to them. The host applies it
    instead if the features also need strings, which an accelerator does not support, or lists of varying
    length, whose tensors have another shape in every batch.
    """
    columns = transform.serving_columns
    on_host = any(
        column.is_ragged or (column.tensor_dtype == "string" and column.name not in images)
        for column in columns
    )

    def features(raw: Raw) -> dict[str, tf.Tensor]:
        seen = {name: ImageFeed.finish(raw[name]) for name in images}
        return transform.apply_decoded(raw | seen)

    @tf.function(reduce_retracing=True, autograph=False)
    def prepare(raw: Raw) -> Any:
        inputs = features(raw) if on_host else {c.name: raw[c.name] for c in columns}
        return inputs, *transform.apply_targets(raw)

    def finish(element: Any) -> Any:
        inputs, *targets = element
        return features(inputs), *targets

    return prepare, as_it_is if on_host else finish


@dataclass(frozen=True, kw_only=True, slots=True)
class _ImageFeeds:
    """The ways to read an image column of a split."""

    training: ImageFeed
    evaluation: ImageFeed
    reference: ImageFeed
    """Reads images with the exported graph's own decoder."""

    @property
    def is_reference(self) -> bool:
        """Whether validation uses the exported graph's own decoder, because there is no faster one."""
        return self.evaluation is self.reference


SplitFeeds = dict[str, _ImageFeeds]
"""Split -> the ways to read an image column of this split."""


def _image_feeds(dataset: Dataset, column: Column, config: TrainConfig) -> SplitFeeds:
    """Return split -> the ways to read an image column of this split."""
    engine = _engine(config.feed)
    splits = {s: ImageSplit(dataset, s, column=column, engine=engine) for s in ("train", "eval")}
    reference = _reference(dataset)
    exact = None if pixels_agree(splits["eval"], reference) else reference
    if exact is not None:
        _LOG.warning(
            "the fast image decoder gives other results than the exported graph for column %r, so the "
            "graph's own decoder is used",
            column.name,
        )

    def feeds(images: ImageSplit) -> _ImageFeeds:
        by_graph = ImageFeed(images, reference=reference)
        return _ImageFeeds(
            training=ImageFeed(images, augment=config.augment, seed=config.seed, reference=exact),
            evaluation=ImageFeed(images) if exact is None else by_graph,
            reference=by_graph,
        )

    return {split: feeds(images) for split, images in splits.items()}


def _image_rows(
    dataset: Dataset,
    split: str,
    transform: Transform,
    feeds: Mapping[str, SplitFeeds],
    *,
    config: FeedConfig,
) -> ImageRows:
    return ImageRows(
        dataset,
        split,
        columns=transform.columns,
        training={name: each[split].training for name, each in feeds.items()},
        evaluation={name: each[split].evaluation for name, each in feeds.items()},
        config=config,
    )


def _reference_rows(
    dataset: Dataset, transform: Transform, feeds: Mapping[str, SplitFeeds]
) -> ImageRows | None:
    """Return the eval split, read with the graph's own decoder; None if validation already uses that."""
    if all(each["eval"].is_reference for each in feeds.values()):
        return None
    by_graph = {name: each["eval"].reference for name, each in feeds.items()}
    return ImageRows(
        dataset, "eval", columns=transform.columns, training=by_graph, evaluation=by_graph
    )


def compare_with_reference(
    held_out: AnyFeed,
    answer: Callable[[Any], Any],
    *,
    thresholds: Sequence[float],
    batch_size: int,
    tolerance: float = TIE,
) -> tuple[AnyFeed, AnswerAgreement | None]:
    """Compare the model's answers for the eval split with those for images from the graph's own decoder.

    Args:
        held_out: The feed of the eval split.
        answer: Features of a batch -> the model's scores, for `compare_answers`.
        thresholds: For each output, the score above which it counts as a yes: 0.5, or 0 for logits.
        batch_size: Number of rows per batch.
        tolerance: See `compare_answers`.

    Returns:
        The feed that validation must use from now on, and the comparison. The feed is the same one, or,
        if an answer differs, one with the graph's decoder; earlier metrics must then be computed again.
        The comparison is None if validation has no faster decoder.

    Raises:
        DataError: A shard is damaged.
    """
    reference = held_out.by_reference() if isinstance(held_out, Feed) else None
    if not isinstance(held_out, Feed) or reference is None:
        return held_out, None
    found = compare_answers(
        held_out,
        reference,
        answer=answer,
        thresholds=thresholds,
        batch_size=batch_size,
        tolerance=tolerance,
    )
    if found.holds:
        return held_out, found
    _LOG.warning(
        "validation uses the exported graph's own decoder: with the fast one the model answers "
        "%d of %d eval rows differently",
        found.differ,
        found.rows,
    )
    return reference, found


def _reference(dataset: Dataset) -> Reference:
    shape = dataset.image
    if shape is None:
        raise RuntimeError("a dataset with images must have a shape for them")

    def decode(encoded: list[bytes]) -> NDArray[np.uint8]:
        with tf.device("CPU:0"):
            return np.asarray(decode_images(tf.constant(encoded), shape))

    return decode
