"""Make batches for the step from the rows of a split. If all batches fit, they are made once and kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from stoker.cluster.limits import usable_cores
from stoker.data.feed.calls import Calls, plain
from stoker.data.feed.config import AS_IT_IS, FeedConfig
from stoker.data.feed.images.image_feed import ImageRows
from stoker.data.feed.options import as_written
from stoker.data.feed.stages import StageWork
from stoker.data.feed.tables.rows import TableRows

Raw = dict[str, Any]
"""Raw column -> [batch, ...]; an image column has the form that `ImageFeed.read` returns."""


RawRows = TableRows | ImageRows
"""One split, read as raw columns."""


class Feed:
    """Batches of one split. If all fit, they are made once and kept in memory; else they are made in each epoch.

    Features are a pure function of a row, so both ways give the same batches in the same order.
    """

    def __init__(
        self,
        source: RawRows,
        *,
        prepare: Callable[[Raw], Any],
        finish: Callable[[Any], Any],
        memory_bytes: int,
        reference: RawRows | None = None,
        config: FeedConfig = AS_IT_IS,
    ) -> None:
        """Measure the size of some rows; make and keep all batches if they fit.

        Args:
            source: The raw rows.
            prepare: Maps raw columns to the step's input, a structure of tensors. Runs on the host, in
                parallel with the step.
            finish: Maps the step's input to a batch, inside the compiled step.
            memory_bytes: Maximum memory for batches; 0: no batches are kept.
            reference: The same rows, decoded by the exported graph's decoder, if `source` has a faster
                decoder.
            config: Number of threads, and number of batches that are prefetched.

        Raises:
            DataError: a shard is missing, truncated or damaged.
        """
        self.rows = source.rows
        self._source = source
        self._prepare = prepare
        self._finish = finish
        self._reference = reference
        self._config = config
        self.kept_bytes = 0
        keeps = memory_bytes > 0 and not source.changes
        self._kept = self._make_all(memory_bytes) if keeps else None

    @property
    def keeps_features(self) -> bool:
        """Whether all batches are in memory."""
        return self._kept is not None

    @property
    def whole_calls(self) -> bool:
        """Whether an element of `shuffled` holds the rows of a whole call, which must be cut into steps."""
        return self.keeps_features or self._source.whole_calls

    def by_reference(self) -> Feed | None:
        """Return a feed of the same rows with the exported graph's decoder, which keeps no batches.

        None if this feed uses that decoder already.
        """
        if self._reference is None:
            return None
        return Feed(
            self._reference,
            prepare=self._prepare,
            finish=self._finish,
            memory_bytes=0,
            config=self._config,
        )

    @property
    def shares_rows(self) -> bool:
        """Whether an element of `shuffled` holds only one worker's rows, not the rows of all workers."""
        return not self.whole_calls

    def rows_at(self, epoch: int, first: int, last: int, *, seed: int) -> Sequence[int]:
        """Return the row numbers at the positions [first, last) of an epoch's order."""
        found: Sequence[int] = self._source.order(seed=seed)(epoch, first, last).tolist()
        return found

    def steps(self, batch_size: int) -> int:
        """Return the number of steps of an epoch."""
        return -(-self.rows // batch_size)

    @contextmanager
    def shuffled(self, calls: Calls) -> Iterator[tf.data.Dataset[Any]]:
        """Open the shuffled rows of some calls.

        Yields:
            A prefetched dataset of arguments for `load`. If `whole_calls`, an element holds all rows of a
            call, and may be sliced along the first axis; else an element holds the rows of one batch.

        Raises:
            DataError: a shard was changed, truncated or damaged; the error names it.
        """
        if self.keeps_features:
            indices = calls.indices(self._source.order(seed=calls.seed))
            yield as_written(indices.prefetch(self._config.prefetch or PREFETCHED))
            return
        ahead = self._config.prefetch or (1 if self._source.whole_calls else PREFETCHED)
        with self._source.shuffled(calls) as raw:
            yield as_written(self._prepared(raw).prefetch(ahead))

    @contextmanager
    def in_order(self, *, batch_size: int) -> Iterator[tf.data.Dataset[Any]]:
        """Open one pass in stored order, for evaluation; `load` converts each element to a batch.

        Raises:
            DataError: as in `shuffled`.
        """
        if self.keeps_features:
            yield as_written(tf.data.Dataset.range(self.rows).batch(batch_size))
            return
        with self._source.in_order(batch_size=batch_size) as raw:
            yield as_written(self._prepared(raw).prefetch(PREFETCHED))

    def stages(self, *, batch_size: int, samples: int, seed: int) -> Iterator[StageWork]:
        """Return the work to make the step's input, stage by stage, for `measure_stages`; no batch is kept."""
        yield from self._source.stages(batch_size=batch_size, samples=samples, seed=seed)
        with self._source.in_order(batch_size=batch_size) as raws:
            raw = next(iter(as_written(raws)))

        def transform() -> None:
            with tf.device("CPU:0"):
                self._prepare(raw)

        # The reader must be closed first: it prefetches, and its work would be measured, too.
        yield StageWork(
            name="transform",
            samples=int(tf.nest.flatten(raw)[0].shape[0]),
            parallelism=self._config.threads or usable_cores(),
            run=transform,
        )

    def load(self, element: Any) -> Any:
        """Convert an element, or a slice of it, to the batch; call it inside the compiled step.

        If all batches are in memory, an element holds row numbers, and the rows are gathered on the device. To
        pass 31 tensors one by one would cost 0.7 ms per batch, more than a small model's step.
        """
        if self._kept is None:
            return self._finish(element)
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, element), self._kept)

    def _prepared(self, raw: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
        return mapped(raw, self._prepare, threads=self._config.threads)

    def _make_all(self, memory_bytes: int) -> Any | None:
        """Make all rows as one batch; return None if they do not fit."""
        parts: list[Any] = []
        # The batches are kept in the host's memory, which `memory_bytes` limits.
        with tf.device("CPU:0"), self._source.in_order(batch_size=ROWS_AT_ONCE) as raws:
            for raw in as_written(raws):
                parts.append(self._finish(self._prepare(raw)))
                if not self.kept_bytes:
                    self.kept_bytes = self._bytes_of_all(parts[0])
                    if self.kept_bytes > memory_bytes:
                        return None
            return tf.nest.map_structure(lambda *tensors: tf.concat(tensors, 0), *parts)

    def _bytes_of_all(self, part: Any) -> int:
        tensors = tf.nest.flatten(part)
        return self.rows * sum(map(tensor_bytes, tensors)) // int(tf.shape(tensors[0])[0])


PREFETCHED = 8
"""Number of batches that are prefetched: enough to bridge an interruption of some steps."""

ROWS_AT_ONCE = 1024
"""Number of rows that are made in one call: enough that the cost of a call does not matter, but little memory."""

STRING_BYTES = 64
"""Memory that is assumed for one element of a string tensor."""


def as_it_is(element: Any) -> Any:
    """Return the element: the result of `prepare` is already the batch."""
    return element


def tensor_bytes(tensor: tf.Tensor) -> int:
    """Return the memory of a tensor's elements."""
    size = STRING_BYTES if tensor.dtype == tf.string else tensor.dtype.size
    return int(tf.size(tensor)) * size


def mapped(
    dataset: tf.data.Dataset[Any], function: Callable[..., Any], *, threads: int | None = None
) -> tf.data.Dataset[Any]:
    """Map a function of TensorFlow operations over a dataset, in parallel and in order."""
    at_once = threads or usable_cores()
    return dataset.map(plain(function), num_parallel_calls=at_once, deterministic=True)
