"""The passes of an elastic training: a replica runs its virtual workers one after another.

Every virtual worker begins a step with the same state. It draws its own random numbers, and changes the
statistics of BatchNormalization with its own rows. At the end of the step, the statistics become the mean over
the virtual workers, weighted by rows, and all generators have drawn equally many numbers. So nothing must be
stored for each virtual worker between two steps, and results do not depend on which replica runs which virtual
worker, except for the order of sums. Sums are float64, so that after rounding to float32 they almost never depend
on the order.
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
    """Sums over the passes of a replica, each weighted by its number of rows."""

    gradients: Gradients
    """A gradient per trainable variable; float64 with virtual workers."""

    statistics: list[tf.Tensor]
    """The statistics of layers, in the order of their variables."""

    loss_sum: tf.Tensor
    """Mean loss x rows, a float32 scalar; float64 with virtual workers."""

    rows: tf.Tensor
    """Number of rows, a scalar of the same dtype as `loss_sum`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VirtualWorkers:
    """The virtual workers of a replica: a function of an element, to be called in `strategy.run`."""

    load: Callable[[Any], Any]
    """Converts a part of an element to a batch."""

    one_pass: Callable[[Any, tf.Tensor], tuple[tf.Tensor, Gradients]]
    """Runs a pass: (batch, number of rows that update the metrics) -> loss, gradients."""

    weights: list[Any]
    """The model's trainable Keras variables."""

    statistics: list[Any]
    """Keras variables that become their mean over the virtual workers."""

    seeds: list[Any]
    """Keras variables with the states of all generators from which a step draws."""

    distribution: Distribution
    """Devices that share the virtual workers."""

    count: int
    """Number of virtual workers of all replicas."""

    batch_size: int
    """Number of rows of a virtual worker in a full step."""

    worker_rows_only: bool
    """Whether an element contains only this worker's rows of the global batch."""

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
            # All virtual workers have drawn equally many numbers, so take the states of the last one.
            variable.value.assign(tf.stack([seed[0], tf.identity(variable.value)[1]]))
        return sums

    def _slices(
        self, element: Any, replica: tf.Tensor, here: int
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return rows per slice; rows of the element before this replica's rows; and rows from there on.

        Slices are filled one after another, so in a short step, the last slices are short or empty.
        """
        rows = rows_of(element)
        if not self.worker_rows_only:
            # A batch of a user-defined dataset may be larger than the first one, on which `batch_size` is based.
            size = tf.maximum(self.batch_size, -(-rows // self.count))
            before = replica * here * size
            return size, before, tf.maximum(rows - before, 0)
        local = self.distribution.local_replicas
        before = tf.math.floormod(replica, local) * here * self.batch_size
        # A worker without rows of its own gets one row too many (see `Calls.share_rows`); none of its rows may count.
        has_own = rows <= local * here * self.batch_size
        return (
            tf.constant(self.batch_size),
            before,
            tf.where(has_own, tf.maximum(rows - before, 0), 0),
        )

    def _added(self, sums: PassSums, element: Any, begin: tf.Tensor, own: tf.Tensor) -> PassSums:
        """Add a pass over rows of an element that start at `begin`; only the first `own` rows count."""
        # A pass without rows uses other rows with weight zero. So all virtual workers draw equally many random
        # numbers, and none of them computes a mean over 0 rows.
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
