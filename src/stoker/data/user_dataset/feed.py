"""A split of a user's dataset, as training reads it; see `stoker.data.feed.pipeline.Feed`."""

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
from stoker.data.user_dataset.as_bytes import Bytes
from stoker.data.user_dataset.description import Count
from stoker.data.user_dataset.load_dataset import OwnDataset, parts_of

BATCHES_AHEAD = 2
"""Batches that are made beside the step where neither the user nor TensorFlow has a prefetch."""


class OwnFeed:
    """The user's batches, in the user's order."""

    whole_calls = False
    keeps_features = False
    shares_rows = False

    def __init__(self, dataset: OwnDataset, split: str, *, config: FeedConfig = AS_IT_IS) -> None:
        """Stand for a split that has been counted.

        Args:
            dataset: The user's, as `piped` made it.
            split: Name of the split.
            config: How batches are made ready.

        Raises:
            ConfigError: a feature that is to be sent as uint8 is not there, or has no numbers.
        """
        self._config = config
        self._bytes = Bytes(dataset.description, config.uint8)
        self._dataset = self._bytes.kept(dataset.datasets[split])
        self._what, self._split = dataset.what, split
        self.in_memory = dataset.in_memory
        """Whether a pass is kept."""
        self._count = dataset.counts[split]
        self.rows = self._count.rows

    def _counted(self, dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
        # A pass that ends early would be made up from the next one, in silence.
        return dataset.apply(tf.data.experimental.assert_cardinality(self._count.batches))

    def _passes(self, *, autotune: bool) -> tf.data.Dataset[Any]:
        """Pass after pass, without an end."""
        if self.in_memory:
            return self._kept.repeat()
        # TensorFlow puts a prefetch behind all passes only where it tunes them.
        one = _unprefetched(self._dataset) if autotune else self._dataset
        return self._counted(one).repeat()

    @functools.cached_property
    def _kept(self) -> tf.data.Dataset[Any]:
        """A pass from memory, which is filled when it is first asked for."""
        # Its autotuner could hold up the end of the pass.
        once = self._faster(self._counted(self._dataset), autotune=False)
        return in_memory(once, self._count, what=self._what, split=self._split)

    def rows_at(
        self,
        epoch: int,  # noqa: ARG002 - as Feed has it
        first: int,
        last: int,
        *,
        seed: int,  # noqa: ARG002 - as Feed has it
    ) -> Sequence[int]:
        """Rows by their place in an epoch: what stands there is the user's to say."""
        return range(first, last)

    def steps(self, batch_size: int) -> int:  # noqa: ARG002 - as Feed has it
        """Steps of an epoch: the user's batches, whatever `batch_size` says."""
        return self._count.batches

    @contextmanager
    def shuffled(self, calls: Calls) -> Iterator[tf.data.Dataset[Any]]:
        """Pass after pass, without an end; what is shuffled is the user's to say.

        A run that goes on reads again what it had read, and skips it; from memory, only what it had
        read of its epoch.
        """
        epochs, within = divmod(calls.first, calls.per_epoch)
        done = epochs * self._count.batches + within * calls.steps_per_call + calls.skipped_steps
        skipped = done % self._count.batches if self.in_memory else done
        autotunes = self._autotunes(self._dataset)
        passes = self._passes(autotune=autotunes).skip(skipped)
        # TensorFlow has a prefetch of its own only where it tunes; from memory none is needed.
        bare = not (autotunes or self.in_memory or _is_prefetched(self._dataset))
        yield self._faster(passes, ahead=BATCHES_AHEAD if bare else None)

    def watched(self) -> tf.data.Dataset[Any]:
        """Pass after pass with TensorFlow's autotuner on, whatever is set.

        It keeps the model of what stages cost.
        """
        return self._faster(self._passes(autotune=True), autotune=True)

    @contextmanager
    def in_order(self, *, batch_size: int) -> Iterator[tf.data.Dataset[Any]]:  # noqa: ARG002
        """One pass; batches are the user's."""
        yield self._faster(self._kept if self.in_memory else self._dataset)

    def load(self, element: Any) -> Any:
        """An element as ({name: feature}, label) or ({name: feature}, label, weight)."""
        return self._bytes.loaded(parts_of(element))

    def _autotunes(self, dataset: tf.data.Dataset[Any]) -> bool:
        return self._config.autotune and dataset.options().autotune.enabled is not False

    def _faster(
        self,
        dataset: tf.data.Dataset[Any],
        *,
        autotune: bool | None = None,
        ahead: int | None = None,
    ) -> tf.data.Dataset[Any]:
        config, set_to = self._config, dataset.options()
        # What the user turned off on purpose stays off: their order may be loose.
        ordered = set_to.deterministic is not False
        return tuned(
            dataset,
            deterministic=ordered,
            autotune=self._autotunes(dataset) if autotune is None else autotune,
            threads=config.threads,
            ahead=ahead if config.prefetch is None else config.prefetch,
            slack=config.slack,
        )


def _unprefetched(dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
    """Without a prefetch at its end whose buffer TensorFlow sizes.

    It puts one behind all passes, which also bridges the end of each. A second one is a second
    thread that hands on each element.
    """
    # TensorFlow 2.21 has no public way to look at a dataset's last stage.
    autotuned = getattr(dataset, "_buffer_size", None) == tf.data.AUTOTUNE
    prefetched = type(dataset).__name__ == "_PrefetchDataset" and autotuned
    return getattr(dataset, "_input_dataset", dataset) if prefetched else dataset


def _is_prefetched(dataset: Any) -> bool:
    """Whether its last stage, but for options, is a prefetch."""
    while type(dataset).__name__ == "_OptionsDataset":
        dataset = getattr(dataset, "_input_dataset", None)
    return type(dataset).__name__ == "_PrefetchDataset"


AnyFeed = Feed | OwnFeed
"""What the loop reads."""


CACHE_SHARE = 0.5
"""Most of the memory that is free which a split's batches may take. It is asked again at every batch,
so that processes that fill theirs side by side stop before there is none left."""

SURE_SHARE = 0.125
"""Share of what may be taken that is read before all of it is told from that: so little does no harm,
and is enough rows to know what a row takes."""

TEXT_BYTES = 24
"""What a text takes beside its bytes: TensorFlow's `tstring`."""


def in_memory(
    dataset: tf.data.Dataset[Any], count: Count, *, what: str, split: str
) -> tf.data.Dataset[Any]:
    """Read a pass and keep it.

    Args:
        dataset: A pass of it is `count.batches` elements.
        count: What the analysis met.
        what: Whose it is, for the message.
        split: Name of the split, for the message.

    Returns:
        The same elements, from memory, in every pass; it holds them for as long as it is there.

    Raises:
        ConfigError: they do not fit; with their size and the limit.
        tf.errors.OpError: the dataset failed, or a pass has another number of elements.
    """
    # TensorFlow keeps what an iterator has read to the end for all iterators of this object.
    kept = dataset.cache()
    taken = rows = 0
    for number, element in enumerate(kept, start=1):
        tensors = tf.nest.flatten(element)
        taken += sum(map(element_bytes, tensors))
        rows += int(tensors[0].shape[0])
        limit = int(CACHE_SHARE * (free_memory_bytes() + taken))
        needed = taken * count.rows // max(1, rows)
        if taken > limit or (needed > limit and taken > SURE_SHARE * limit):
            raise ConfigError(
                f"data.pipeline.cache: memory must fit into {CACHE_SHARE:.0%} of the free memory",
                got=Plain(
                    f"{_size(taken)} in {number} of {count.batches} batches of {what}, split "
                    f"{split!r}, so about {_size(max(taken, needed))} in all; {_size(limit)} may be "
                    "taken"
                ),
                fix="Set data.pipeline.cache to none, or cache in the dataset what is smaller: the "
                "encoded images, or pixels as uint8.",
            )
    return kept


def element_bytes(tensor: tf.Tensor) -> int:
    """Memory that a tensor's elements hold, texts by their length."""
    if tensor.dtype != tf.string:
        return int(tensor.shape.num_elements()) * int(tensor.dtype.size)
    lengths = tf.cast(tf.strings.length(tensor), tf.int64)
    return int(tf.reduce_sum(lengths)) + TEXT_BYTES * int(tensor.shape.num_elements())


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


BATCHES = 16
"""How many batches are compared where nobody says: a shuffle shows in the first."""


def passes_agree(dataset: tf.data.Dataset[Any], *, batches: int = BATCHES) -> bool:
    """Compare the beginnings of two passes, byte by byte.

    Args:
        dataset: Any that ends; nothing of it changes.
        batches: How many elements of each pass are read and compared.

    Returns:
        Whether they are equal, in type, shape and every byte. What differs later is not seen. A
        dataset that keeps its own first pass (`.cache()`) is seen as if it did not, where that pass
        has more elements than are read.

    Raises:
        tf.errors.OpError: the dataset failed.
    """
    # As training repeats it: by one iterator, in which the state of random maps goes on.
    both = as_written(dataset.take(batches).repeat(2))
    seen = [_digest(element) for element in both]
    half, odd = divmod(len(seen), 2)
    return not odd and seen[:half] == seen[half:]


def _digest(element: Any) -> bytes:
    told = hashlib.sha256()
    for tensor in tf.nest.flatten(element):
        told.update(tf.io.serialize_tensor(tensor).numpy())
    return told.digest()
