"""The work of a worker for a batch. It writes no variables; the package's docstring says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from stoker.train.model.keras_model import update_metrics
from stoker.train.optimizer.ema import WeightAverage
from stoker.train.parameter_server.server import (
    BatchResult,
    Inbox,
    Update,
    VariableChange,
    WorkerMessage,
)
from stoker.train.setup.build_model import BuiltModel
from stoker.train.step.step import Batch, loss_arguments

DRAWS = 1 << 12
"""Maximum number of random draws of a generator per step; more draws would overlap with the next step's."""

Compute = Callable[[tf.Tensor, Batch], WorkerMessage]
"""(number of the batch, which determines its random numbers; batch) -> message to the server."""


class WorkerModel:
    """The model on the workers: variables are read from the servers, and never written."""

    def __init__(self, built: BuiltModel, *, seeds: Sequence[Any]) -> None:
        """Collect the model's variables; its metrics and optimizer must be built.

        Args:
            built: The compiled model.
            seeds: States of Keras's own generators, for layers without a seed.
        """
        self.model = model = built.model
        self._built = built
        self._seeds = [*filter(_is_seed, model.non_trainable_variables), *seeds]
        self._metrics = list(model.metrics_variables)
        apart = {id(variable) for variable in (*self._seeds, *self._metrics)}
        self._others = [v for v in model.non_trainable_variables if id(v) not in apart]
        for variable in model.trainable_variables:
            # Keras's variables lack the method `sparse_read`, which tf.gather uses. With it, only the used
            # rows of an Embedding are sent (0.03 MB per step), and not the whole table (51 MB).
            variable.sparse_read = variable.value.sparse_read
        self.changed: list[Any] = []
        """The variables of `Update.changes`; known after `train` was traced."""

    def train(self, number: tf.Tensor, batch: Batch) -> WorkerMessage:
        """Run forward and backward pass."""
        model, optimizer = self.model, self.model.optimizer
        before = {id(v): tf.identity(v.value) for v in self._others}
        with self._nothing_written(number, before) as scope, tf.GradientTape() as tape:
            with tf.GradientTape(persistent=True) as of_others:
                of_others.watch([*before.values()])
                result, loss = self._look(batch, scope, training=True)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, [v.value for v in model.trainable_variables])
        after = {id(v): scope.get_current_value(v) for v in self._others}
        self.changed = [v for v in self._others if after[id(v)] is not before[id(v)]]
        changes = [_change(before[id(v)], after[id(v)], of_others) for v in self.changed]
        # A loss scale itself detects gradients that overflow, so here only the loss is checked.
        scales = hasattr(optimizer, "dynamic_scale")
        finite = _all_finite([loss] if scales else [loss, *gradients])
        return WorkerMessage(result._replace(finite=finite), Update(gradients, changes))

    def evaluate(self, number: tf.Tensor, batch: Batch) -> WorkerMessage:
        """Compute loss and metrics of the eval split."""
        with self._nothing_written(number, {}) as scope:
            result, _ = self._look(batch, scope, training=False)
        return WorkerMessage(result, None)

    def _nothing_written(
        self, number: tf.Tensor, others: Mapping[int, tf.Tensor]
    ) -> keras.StatelessScope:
        """Return a scope that keeps assignments: metrics start at 0, and seeds depend on the batch's number."""
        read = [(v, others[id(v)]) for v in self._others if id(v) in others]
        none = [(v, tf.zeros(v.shape, v.dtype)) for v in self._metrics]
        moved = [(v, _moved(v.value, number)) for v in self._seeds]
        return keras.StatelessScope(state_mapping=[*read, *none, *moved])

    def _look(
        self, batch: Batch, scope: keras.StatelessScope, *, training: bool
    ) -> tuple[BatchResult, tf.Tensor]:
        model = self._built.model
        outputs = model(self._built.adapt(batch[0]), training=training)
        loss = model.compute_loss(**loss_arguments(batch, outputs), training=training)
        update_metrics(model, loss_arguments(batch, outputs))
        rows = tf.cast(tf.shape(tf.nest.flatten(batch)[0])[0], tf.float32)
        added = [tf.identity(scope.get_current_value(v)) for v in self._metrics]
        loss_sum = tf.cast(loss, tf.float32) * rows
        return BatchResult(loss_sum, rows, tf.constant(True), added), loss


def open_inbox(
    worker: WorkerModel,
    compute: Compute,
    load: Callable[[Any], Batch],
    sample: Any,
    *,
    batches: int,
    average: WeightAverage | None = None,
) -> tuple[Inbox, Callable[[tf.Tensor, Any], None]]:
    """Return the inbox, and the function with which a worker computes a batch and sends the result.

    Call this in the strategy's scope.

    Args:
        worker: The model.
        compute: The model's `train` or `evaluate`.
        load: Element -> batch; runs on the worker.
        sample: An element.
        batches: Maximum number of batches of a pass.
        average: Moving average of the weights, which training updates.
    """
    element_spec = tf.nest.map_structure(
        lambda tensor: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype), sample
    )
    signature = [tf.TensorSpec([], tf.int64), element_spec]

    # As in Keras's `fit`, AutoGraph does not convert the user's code.
    @tf.function(input_signature=signature, autograph=False)
    def computed(number: tf.Tensor, element: Any) -> WorkerMessage:
        return compute(number, load(element))

    inbox = Inbox(
        worker.model,
        computed.get_concrete_function().structured_outputs,
        changed=worker.changed,
        batches=batches,
        average=average,
    )

    @tf.function(input_signature=signature)
    def send(number: tf.Tensor, element: Any) -> None:
        # Return nothing: the worker would store the result, which would be lost if the worker dies.
        inbox.put(number, computed(number, element))

    # Trace now. TensorFlow sends a new function to every worker, and holds Python's lock while it waits for
    # them; if a worker hangs during training, this process could not even report it.
    send.get_concrete_function()
    return inbox, send


def _is_seed(variable: Any) -> bool:
    return variable.path.endswith("seed_generator_state")


def _change(before: tf.Tensor, after: tf.Tensor, tape: tf.GradientTape) -> VariableChange:
    """Return the change of a variable as an affine map for each element."""
    if not before.dtype.is_floating:
        return VariableChange(tf.ones_like(before), after - before)
    gradient = tape.gradient(after, before, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    kept = tf.convert_to_tensor(gradient)
    return VariableChange(kept, after - kept * before)


def _moved(state: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    # The second word of a seed counts draws: each step gets its own range of counts.
    moved = tf.cast(number * DRAWS, state.dtype)
    return state + tf.stack([tf.zeros_like(moved), moved])


def _all_finite(tensors: Sequence[Any]) -> tf.Tensor:
    values = [t.values if isinstance(t, tf.IndexedSlices) else t for t in tensors if t is not None]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in values])
