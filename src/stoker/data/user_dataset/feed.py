"""A split of a user's dataset as training reads it, and the cache of its batches in memory."""

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
"""Batches made ahead of the step if neither the user nor TensorFlow has a prefetch."""


class OwnFeed:
    """The user's batches, in the user's order; has the interface of `Feed`."""

    whole_calls = False
    keeps_features = False
    shares_rows = False

    def __init__(self, dataset: OwnDataset, split: str, *, config: FeedConfig = AS_IT_IS) -> None:
        """Represent a split that was analyzed.

        Args:
            dataset: The user's dataset, from `with_pipeline`.
            split: Name of the split.
            config: How batches are prepared.

        Raises:
            ConfigError: a feature for uint8 is missing, or does not hold such numbers.
        """
        self._config = config
        self._bytes = ByteFeatures(dataset.description, config.uint8)
        self._dataset = self._bytes.narrowed(dataset.datasets[split])
        self._what, self._split = dataset.what, split
        self.in_memory = dataset.in_memory
        """Whether a pass is cached in memory."""
        self._count = dataset.counts[split]
        self.rows = self._count.rows

    def _with_cardinality(self, dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
        # Else a pass that ends early would silently continue with the next one.
        return dataset.apply(tf.data.experimental.assert_cardinality(self._count.batches))

    def _passes(self, *, autotune: bool) -> tf.data.Dataset[Any]:
        """Return pass after pass, without end."""
        if self.in_memory:
            return self._cached_pass.repeat()
        # TensorFlow adds a prefetch after all passes only if it tunes them.
        one = _without_prefetch(self._dataset) if autotune else self._dataset
        return self._with_cardinality(one).repeat()

    @functools.cached_property
    def _cached_pass(self) -> tf.data.Dataset[Any]:
        """A pass in memory, read at the first access."""
        # The autotuner could delay the end of the pass.
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
        """Return positions in an epoch, because the user decides the order of rows."""
        return range(first, last)

    def steps(self, batch_size: int) -> int:  # noqa: ARG002 - as Feed has it
        """Return the steps of an epoch: the number of the user's batches."""
        return self._count.batches

    @contextmanager
    def shuffled(self, calls: Calls) -> Iterator[tf.data.Dataset[Any]]:
        """Open pass after pass, without end; the user decides the order.

        A resumed run reads its earlier batches again and skips them; from memory, only those of its
        epoch.
        """
        epochs, within = divmod(calls.first, calls.per_epoch)
        done = epochs * self._count.batches + within * calls.steps_per_call + calls.skipped_steps
        skipped = done % self._count.batches if self.in_memory else done
        autotunes = self._autotunes(self._dataset)
        passes = self._passes(autotune=autotunes).skip(skipped)
        # TensorFlow adds a prefetch only if it tunes; from memory none is needed.
        bare = not (autotunes or self.in_memory or is_prefetch(without_options(self._dataset)))
        yield self._tuned(passes, ahead=BATCHES_AHEAD if bare else None)

    def watched(self) -> tf.data.Dataset[Any]:
        """Return pass after pass with TensorFlow's autotuner, which measures the stages' costs."""
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
        # An order that the user turned off stays off.
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
    """Remove a last prefetch whose buffer TensorFlow tunes.

    TensorFlow adds one after all passes, which also covers the end of each. A second prefetch would only
    add a thread.
    """
    prefetched: bool = is_prefetch(dataset) and has_autotuned_buffer(dataset)
    return source_of(dataset) if prefetched else dataset


AnyFeed = Feed | OwnFeed
"""The feeds of the training loop."""


CACHE_SHARE = 0.5
"""Largest share of the free memory for a split's batches. It is checked at every batch, so that processes
that fill their caches at the same time stop before memory runs out."""

SURE_SHARE = 0.125
"""Share of the limit that is read before the total is estimated: little enough to do no harm, and enough
rows for the size of a row."""

TEXT_BYTES = 24
"""Memory of a string besides its bytes: TensorFlow's `tstring`."""


def in_memory(
    dataset: tf.data.Dataset[Any], count: Count, *, what: str, split: str
) -> tf.data.Dataset[Any]:
    """Read a pass and cache it.

    Args:
        dataset: A pass of it is `count.batches` elements.
        count: Size of the split.
        what: Name of the dataset, for the message.
        split: Name of the split, for the message.

    Returns:
        A dataset of the same elements from memory, which it holds as long as it exists.

    Raises:
        ConfigError: they do not fit; names their size and the limit.
        tf.errors.OpError: the dataset failed, or a pass has another number of elements.
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
                f"data.pipeline.cache: memory must fit into {CACHE_SHARE:.0%} of the free memory",
                got=Plain(
                    f"{_size(cached_bytes)} in {number} of {count.batches} batches of {what}, split "
                    f"{split!r}, so about {_size(max(cached_bytes, needed))} in all; {_size(limit)} may be "
                    "used"
                ),
                fix="Set data.pipeline.cache to none, or cache in the dataset what is smaller: the "
                "encoded images, or pixels as uint8.",
            )
    return cached


def element_bytes(tensor: tf.Tensor) -> int:
    """Return the memory of a tensor's elements; of strings by their length."""
    if tensor.dtype != tf.string:
        return int(tensor.shape.num_elements()) * int(tensor.dtype.size)
    lengths = tf.cast(tf.strings.length(tensor), tf.int64)
    return int(tf.reduce_sum(lengths)) + TEXT_BYTES * int(tensor.shape.num_elements())


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


BATCHES = 16
"""Default number of compared batches: a shuffle already shows in the first."""


def passes_agree(dataset: tf.data.Dataset[Any], *, batches: int = BATCHES) -> bool:
    """Return whether two passes begin with the same batches, byte by byte.

    Args:
        dataset: Any finite dataset.
        batches: Number of elements of each pass to compare.

    Returns:
        Whether they are equal in type, shape and every byte. Later differences are not found. A
        dataset with its own `.cache()` is compared as if it had none, if a pass has more elements.

    Raises:
        tf.errors.OpError: the dataset failed.
    """
    # As training repeats it: by one iterator, in which the state of random maps goes on.
    both = as_written(dataset.take(batches).repeat(2))
    digests = [_digest(element) for element in both]
    half, odd = divmod(len(digests), 2)
    return not odd and digests[:half] == digests[half:]


def _digest(element: Any) -> bytes:
    digest = hashlib.sha256()
    for tensor in tf.nest.flatten(element):
        digest.update(tf.io.serialize_tensor(tensor).numpy())
    return digest.digest()
