"""Batches of records with images: one Python call per batch decodes them; color jitter runs in the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf
from numpy.typing import NDArray

from stoker.cluster.limits import usable_cores
from stoker.core.errors import DataError
from stoker.data.columns import Column, to_numpy
from stoker.data.dataset import Dataset
from stoker.data.feed.calls import Calls, RowOrder, plain, shaped_batch
from stoker.data.feed.config import AS_IT_IS, FeedConfig
from stoker.data.feed.images.augment import AugmentConfig, color_factors
from stoker.data.feed.images.split_images import ImageSplit
from stoker.data.feed.options import as_written
from stoker.data.feed.order import shuffled_indices
from stoker.data.feed.stages import StageWork

Reference = Callable[[list[bytes]], NDArray[np.uint8]]
"""Encoded images -> [batch, height, width, channels], decoded by the exported graph."""

PARALLEL_CALLS = 2
"""Number of batches that are read at the same time. Each uses every core; the second keeps the cores busy while
the last images of the first are decoded and passed on."""


class ImageFeed:
    """The batches of one image column, for training or for evaluation."""

    def __init__(
        self,
        images: ImageSplit,
        *,
        augment: AugmentConfig | None = None,
        seed: int = 0,
        reference: Reference | None = None,
    ) -> None:
        """Keep the settings; nothing is read yet.

        Args:
            images: The column.
            augment: Augmentation of the images; None: images as evaluation and serving see them.
            seed: The run's seed.
            reference: Decoder of images that are not augmented; None: the engine of `images`, which must
                agree with the exported graph.
        """
        self.failure: DataError | None = None
        self._images = images
        self._augment = augment
        self._seed = seed
        self._reference = reference

    @property
    def augments(self) -> bool:
        """Whether images are augmented, and so differ from epoch to epoch."""
        return self._augment is not None

    def read(self, rows: tf.Tensor, epoch: tf.Tensor) -> dict[str, tf.Tensor]:
        """Read one batch; for `Dataset.map(..., PARALLEL_CALLS, deterministic=True)`.

        If a shard is damaged, the pipeline fails and `failure` holds the error.

        Args:
            rows: [batch] int64, row numbers of the split.
            epoch: Scalar int64, from 0.

        Returns:
            The argument of `finish`: `pixels`, [batch, height, width, channels] uint8; with color jitter
            also `colors`, [batch, 3] float32.
        """
        shape = self._images.shape
        found = tf.numpy_function(self._read, [rows, epoch], tf.uint8, stateful=False)
        batch = {
            "pixels": tf.ensure_shape(found, [None, shape.height, shape.width, shape.channels])
        }
        if self._augment is not None and self._augment.color_jitter is not None:
            factors = tf.numpy_function(self._factors, [rows, epoch], tf.float32, stateful=False)
            batch["colors"] = tf.ensure_shape(factors, [None, 3])
        return batch

    @staticmethod
    def finish(batch: dict[str, tf.Tensor]) -> tf.Tensor:
        """Return the images after color jitter; call it inside the compiled step.

        Args:
            batch: Result of `read`.

        Returns:
            [batch, height, width, channels] uint8.
        """
        if "colors" not in batch:
            return batch["pixels"]
        return jitter_colors(batch["pixels"], batch["colors"])

    def gather(self, rows: NDArray[np.int64], *, epoch: int) -> NDArray[np.uint8]:
        """Read one batch directly, not in a pipeline; return its pixels before color jitter.

        Raises:
            DataError: a shard is damaged.
        """
        if self._augment is None and self._reference is not None:
            return self._reference(self._images.encoded(rows))
        return self._images.pixels(rows, augment=self._augment, seed=self._seed, epoch=epoch)

    def stages(self, name: str, *, rows: NDArray[np.int64], threads: int) -> Iterator[StageWork]:
        """Return the work to read and decode some rows' images, for `measure_stages`; epoch 0.

        Args:
            name: Name of the column.
            rows: [batch] row numbers of the split.
            threads: Number of threads of the decoder.
        """
        images, encoded = self._images, list[bytes]()

        def read() -> None:
            encoded[:] = images.encoded(rows)

        views = images.views(rows, augment=self._augment, seed=self._seed, epoch=0)
        by_graph = self._reference if self._augment is None else None

        def decode() -> None:
            if by_graph is not None:
                by_graph(encoded)
            else:
                images.decoded(encoded, rows, views)

        for what, run in (("read", read), ("decode", decode)):
            yield StageWork(name=f"{what} {name}", samples=len(rows), parallelism=threads, run=run)

    def _read(self, rows: NDArray[np.int64], epoch: np.int64) -> NDArray[np.uint8]:
        try:
            return self.gather(rows, epoch=int(epoch))
        except DataError as failure:
            # TensorFlow converts an error of a Python function to its own error.
            self.failure = failure
            raise

    def _factors(self, rows: NDArray[np.int64], epoch: np.int64) -> NDArray[np.float32]:
        if self._augment is None or self._augment.color_jitter is None:
            raise RuntimeError("color jitter is off")
        return color_factors(
            self._augment.color_jitter, seed=self._seed, epoch=int(epoch), indices=rows
        )


def jitter_colors(images: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Change brightness, contrast and saturation; call it inside the compiled step.

    Args:
        images: [batch, height, width, channels] uint8.
        factors: [batch, 3] float32, from `color_factors`.

    Returns:
        A tensor of the same shape, uint8; values are rounded only once, at the end.

    Source: torchvision `adjust_brightness`, `adjust_contrast`, `adjust_saturation`; gray as in ITU-R
    BT.601.
    """
    brightness, contrast, saturation = (
        factors[:, place, tf.newaxis, tf.newaxis, tf.newaxis] for place in range(3)
    )
    pixels = _clipped(tf.cast(images, tf.float32) * brightness)
    mean = tf.reduce_mean(_gray(pixels), axis=[1, 2, 3], keepdims=True)
    pixels = _clipped(mean + contrast * (pixels - mean))
    gray = _gray(pixels)
    pixels = _clipped(gray + saturation * (pixels - gray))
    return tf.cast(tf.round(pixels), tf.uint8)


def _gray(pixels: tf.Tensor) -> tf.Tensor:
    if pixels.shape[-1] == 1:
        return pixels
    weighted: tf.Tensor = pixels * tf.constant([0.299, 0.587, 0.114])
    return tf.reduce_sum(weighted, axis=-1, keepdims=True)


def _clipped(pixels: tf.Tensor) -> tf.Tensor:
    return tf.clip_by_value(pixels, 0.0, 255.0)


class ImageRows:
    """Raw columns of records with images. All columns but the images are kept in memory."""

    whole_calls = False

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        *,
        columns: Sequence[Column],
        training: Mapping[str, ImageFeed],
        evaluation: Mapping[str, ImageFeed],
        config: FeedConfig = AS_IT_IS,
    ) -> None:
        """Read all columns but the images into memory.

        Args:
            dataset: The ingested dataset.
            split: Name of the split.
            columns: The columns to read.
            training: Image column -> the feed from which `shuffled` reads it.
            evaluation: Image column -> the feed from which `in_order` reads it.
            config: Number of batches that are made at the same time, and number of threads.

        Raises:
            DataError: a shard is missing, truncated or damaged.
        """
        self._columns = [column for column in columns if column.dtype != "image"]
        self.rows = dataset.rows(split)
        self._at_once = config.parallel_batches or PARALLEL_CALLS
        self._threads = config.threads or usable_cores()
        self._training = {c.name: training[c.name] for c in columns if c.dtype == "image"}
        self._evaluation = {name: evaluation[name] for name in self._training}
        table = dataset.table(split, columns=[column.name for column in self._columns])
        self._row_getters = [_row_getter(column, table) for column in self._columns]

    @property
    def changes(self) -> bool:
        """Whether images are augmented."""
        return any(feed.augments for feed in self._training.values())

    def order(self, *, seed: int) -> RowOrder:
        """Return the shuffled order of the rows."""

        def rows_at(epoch: int, first: int, last: int) -> NDArray[np.int64]:
            positions = np.arange(first, last, dtype=np.int64)
            return shuffled_indices(positions, size=self.rows, seed=seed, epoch=epoch)

        return rows_at

    @contextmanager
    def shuffled(self, calls: Calls) -> Iterator[tf.data.Dataset[Any]]:
        """Open a dataset of batches in shuffled order."""
        with _raises_reader_error(self._training):
            yield self._read(calls.steps(self.order(seed=calls.seed)), self._training)

    @contextmanager
    def in_order(self, *, batch_size: int) -> Iterator[tf.data.Dataset[Any]]:
        """Open a dataset of batches in stored order, without augmentation."""
        rows = tf.data.Dataset.range(self.rows).batch(batch_size)
        epoch = tf.constant(0, tf.int64)
        with _raises_reader_error(self._evaluation):
            yield self._read(rows.map(plain(lambda indices: (indices, epoch))), self._evaluation)

    def stages(self, *, batch_size: int, samples: int, seed: int) -> Iterator[StageWork]:
        """Return the work to make a batch, stage by stage, for `measure_stages`."""
        rows = self.order(seed=seed)(0, 0, min(samples, self.rows))
        for name, feed in self._training.items():
            yield from feed.stages(name, rows=rows, threads=self._threads)
        if self._columns:
            yield StageWork(
                name="columns",
                samples=len(rows),
                parallelism=self._at_once,
                run=lambda: self._gather_columns(rows),
            )
        size = min(batch_size, len(rows))
        repeated = self._repeated_batch(rows[:size])
        yield StageWork(
            name="batch",
            samples=TIMED_BATCHES * size,
            parallelism=self._at_once,
            run=lambda: _consume(repeated),
        )

    def _repeated_batch(self, rows: NDArray[np.int64]) -> tf.data.Dataset[Any]:
        """Return a dataset that repeats a finished batch, so that only the time to pass it on is measured."""
        ready = [feed.gather(rows, epoch=0) for feed in self._training.values()]
        ready += self._gather_columns(rows)
        dtypes: list[Any] = [array.dtype for array in ready[: len(self._training)]]
        dtypes += [tf.as_dtype(column.tensor_dtype) for column in self._columns]

        @plain
        def pass_on(turn: tf.Tensor) -> Any:
            return tf.numpy_function(lambda _: ready, [turn], dtypes, stateful=False)

        return tf.data.Dataset.range(TIMED_BATCHES).map(
            pass_on, num_parallel_calls=self._at_once, deterministic=True
        )

    def _read(
        self, steps: tf.data.Dataset[Any], images: Mapping[str, ImageFeed]
    ) -> tf.data.Dataset[Any]:
        @plain
        def read(indices: tf.Tensor, epoch: tf.Tensor) -> dict[str, Any]:
            return self._gathered_columns(indices) | {
                name: feed.read(indices, epoch) for name, feed in images.items()
            }

        return steps.map(read, num_parallel_calls=self._at_once, deterministic=True)

    def _gathered_columns(self, indices: tf.Tensor) -> dict[str, Any]:
        dtypes = [tf.as_dtype(column.tensor_dtype) for column in self._columns]
        if not dtypes:
            return {}
        found = tf.numpy_function(self._gather_columns, [indices], dtypes, stateful=False)
        return {
            column.name: shaped_batch(tensor, column.shape)
            for column, tensor in zip(self._columns, found, strict=True)
        }

    def _gather_columns(self, indices: NDArray[np.int64]) -> list[NDArray[Any]]:
        return [take(indices) for take in self._row_getters]


TIMED_BATCHES = 64
"""Number of batches that are passed on in one measurement."""


def _consume(batches: tf.data.Dataset[Any]) -> None:
    for _ in as_written(batches):
        pass


@contextmanager
def _raises_reader_error(images: Mapping[str, ImageFeed]) -> Iterator[None]:
    """If TensorFlow reports an error of a reader, raise the reader's own error instead."""
    try:
        yield
    except tf.errors.OpError as error:
        for feed in images.values():
            if feed.failure is not None:
                raise feed.failure from error
        raise


def _row_getter(column: Column, table: pa.Table) -> Callable[[NDArray[np.int64]], NDArray[Any]]:
    """Return a function from row numbers to values of a column; strings are kept in Arrow's compact form."""
    values = table.column(column.name).combine_chunks()
    if column.is_ragged:
        # `to_numpy` pads to the longest list of the batch, not of the split.
        return lambda indices: to_numpy(column, values.take(pa.array(indices)))
    if column.dtype != "string" or column.length is not None:
        numbers = to_numpy(column, values)
        return lambda indices: numbers[indices]
    # With 32-bit offsets, `take` overflows on a column above 2 GiB.
    wide = values.cast(pa.large_string())
    return lambda indices: to_numpy(column, wide.take(pa.array(indices)))
