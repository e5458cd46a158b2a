"""The feed of a user's dataset for training and evaluation, and the cache of its batches in memory."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from stoker.core.errors import ConfigError, Plain
from stoker.data.feed.calls import Calls
from stoker.data.feed.config import AS_IT_IS, FeedConfig
from stoker.data.feed.options import as_written, free_memory_bytes, tuned
from stoker.data.feed.pipeline import Feed
from stoker.data.user_dataset.byte_features import ByteFeatures
from stoker.data.user_dataset.description import Count
from stoker.data.user_dataset.load_dataset import OwnDataset, parts_of
from stoker.internals.tensorflow_internals import (
    has_autotuned_buffer,
    is_prefetch,
    source_of,
    without_options,
)

BATCHES_AHEAD = 2
"""Number of batches that are prefetched, if neither the dataset nor TensorFlow adds a prefetch."""


class OwnFeed:
    """The user's batches, in the user's order; has the interface of `Feed`."""

    whole_calls = False
    keeps_features = False
    shares_rows = False

    def __init__(self, dataset: OwnDataset, split: str, *, config: FeedConfig = AS_IT_IS) -> None:
        """Use a split; nothing is read yet.

        Args:
            dataset: The user's dataset, a result of `with_pipeline`.
            split: Name of the split.
            config: How batches are prepared.

        Raises:
            ConfigError: a feature in `config.uint8` does not exist, or cannot have been made from bytes.
        """
        self._config = config
        self._bytes = ByteFeatures(dataset.description, config.uint8)
        self._dataset = self._bytes.narrowed(dataset.datasets[split])
        self._what, self._split = dataset.what, split
        self.in_memory = dataset.in_memory
        """Whether the batches of one pass are kept in memory and used in every epoch."""
        self._count = dataset.counts[split]
        self.rows = self._count.rows

    def _with_cardinality(self, dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
        # Without this check, a pass that ends early would continue with the next pass without an error.
        return dataset.apply(tf.data.experimental.assert_cardinality(self._count.batches))

    def _passes(self, *, autotune: bool) -> tf.data.Dataset[Any]:
        """Return a dataset that repeats passes without end."""
        if self.in_memory:
            return self._cached_pass.repeat()
        # TensorFlow adds a prefetch at the end only if its autotuner is on.
        one = _without_prefetch(self._dataset) if autotune else self._dataset
        return self._with_cardinality(one).repeat()

    @functools.cached_property
    def _cached_pass(self) -> tf.data.Dataset[Any]:
        """The batches of one pass in memory; they are read at the first access."""
        # Without the autotuner, which could delay the end of the pass.
        once = self._tuned(self._with_cardinality(self._dataset), autotune=False)
        return in_memory(once, self._count, what=self._what, split=self._split)

    def rows_at(
        self,
        epoch: int,  # noqa: ARG002 - as Feed has it
        first: int,
        last: int,
        *,
        seed: int,  # noqa: ARG002 - as Feed has it
    ) -> Sequence[int]:
        """Return the positions themselves: which rows they hold is not known, because the user decides the order."""
        return range(first, last)

    def steps(self, batch_size: int) -> int:  # noqa: ARG002 - as Feed has it
        """Return the number of steps of an epoch, which is the number of the user's batches."""
        return self._count.batches

    @contextmanager
    def shuffled(self, calls: Calls) -> Iterator[tf.data.Dataset[Any]]:
        """Open a dataset that repeats passes without end; the user decides the order.

        A resumed run reads all earlier batches again and skips them; from memory, only those of the current epoch.
        """
        epochs, within = divmod(calls.first, calls.per_epoch)
        done = epochs * self._count.batches + within * calls.steps_per_call + calls.skipped_steps
        skipped = done % self._count.batches if self.in_memory else done
        autotunes = self._autotunes(self._dataset)
        passes = self._passes(autotune=autotunes).skip(skipped)
        # TensorFlow adds a prefetch only if its autotuner is on; batches in memory need none.
        bare = not (autotunes or self.in_memory or is_prefetch(without_options(self._dataset)))
        yield self._tuned(passes, ahead=BATCHES_AHEAD if bare else None)

    def watched(self) -> tf.data.Dataset[Any]:
        """Return a dataset that repeats passes, with TensorFlow's autotuner, which measures the stages' costs."""
        return self._tuned(self._passes(autotune=True), autotune=True)

    @contextmanager
    def in_order(self, *, batch_size: int) -> Iterator[tf.data.Dataset[Any]]:  # noqa: ARG002 - as of every feed
        """Open one pass of the user's batches."""
        yield self._tuned(self._cached_pass if self.in_memory else self._dataset)

    def load(self, element: Any) -> Any:
        """Return an element as ({name: feature}, label) or ({name: feature}, label, weight)."""
        return self._bytes.widened_batch(parts_of(element))

    def _autotunes(self, dataset: tf.data.Dataset[Any]) -> bool:
        return self._config.autotune and dataset.options().autotune.enabled is not False

    def _tuned(
        self,
        dataset: tf.data.Dataset[Any],
        *,
        autotune: bool | None = None,
        ahead: int | None = None,
    ) -> tf.data.Dataset[Any]:
        config, set_to = self._config, dataset.options()
        # If the user allowed elements in any order, this is kept.
        ordered = set_to.deterministic is not False
        return tuned(
            dataset,
            deterministic=ordered,
            autotune=self._autotunes(dataset) if autotune is None else autotune,
            threads=config.threads,
            ahead=ahead if config.prefetch is None else config.prefetch,
            slack=config.slack,
        )


def _without_prefetch(dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
    """Remove a prefetch at the end whose buffer is autotuned.

    TensorFlow adds a prefetch after the repeated passes, which also bridges the end of each pass. A second prefetch
    would only add a thread.
    """
    prefetched: bool = is_prefetch(dataset) and has_autotuned_buffer(dataset)
    return source_of(dataset) if prefetched else dataset


AnyFeed = Feed | OwnFeed
"""The feed of the training loop: of shards, or of a user's dataset."""


CACHE_SHARE = 0.5
"""Maximum share of the free memory for a split's batches. It is checked at every batch, so that processes that fill
their caches at the same time stop before all memory is used."""

SURE_SHARE = 0.125
"""Share of the limit that is read before the total size is estimated: little enough to do no harm, and enough rows to
estimate the size of a row."""

TEXT_BYTES = 24
"""Memory of a string in addition to its bytes: TensorFlow's `tstring`."""


def in_memory(
    dataset: tf.data.Dataset[Any], count: Count, *, what: str, split: str
) -> tf.data.Dataset[Any]:
    """Read one pass of a dataset, and keep its batches in memory.

    Args:
        dataset: The dataset; a pass has `count.batches` elements.
        count: Size of the split.
        what: Name of the dataset, for the message.
        split: Name of the split, for the message.

    Returns:
        A dataset that reads the same elements from memory; the memory is freed when this dataset is deleted.

    Raises:
        ConfigError: the batches do not fit in memory; the error names their size and the limit.
        tf.errors.OpError: the dataset failed, or a pass has a different number of elements.
    """
    # TensorFlow shares a complete cache between all iterators of this object.
    cached = dataset.cache()
    cached_bytes = rows = 0
    for number, element in enumerate(cached, start=1):
        tensors = tf.nest.flatten(element)
        cached_bytes += sum(map(element_bytes, tensors))
        rows += int(tensors[0].shape[0])
        limit = int(CACHE_SHARE * (free_memory_bytes() + cached_bytes))
        needed = cached_bytes * count.rows // max(1, rows)
        if cached_bytes > limit or (needed > limit and cached_bytes > SURE_SHARE * limit):
            raise ConfigError(
                f"with data.pipeline.cache: memory, the batches must fit in {CACHE_SHARE:.0%} of the free "
                "memory",
                got=Plain(
                    f"{_size(cached_bytes)} in {number} of {count.batches} batches of {what}, split "
                    f"{split!r}, so about {_size(max(cached_bytes, needed))} in total; the limit is "
                    f"{_size(limit)}"
                ),
                fix="Set data.pipeline.cache to none, or cache something smaller in the dataset: encoded "
                "images, or pixels as uint8.",
            )
    return cached


def element_bytes(tensor: tf.Tensor) -> int:
    """Return the memory of a tensor's elements, bytes; for strings, from their lengths."""
    if tensor.dtype != tf.string:
        return int(tensor.shape.num_elements()) * int(tensor.dtype.size)
    lengths = tf.cast(tf.strings.length(tensor), tf.int64)
    return int(tf.reduce_sum(lengths)) + TEXT_BYTES * int(tensor.shape.num_elements())


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


BATCHES = 16
"""Default number of batches that are compared: a few, because the first batch of a shuffled dataset differs."""


def passes_agree(dataset: tf.data.Dataset[Any], *, batches: int = BATCHES) -> bool:
    """Return whether two passes begin with the same batches, byte by byte.

    Args:
        dataset: Any finite dataset.
        batches: Number of elements of each pass to compare.

    Returns:
        Whether the compared batches are equal in type, shape and every byte; later batches may differ. If a pass
        has more elements, a `.cache()` in the dataset does not hide differences, because it is never completely
        filled.

    Raises:
        tf.errors.OpError: the dataset failed.
    """
    # Like training, this repeats the dataset in one iterator, in which random maps keep their state.
    both = as_written(dataset.take(batches).repeat(2))
    digests = [_digest(element) for element in both]
    half, odd = divmod(len(digests), 2)
    return not odd and digests[:half] == digests[half:]


def _digest(element: Any) -> bytes:
    digest = hashlib.sha256()
    for tensor in tf.nest.flatten(element):
        digest.update(tf.io.serialize_tensor(tensor).numpy())
    return digest.digest()
