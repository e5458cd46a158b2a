"""What workers send waits in a queue on the first server, and is taken one by one by the chief.

With one writer every optimizer does what it does on one device, and a worker that dies tears no
update: what it sent is in the queue as a whole or not at all. A step that is done again after such
a death is known by its number, and taken once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from stoker.train.optimizer.ema import WeightAverage

FIRST_SERVER = "/job:ps/task:0/device:CPU:0"
"""Device of the queue and the counts. Variables lie on all servers in turn."""

CAPACITY = 1 << 20
"""Most that may wait. Never reached: no more is under way than the chief hands out."""


class BatchResult(NamedTuple):
    """What came of a batch."""

    loss_sum: tf.Tensor
    """Mean loss x rows."""

    rows: tf.Tensor
    """Rows of the batch, float32."""

    finite: tf.Tensor
    """Whether loss and gradients are; where not, nothing is changed."""

    metrics: list[tf.Tensor]
    """What the batch adds to each of the model's metric variables."""


class VariableChange(NamedTuple):
    """What a step does to a variable without gradient: value <- kept x value + added.

    A moving average is neither a value nor a difference: by the time that it arrives others have
    arrived, and differences from one old value would add up to more than the way to go.
    """

    kept: tf.Tensor
    added: tf.Tensor


class Update(NamedTuple):
    """What a step adds to the model."""

    gradients: list[Any]
    """Of the trainable variables; None where there is none, IndexedSlices of embeddings."""

    changes: list[VariableChange]
    """Of the other variables that it changes: BatchNorm's averages."""


class WorkerMessage(NamedTuple):
    """What a worker sends."""

    result: BatchResult
    update: Update | None
    """None of the eval split."""


class PassTotals(NamedTuple):
    """What was taken since the pass began."""

    batches: int
    """How many, each counted once."""

    repeated: int
    """How many came again and were thrown away: their worker had died after it had sent them and
    before it said so."""

    rows: float
    loss_sum: float
    """Mean loss x rows, over all of them."""

    not_finite: int
    """The first batch whose loss or gradients were not finite, -1 where there is none."""


class Inbox:
    """The batches of a pass, as they come from the workers."""

    def __init__(
        self,
        model: keras.Model,
        sample: WorkerMessage,
        *,
        changed: Sequence[Any],
        batches: int,
        average: WeightAverage | None,
    ) -> None:
        """Make queue and counts; call it in the strategy's scope.

        Args:
            model: Its metrics are built, and its optimizer.
            sample: What a worker sends, symbolic.
            changed: The variables of `Update.changes`.
            batches: Most batches of a pass.
            average: Of the weights; kept up after each update.
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
        """Send what came of a batch; runs on a worker.

        Args:
            number: The batch, counted over all passes, int64.
            sent: Of the sample's structure.
        """
        self._queue.enqueue([number, *_parts(sent)])

    def begin(self, first: int) -> None:
        """Begin a pass whose first batch has this number; forget the one before."""
        self._first.assign(first)
        self._arrivals.assign(tf.zeros_like(self._arrivals))
        self._totals.assign([0.0, 0.0, 0.0, 0.0, -1.0])

    def take(self) -> PassTotals:
        """Take what has come, and say what was taken in this pass."""
        batches, repeated, rows, loss_sum, not_finite = self._take_waiting().numpy()
        return PassTotals(
            int(batches), int(repeated), float(rows), float(loss_sum), int(not_finite)
        )

    def _take_all(self) -> tf.Tensor:
        with tf.device(FIRST_SERVER):
            for _ in tf.range(self._queue.size()):  # type: ignore[attr-defined]
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
