"""Batches of a fixed size, which XLA needs for a TPU.

Training drops the rows of an epoch that do not fill a step, because with padding, BatchNorm would see wrong
rows. The order, and so the dropped rows, change in each epoch. Validation drops no rows: rows that cannot be
divided evenly among the replicas are evaluated with one row per replica. Padding with rows of weight zero
would not work, because Keras does not apply weights to a model's `metrics`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from stoker.core.errors import ConfigError, Plain
from stoker.data.feed.calls import Calls
from stoker.data.feed.pipeline import PREFETCHED, Feed, as_it_is, mapped
from stoker.data.feed.service.reading import ServiceFeed
from stoker.data.user_dataset.feed import AnyFeed
from stoker.train.config import ResolvedTraining
from stoker.train.setup.strategy import Distribution

_LOG = logging.getLogger(__name__)


class WholeFeed:
    """A training feed whose elements are batches of whole steps, prepared on the host.

    Strings and lookups stay on the host; the step gets only numbers of known shapes.
    """

    whole_calls = False
    keeps_features = False
    shares_rows = False

    def __init__(self, feed: Feed) -> None:
        """Wrap a feed."""
        self.rows = feed.rows
        self._feed = feed

    def rows_at(self, epoch: int, first: int, last: int, *, seed: int) -> Sequence[int]:
        """Return the rows of the split at the positions [first, last) of an epoch's order."""
        return self._feed.rows_at(epoch, first, last, seed=seed)

    def steps(self, batch_size: int) -> int:
        """Return the number of whole steps of an epoch."""
        return self.rows // batch_size

    @contextmanager
    def shuffled(self, calls: Calls) -> Iterator[tf.data.Dataset[Any]]:
        """Yield a dataset with a batch for each step of some calls; it is valid in the `with` block.

        Raises:
            ConfigError: A feature or the label has a dimension of variable length.
            DataError: A shard was changed, truncated or damaged; the error names it.
        """

        # AutoGraph would raise its own error instead of Stoker's.
        @tf.autograph.experimental.do_not_convert
        def steps_of(*parts: Any) -> Any:
            batch = self._feed.load(parts if isinstance(elements.element_spec, tuple) else parts[0])
            steps = tf.shape(tf.nest.flatten(batch)[0])[0] // calls.batch_size
            return tf.nest.map_structure(lambda tensor: _in_steps(tensor, steps, calls), batch)

        with self._feed.shuffled(calls) as elements:
            yield mapped(elements, steps_of).unbatch().prefetch(PREFETCHED)

    def load(self, element: Any) -> Any:
        """Return the element itself, which is already a batch."""
        return as_it_is(element)


def whole_steps(feed: AnyFeed | ServiceFeed, resolved: ResolvedTraining) -> WholeFeed:
    """Wrap a feed for a TPU; a log message says how many rows an epoch drops."""
    if not isinstance(feed, Feed):
        raise RuntimeError("a TPU supports batches of the local feed only")
    left_out = feed.rows % resolved.global_batch
    if left_out:
        _LOG.warning(
            "each epoch drops %d of %d rows, never the same ones: a TPU needs whole steps of %d rows",
            left_out,
            feed.rows,
            resolved.global_batch,
        )
    return WholeFeed(feed)


def _in_steps(tensor: tf.Tensor, steps: tf.Tensor, calls: Calls) -> tf.Tensor:
    """Reshape [rows, ...] to [steps, rows of a step, ...]; drop the rows that do not fill a step."""
    if not tensor.shape[1:].is_fully_defined():
        raise ConfigError(
            "train.strategy: tpu needs features and labels of fixed shapes",
            got=Plain(f"a batch of shape {tensor.shape}"),
            fix="Pad or cut them to the same length in preprocessing_fn.",
        )
    whole = tensor[: steps * calls.batch_size]
    return tf.reshape(whole, [steps, calls.batch_size, *tensor.shape[1:]])


Share = tuple[Any, Any]
"""Each replica's rows of a batch, and whether they belong to it; if not, they must not count."""


def share(
    batch: Any, strategy: tf.distribute.Strategy, *, first: int, rows: int, count: int
) -> Share:
    """Give each replica equally many consecutive rows of a batch.

    Args:
        batch: Nested tensors [count, ...].
        strategy: The strategy of the replicas.
        first: First row of the first replica.
        rows: Number of rows per replica.
        count: Number of rows of the batch; a replica for which no rows are left gets the last rows.
    """

    def of_replica(context: tf.distribute.experimental.ValueContext) -> Share:
        begin = first + context.replica_id_in_sync_group * rows
        here = min(begin, count - rows)
        part = tf.nest.map_structure(lambda tensor: tensor[here : here + rows], batch)
        return part, tf.constant(begin < count)

    shared: Share = strategy.experimental_distribute_values_from_function(of_replica)
    return shared


def shares(batch: Any, strategy: tf.distribute.Strategy) -> Iterator[Share]:
    """Divide a batch of any number of rows into shares; in a share, all replicas have equally many rows.

    Yields:
        At most two shares: one with as many rows as possible for every replica, and one with the remaining
        rows, a single row per replica. Each row counts once.
    """
    count, replicas = int(tf.nest.flatten(batch)[0].shape[0]), strategy.num_replicas_in_sync
    rows, rest = divmod(count, replicas)
    if rows:
        yield share(batch, strategy, first=0, rows=rows, count=count - rest)
    if rest:
        yield share(batch, strategy, first=count - rest, rows=1, count=count)


def first_share(element: Any, distribution: Distribution) -> Any:
    """Convert an element to the form that the compiled step needs; see `Distribution.spread`."""
    if not distribution.takes_whole_batches:
        return element
    part, _ = next(shares(element, distribution.strategy))
    return part
