"""The queue of the workers' results on the first server, and their application by the chief, one by one.

With a single writer, every optimizer works as on one device. A worker that dies leaves no partial update,
because a result is in the queue completely or not at all. A step that is repeated after a worker's death is
recognized by its number, and applied only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from stoker.train.optimizer.ema import WeightAverage

FIRST_SERVER = "/job:ps/task:0/device:CPU:0"
"""Device of the queue and the totals. Variables are placed on all servers in turn."""

CAPACITY = 1 << 20
"""Capacity of the queue, which is never reached, because the chief limits the calls in progress."""


class BatchResult(NamedTuple):
    """The result of a batch."""

    loss_sum: tf.Tensor
    """Mean loss x rows."""

    rows: tf.Tensor
    """Number of rows of the batch, float32."""

    finite: tf.Tensor
    """Whether loss and gradients are finite; if not, the update is not applied."""

    metrics: list[tf.Tensor]
    """Increments of the model's metric variables."""


class VariableChange(NamedTuple):
    """The effect of a step on a variable without gradient: its new value is kept x value + added.

    A moving average can be sent neither as a value nor as a difference: other updates are applied before it
    arrives, and the sum of several differences from the same old value would be too large.
    """

    kept: tf.Tensor
    added: tf.Tensor


class Update(NamedTuple):
    """The update of the variables by a step."""

    gradients: list[Any]
    """Gradients of the trainable variables; None for a variable without gradient, IndexedSlices for an Embedding."""

    changes: list[VariableChange]
    """Changes of other variables: BatchNorm's averages."""


class WorkerMessage(NamedTuple):
    """The message of a worker about a batch."""

    result: BatchResult
    update: Update | None
    """The update; None for the eval split."""


class PassTotals(NamedTuple):
    """Totals of the collected batches since the pass started."""

    batches: int
    """Number of batches, each counted once."""

    repeated: int
    """Number of batches that were dropped because they arrived twice: their worker died after it had sent the
    result, but before it had reported this."""

    rows: float
    loss_sum: float
    """Sum of mean loss x rows over these batches."""

    not_finite: int
    """Number of the first batch whose loss or gradients were not finite; -1 if there is none."""


class Inbox:
    """Collects the results of the batches of a pass."""

    def __init__(
        self,
        model: keras.Model,
        sample: WorkerMessage,
        *,
        changed: Sequence[Any],
        batches: int,
        average: WeightAverage | None,
    ) -> None:
        """Create the queue and the totals; call this in the strategy's scope.

        Args:
            model: The model; its metrics and its optimizer are built.
            sample: A symbolic message of a worker.
            changed: The variables of `Update.changes`.
            batches: Maximum number of batches of a pass.
            average: Moving average of the weights; it is updated after each step.
        """
        self._model, self._sample, self._changed = model, sample, list(changed)
        self._average = average
        with tf.device(FIRST_SERVER):
            dtypes = [part.dtype for part in _parts(sample)]
            self._queue = tf.queue.FIFOQueue(CAPACITY, [tf.int64, *dtypes])
            self._first = tf.Variable(tf.zeros([], tf.int64), trainable=False)
            self._arrivals = tf.Variable(tf.zeros([batches], tf.int32), trainable=False)
            self._totals = tf.Variable(
                tf.zeros([len(PassTotals._fields)], tf.float64), trainable=False
            )
        self._take_waiting = tf.function(self._take_all, input_signature=[])

    def put(self, number: tf.Tensor, sent: WorkerMessage) -> None:
        """Send the result of a batch; runs on a worker.

        Args:
            number: Number of the batch over all passes, int64.
            sent: The message, with the structure of the sample.
        """
        self._queue.enqueue([number, *_parts(sent)])

    def begin(self, first: int) -> None:
        """Start a pass whose first batch has this number, and reset the totals."""
        self._first.assign(first)
        self._arrivals.assign(tf.zeros_like(self._arrivals))
        self._totals.assign([0.0, 0.0, 0.0, 0.0, -1.0])

    def take(self) -> PassTotals:
        """Apply the queued results, and return the totals of this pass."""
        batches, repeated, rows, loss_sum, not_finite = self._take_waiting().numpy()
        return PassTotals(
            int(batches), int(repeated), float(rows), float(loss_sum), int(not_finite)
        )

    def _take_all(self) -> tf.Tensor:
        with tf.device(FIRST_SERVER):
            for _ in tf.range(self._queue.size()):  # type: ignore[attr-defined]  # AutoGraph iterates over the tensor
                number, *parts = self._queue.dequeue()
                place = number - self._first
                if place < 0 or self._arrivals[place] > 0:
                    self._count(repeated=1)
                else:
                    self._take_one(number, _packed(self._sample, iter(parts)))
                    self._arrivals.scatter_nd_update([[place]], [1])
            return self._totals.read_value()

    def _take_one(self, number: tf.Tensor, sent: WorkerMessage) -> None:
        result, update = sent
        if result.finite:
            for variable, added in zip(self._model.metrics_variables, result.metrics, strict=True):
                variable.value.assign_add(added)
            if update is not None:
                self._apply(update)
            self._count(batches=1, rows=result.rows, loss_sum=result.loss_sum)
        else:
            unset = self._totals[PassTotals._fields.index("not_finite")] < 0
            self._count(not_finite=tf.where(unset, number + 1, 0))

    def _apply(self, update: Update) -> None:
        self._model.optimizer.apply(update.gradients, self._model.trainable_variables)
        for variable, change in zip(self._changed, update.changes, strict=True):
            variable.value.assign(change.kept * variable.value + change.added)
        if self._average is not None:
            self._average.update()

    def _count(self, **added: Any) -> None:
        values = [tf.cast(added.get(name, 0), tf.float64) for name in PassTotals._fields]
        self._totals.assign_add(tf.stack(values))


def _parts(structure: Any) -> list[Any]:
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [part for part in flat if part is not None]


def _packed(structure: Any, parts: Iterator[tf.Tensor]) -> Any:
    flat = tf.nest.flatten(structure, expand_composites=True)
    filled = [None if part is None else _shaped(next(parts), part) for part in flat]
    return tf.nest.pack_sequence_as(structure, filled, expand_composites=True)


def _shaped(part: tf.Tensor, like: Any) -> tf.Tensor:
    part.set_shape(like.shape)
    return part
