"""A split with images, as a feed reads it: any row at any time, its images decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf
from numpy.typing import NDArray

from stoker.data.columns import Column, to_numpy
from stoker.data.dataset import Dataset
from stoker.data.feed.calls import Calls, RowOrder, plain, shaped_batch
from stoker.data.feed.config import AS_IT_IS, FeedConfig
from stoker.data.feed.images.decode_engines import usable_cores
from stoker.data.feed.images.image_feed import PARALLEL_CALLS, ImageFeed
from stoker.data.feed.options import as_written
from stoker.data.feed.order import shuffled_indices
from stoker.data.feed.stages import StageWork


class ImageRows:
    """Raw columns of records with images; see `pipeline.RawRows`.

    Everything but the images is in memory: a label and a path of each.
    """

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
        """Read the other columns.

        Args:
            dataset: What ingest wrote.
            split: Its name.
            columns: The columns to read.
            training: Image column -> how `shuffled` reads it.
            evaluation: Image column -> how `in_order` reads it.
            config: How many batches are made at once, each by how many threads.

        Raises:
            DataError: a shard is missing, cut or damaged.
        """
        self._others = [column for column in columns if column.dtype != "image"]
        self.rows = dataset.rows(split)
        self._at_once = config.parallel_batches or PARALLEL_CALLS
        self._threads = config.threads or usable_cores()
        self._training = {c.name: training[c.name] for c in columns if c.dtype == "image"}
        self._evaluation = {name: evaluation[name] for name in self._training}
        table = dataset.table(split, columns=[column.name for column in self._others])
        self._stored = [_stored(column, table) for column in self._others]

    @property
    def changes(self) -> bool:
        """Whether images are augmented."""
        return any(feed.augments for feed in self._training.values())

    def order(self, *, seed: int) -> RowOrder:
        """Which row stands where."""

        def rows_at(epoch: int, first: int, last: int) -> NDArray[np.int64]:
            positions = np.arange(first, last, dtype=np.int64)
            return shuffled_indices(positions, size=self.rows, seed=seed, epoch=epoch)

        return rows_at

    @contextmanager
    def shuffled(self, calls: Calls) -> Iterator[tf.data.Dataset[Any]]:
        """Elements are batches."""
        with _own_error(self._training):
            yield self._read(calls.steps(self.order(seed=calls.seed)), self._training)

    @contextmanager
    def in_order(self, *, batch_size: int) -> Iterator[tf.data.Dataset[Any]]:
        """Elements are batches, nothing augmented."""
        rows = tf.data.Dataset.range(self.rows).batch(batch_size)
        epoch = tf.constant(0, tf.int64)
        with _own_error(self._evaluation):
            yield self._read(rows.map(plain(lambda indices: (indices, epoch))), self._evaluation)

    def stages(self, *, batch_size: int, samples: int, seed: int) -> Iterator[StageWork]:
        """How a batch is made; see `measure_stages`."""
        rows = self.order(seed=seed)(0, 0, min(samples, self.rows))
        for name, feed in self._training.items():
            yield from feed.stages(name, rows=rows, threads=self._threads)
        if self._others:
            yield StageWork(
                name="columns",
                samples=len(rows),
                parallelism=self._at_once,
                run=lambda: self._gather(rows),
            )
        size = min(batch_size, len(rows))
        handed = self._handed(rows[:size])
        yield StageWork(
            name="batch",
            samples=HANDED * size,
            parallelism=self._at_once,
            run=lambda: _drained(handed),
        )

    def _handed(self, rows: NDArray[np.int64]) -> tf.data.Dataset[Any]:
        """The same batch again and again, made already: what is left is to hand it over."""
        ready = [feed.gather(rows, epoch=0) for feed in self._training.values()]
        ready += self._gather(rows)
        dtypes: list[Any] = [array.dtype for array in ready[: len(self._training)]]
        dtypes += [tf.as_dtype(column.tensor_dtype) for column in self._others]

        @plain
        def hand_over(turn: tf.Tensor) -> Any:
            return tf.numpy_function(lambda _: ready, [turn], dtypes, stateful=False)

        return tf.data.Dataset.range(HANDED).map(
            hand_over, num_parallel_calls=self._at_once, deterministic=True
        )

    def _read(
        self, steps: tf.data.Dataset[Any], images: Mapping[str, ImageFeed]
    ) -> tf.data.Dataset[Any]:
        @plain
        def read(indices: tf.Tensor, epoch: tf.Tensor) -> dict[str, Any]:
            return self._gathered(indices) | {
                name: feed.read(indices, epoch) for name, feed in images.items()
            }

        return steps.map(read, num_parallel_calls=self._at_once, deterministic=True)

    def _gathered(self, indices: tf.Tensor) -> dict[str, Any]:
        dtypes = [tf.as_dtype(column.tensor_dtype) for column in self._others]
        if not dtypes:
            return {}
        found = tf.numpy_function(self._gather, [indices], dtypes, stateful=False)
        return {
            column.name: shaped_batch(tensor, column.shape)
            for column, tensor in zip(self._others, found, strict=True)
        }

    def _gather(self, indices: NDArray[np.int64]) -> list[NDArray[Any]]:
        return [take(indices) for take in self._stored]


HANDED = 64
"""Batches that are handed over at a time where that is measured."""


def _drained(batches: tf.data.Dataset[Any]) -> None:
    for _ in as_written(batches):
        pass


@contextmanager
def _own_error(images: Mapping[str, ImageFeed]) -> Iterator[None]:
    """Raise a reader's own error instead of TensorFlow's."""
    try:
        yield
    except tf.errors.OpError as error:
        for feed in images.values():
            if feed.failure is not None:
                raise feed.failure from error
        raise


def _stored(column: Column, table: pa.Table) -> Callable[[NDArray[np.int64]], NDArray[Any]]:
    """How rows of a column are taken; strings stay in Arrow's compact form until a batch does."""
    values = table.column(column.name).combine_chunks()
    if column.is_ragged:
        # Padded to the longest of a batch, not of all.
        return lambda indices: to_numpy(column, values.take(pa.array(indices)))
    if column.dtype != "string" or column.length is not None:
        numbers = to_numpy(column, values)
        return lambda indices: numbers[indices]
    # 64-bit offsets: `take` on a column above 2 GiB overflows 32-bit ones.
    wide = values.cast(pa.large_string())
    return lambda indices: to_numpy(column, wide.take(pa.array(indices)))
