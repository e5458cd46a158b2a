"""The calls of a training run: each Python call of the train function runs several steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

RowOrder = Callable[[int, int, int], NDArray[np.int64]]
"""Function of epoch, first and last position (excluded) -> [last - first] row numbers at these positions."""

plain = tf.autograph.experimental.do_not_convert
"""Decorator for functions without a Python `if` or loop over tensors: to convert them costs more than to
trace them."""

BLOCK_POSITIONS = 1 << 16
"""Number of positions whose rows are computed at once: 0.5 MB of indices, some ms of one core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """A range of a run's calls, counted over all its epochs."""

    rows: int
    """Number of rows of an epoch."""

    batch_size: int
    """Rows per step; an epoch's last step may have fewer."""

    steps_per_call: int
    """Steps per call; an epoch's last call may have fewer."""

    seed: int
    """Seed of the order."""

    first: int
    """The first call; above 0 if the run was resumed."""

    last: int
    """The call after the last one."""

    skipped_steps: int = 0
    """Number of steps of the first call that are already done, if a run resumes inside a call."""

    worker: int = 0
    """Index of the worker whose share of each step the method `steps` returns."""

    workers: int = 1
    """Number of workers that share each step. In a step with fewer rows than workers, every worker gets
    all rows."""

    share_rows: int = 0
    """Maximum number of rows per worker and step, for elastic training. The first worker gets its full number
    of rows before the second gets any, so a shorter step has rows only for the first workers. A worker without
    rows gets `share_rows` + 1 rows, which it must not count. 0: the shares of a step differ by at most one row."""

    @property
    def call_rows(self) -> int:
        """Number of rows of a full call."""
        return self.steps_per_call * self.batch_size

    @property
    def per_epoch(self) -> int:
        """Number of calls per epoch."""
        return -(-self.rows // self.call_rows)

    @property
    def first_epoch(self) -> int:
        """The epoch of the first call, from 0."""
        return self.first // self.per_epoch

    @property
    def epochs(self) -> range:
        """The epochs that the calls belong to, from 0."""
        return range(self.first_epoch, -(-self.last // self.per_epoch))

    @property
    def skipped_rows(self) -> int:
        """Number of rows of the first call that are already done."""
        return self.skipped_steps * self.batch_size

    def without_skipped(self, calls: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
        """Return the rows of each call, without the rows of the first call that are already done."""
        if not self.skipped_steps:
            return calls

        @plain
        def cut(number: tf.Tensor, element: Any) -> Any:
            first = tf.where(tf.equal(number, 0), self.skipped_rows, 0)
            return tf.nest.map_structure(lambda tensor: tensor[first:], element)

        return calls.enumerate().map(cut)

    def indices(self, order: RowOrder) -> tf.data.Dataset[Any]:
        """Return a dataset with the row numbers of each call, [rows] int64."""
        rows_of = _BlockedOrder(self, order)

        @plain
        def of_call(call: tf.Tensor) -> tf.Tensor:
            return shaped_batch(tf.numpy_function(rows_of, [call], tf.int64, stateful=False))

        return self.without_skipped(tf.data.Dataset.range(self.first, self.last).map(of_call))

    def steps(self, order: RowOrder) -> tf.data.Dataset[Any]:
        """Return a dataset with this worker's row numbers of each step, [rows] int64, and the epoch."""
        size = self.batch_size

        def filled(rows: tf.Tensor) -> tf.Tensor:
            first, most = self.worker * self.share_rows, self.share_rows
            spare = tf.repeat(rows[-1:], most + 1)
            return tf.cond(tf.size(rows) > first, lambda: rows[first : first + most], lambda: spare)

        def share(rows: tf.Tensor) -> tf.Tensor:
            if self.share_rows:
                return filled(rows)
            count, workers = tf.size(rows, tf.int64), self.workers
            own = rows[count * self.worker // workers : count * (self.worker + 1) // workers]
            return rows if workers == 1 else tf.cond(count < workers, lambda: rows, lambda: own)

        @plain
        def cut(call: tf.Tensor, rows: tf.Tensor) -> tf.data.Dataset[Any]:
            epoch = call // self.per_epoch
            steps = -(-tf.size(rows, tf.int64) // size)
            return tf.data.Dataset.range(steps).map(
                plain(lambda step: (share(rows[step * size : (step + 1) * size]), epoch))
            )

        calls = tf.data.Dataset.range(self.first, self.last)
        both: tf.data.Dataset[Any] = tf.data.Dataset.zip((calls, self.indices(order)))
        return both.flat_map(cut)


class _BlockedOrder:
    """Return the rows of a call; the rows of a whole block of calls are computed at once.

    To compute a block takes about 0.6 ms, even for few positions.
    """

    def __init__(self, calls: Calls, order: RowOrder) -> None:
        self._calls, self._order = calls, order
        self._block_calls = max(1, BLOCK_POSITIONS // calls.call_rows)
        self._block: tuple[tuple[int, int], NDArray[np.int64]] | None = None

    def __call__(self, call: NDArray[np.int64]) -> NDArray[np.int64]:
        epoch, within = divmod(int(call), self._calls.per_epoch)
        number, place = divmod(within, self._block_calls)
        block = self._block
        if block is None or block[0] != (epoch, number):
            size = self._block_calls * self._calls.call_rows
            last = min((number + 1) * size, self._calls.rows)
            block = (epoch, number), self._order(epoch, number * size, last)
            self._block = block
        rows = self._calls.call_rows
        return block[1][place * rows : (place + 1) * rows]


def shaped_batch(tensor: tf.Tensor, shape: tuple[int | None, ...] = ()) -> tf.Tensor:
    """Restore the shape [batch, *shape], which a Python function loses."""
    return tf.ensure_shape(tensor, [None, *shape])
