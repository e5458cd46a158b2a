"""The passes of an elastic training: a replica runs its virtual workers one after another.

Every virtual worker begins a step with the same state. It draws its own random numbers and changes the
statistics of BatchNormalization by its own rows. At the end of the step the statistics become their mean by
rows, and the generators are equally far. So nothing has to be kept for each virtual worker between two steps,
and no result depends on which replica ran which of them, except for the order of sums. These are float64, so
that their rounding to float32 almost never depends on the order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from stoker.train.checkpoints.seeds import seed_of_part
from stoker.train.optimizer.gradients import Gradients, dense, scaled
from stoker.train.setup.strategy import Distribution
from stoker.train.step.parts import rows_of

SUMS = tf.float64
"""Dtype of all sums over virtual workers, also between replicas."""


class PassSums(NamedTuple):
    """Sums over the virtual workers of a replica, each weighted by its rows."""

    gradients: Gradients
    """One per trainable variable; of virtual workers float64."""

    statistics: list[tf.Tensor]
    """In the order of the statistics."""

    loss_sum: tf.Tensor
    """Mean loss x rows, scalar float32; of virtual workers float64."""

    rows: tf.Tensor
    """Scalar of the same dtype."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VirtualWorkers:
    """The virtual workers of a replica; a function of an element, to be called where replicas run."""

    load: Callable[[Any], Any]
    """Converts a part of an element to a batch."""

    one_pass: Callable[[Any, tf.Tensor], tuple[tf.Tensor, Gradients]]
    """A batch, and the rows that update the metrics -> loss, gradients."""

    weights: list[Any]
    """The model's trainable Keras variables."""

    statistics: list[Any]
    """Keras variables that become their mean over the virtual workers."""

    seeds: list[Any]
    """Keras variables: the states of all generators that a step draws from."""

    distribution: Distribution
    """Devices that share the virtual workers."""

    count: int
    """Virtual workers, over all replicas."""

    batch_size: int
    """Rows of a virtual worker in a full step."""

    worker_rows_only: bool
    """Whether an element holds only this worker's rows of the global batch."""

    def __call__(self, element: Any) -> PassSums:
        """Run the passes of this replica over its slices of an element."""
        replica = tf.constant(0)
        if self.distribution.replicas > 1:
            context = tf.distribute.get_replica_context()
            replica = tf.cast(context.replica_id_in_sync_group, tf.int32)
        here = self.count // self.distribution.replicas
        first = replica * here
        size, rows_before, rows = self._slices(element, replica, here)
        seeds = [tf.identity(seed.value) for seed in self.seeds]
        statistics = [tf.identity(variable.value) for variable in self.statistics]

        def body(index: tf.Tensor, sums: PassSums) -> tuple[tf.Tensor, PassSums]:
            for variable, seed in zip(self.seeds, seeds, strict=True):
                variable.value.assign(seed_of_part(seed, first + index))
            for variable, value in zip(self.statistics, statistics, strict=True):
                variable.value.assign(value)
            begin = rows_before + index * size
            own = tf.clip_by_value(rows_before + rows - begin, 0, size)
            return index + 1, self._added(sums, element, begin, own)

        _, sums = tf.while_loop(
            lambda index, _: index < here,
            body,
            (tf.constant(0), self._nothing()),
            parallel_iterations=1,
        )
        for variable, seed in zip(self.seeds, seeds, strict=True):
            # As far as the last one has drawn, all have drawn.
            variable.value.assign(tf.stack([seed[0], tf.identity(variable.value)[1]]))
        return sums

    def _slices(
        self, element: Any, replica: tf.Tensor, here: int
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Rows of a slice, rows of the element before this replica's, and rows from there on.

        Slices fill up one after the other: the last ones of a short step are short or empty.
        """
        rows = rows_of(element)
        if not self.worker_rows_only:
            # A batch of a user's own dataset may be larger than the first one.
            size = tf.maximum(self.batch_size, -(-rows // self.count))
            before = replica * here * size
            return size, before, tf.maximum(rows - before, 0)
        local = self.distribution.local_replicas
        before = tf.math.floormod(replica, local) * here * self.batch_size
        has_own = rows <= local * here * self.batch_size  # else see `Calls.share_rows`
        return (
            tf.constant(self.batch_size),
            before,
            tf.where(has_own, tf.maximum(rows - before, 0), 0),
        )

    def _added(self, sums: PassSums, element: Any, begin: tf.Tensor, own: tf.Tensor) -> PassSums:
        """Add one pass over the rows of an element from `begin` on, of which `own` count."""
        # Without rows, a pass uses others with weight zero: all draw equally many random numbers, and
        # none computes the mean of nothing.
        last = tf.clip_by_value(begin + own, 1, rows_of(element))
        start = tf.where(own > 0, begin, tf.maximum(0, last - self.batch_size))
        batch = self.load(tf.nest.map_structure(lambda tensor: tensor[start:last], element))
        loss, gradients = self.one_pass(batch, own)
        weight = tf.cast(own, tf.float32)
        return PassSums(
            [
                kept if gradient is None else kept + tf.cast(dense(scaled(gradient, weight)), SUMS)
                for kept, gradient in zip(sums.gradients, gradients, strict=True)
            ],
            [
                kept + tf.cast(variable.value, SUMS) * tf.cast(weight, SUMS)
                for kept, variable in zip(sums.statistics, self.statistics, strict=True)
            ],
            sums.loss_sum + tf.cast(loss * weight, SUMS),
            sums.rows + tf.cast(weight, SUMS),
        )

    def _nothing(self) -> PassSums:
        return PassSums(
            [tf.zeros(weight.shape, SUMS) for weight in self.weights],
            [tf.zeros(variable.shape, SUMS) for variable in self.statistics],
            tf.zeros((), SUMS),
            tf.zeros((), SUMS),
        )
