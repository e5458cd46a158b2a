"""Computes loss and metrics of the eval split on all replicas, and compares image decoders."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import tensorflow as tf

from stoker.data.feed.agreement import TIE
from stoker.data.feed.options import begun_early
from stoker.data.user_dataset.feed import AnyFeed
from stoker.export.saved_model import named_outputs
from stoker.internals.keras_internals import compute_loss
from stoker.train.callbacks.callbacks import Callbacks
from stoker.train.checkpoints.seeds import keras_seeds, use_keras_seeds
from stoker.train.model.keras_model import overrides, run_custom_step, update_metrics
from stoker.train.setup.build_model import BuiltModel
from stoker.train.setup.feeds import compare_with_reference
from stoker.train.setup.strategy import Distribution
from stoker.train.setup.whole_batches import Share, shares
from stoker.train.step.parts import part_of_replica, rows_of
from stoker.train.step.step import Batch, loss_arguments, unscaled_losses

UNREAD = 2
"""Number of batches whose results are not read yet while the next one is prepared, so that the host does not
wait for each batch."""

Validate = Callable[["tf.data.Dataset[Any] | EvalBatches", Callbacks], dict[str, float]]
"""Batches of the eval split, callbacks -> `val_loss` and each metric with `val_`."""


class EvalBatches:
    """The batches of the eval split; their preparation can start before a validation does."""

    def __init__(self, batches: tf.data.Dataset[Any], *, begins_early: bool) -> None:
        """Store the batches; nothing starts yet.

        Args:
            batches: The batches, in order.
            begins_early: Whether `begin` has an effect. It must not for a user-defined dataset, whose
                Python code would run at the same time as that of the training split.
        """
        self._batches = begun_early(batches) if begins_early else batches
        self._begins_early = begins_early
        self._begun: Iterator[Any] | None = None

    @property
    def element_spec(self) -> Any:
        """The `element_spec` of the batches."""
        return self._batches.element_spec

    def begin(self) -> None:
        """Start to prepare the first batches, because a validation is due soon."""
        if self._begins_early and self._begun is None:
            self._begun = iter(self._batches)

    def __iter__(self) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        return iter(self._batches) if begun is None else begun


class ValidationAbortedError(Exception):
    """A validation was aborted; its results do not count."""


def make_validate(
    built: BuiltModel,
    load: Callable[[Any], Batch],
    *,
    distribution: Distribution,
    should_abort: Callable[[], bool] = lambda: False,
) -> Validate:
    """Return a function that validates, with the user's `test_step` if there is one.

    Every worker reads the whole split and evaluates its part of each batch.

    Args:
        built: The compiled model.
        load: Converts an element, or a part of it, to a batch.
        distribution: Devices that share each batch.
        should_abort: Called before each batch; if it returns True, the validation raises
            ValidationAbortedError.
    """
    model = built.model
    make_look = _look_at_shares if distribution.takes_whole_batches else _look_at_elements
    looking_at = make_look(built, load, distribution)

    def validate(
        batches: tf.data.Dataset[Any] | EvalBatches, callbacks: Callbacks
    ) -> dict[str, float]:
        look_at = looking_at(batches.element_spec)
        callbacks.on_test_begin()
        model.reset_metrics()
        seen = _Seen()
        for number, element in enumerate(batches):
            if should_abort():
                raise ValidationAbortedError
            callbacks.on_test_batch_begin(number)
            seen.add(look_at(element))
            if callbacks.reads_test_logs:
                callbacks.on_test_batch_end(number, {"loss": seen.loss()} | results(model))
            if callbacks.stop_evaluating:
                break
        logs = {"loss": seen.loss()} | results(model)
        callbacks.on_test_end(logs)
        return {f"val_{name}": value for name, value in logs.items()}

    return validate


LossSums = list[tuple[tf.Tensor, tf.Tensor]]
"""For each part of a batch: the sum of the loss over its rows, and the number of rows."""

LookingAt = Callable[[Any], Callable[[Any], LossSums]]
"""Structure of the elements -> a function that evaluates an element."""


class _Seen:
    """The batches of a validation so far; the device may still compute the batches that are not read yet."""

    def __init__(self) -> None:
        self._unread: deque[LossSums] = deque()
        self._total = self._count = 0.0

    def add(self, sums: LossSums) -> None:
        """Add the results of a batch, which the device may still compute."""
        self._unread.append(sums)
        if len(self._unread) > UNREAD:
            self._read()

    def loss(self) -> float:
        """Wait for all batches, and return the mean loss over their rows."""
        while self._unread:
            self._read()
        return self._total / self._count

    def _read(self) -> None:
        sums = self._unread.popleft()
        self._total += sum(float(loss_sum) for loss_sum, _ in sums)
        self._count += sum(float(rows) for _, rows in sums)


def _look_at_elements(
    built: BuiltModel, load: Callable[[Any], Batch], distribution: Distribution
) -> LookingAt:
    """Evaluate elements of any number of rows: each replica gets the element, and cuts out its part."""
    strategy, look = distribution.strategy, _make_look(built)
    seeds = keras_seeds(strategy)

    def replica(element: Any) -> tuple[tf.Tensor, tf.Tensor]:
        use_keras_seeds(seeds)
        if not distribution.shares_batches:
            return look(load(element))
        first, rows = part_of_replica(rows_of(element), distribution, worker_rows_only=False)
        part = tf.nest.map_structure(lambda tensor: tensor[first : first + rows], element)
        none = tf.constant(0.0), tf.constant(0.0)
        return tf.cond(rows > 0, lambda: look(load(part)), lambda: none)

    @tf.function(reduce_retracing=True, autograph=False)
    def step(element: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return _summed(strategy, strategy.run(replica, args=(element,)))

    def look_at(element: Any) -> LossSums:
        return [step(element)]

    def looking_at(spec: Any) -> Callable[[Any], LossSums]:
        # Trace with an unknown number of rows, as `fit` does: Keras would weight an output's loss by a known number.
        step.get_concrete_function(_of_any_rows(spec))
        return look_at

    return looking_at


def _look_at_shares(
    built: BuiltModel, load: Callable[[Any], Batch], distribution: Distribution
) -> LookingAt:
    """Evaluate elements that the host prepares and divides into equally many rows for each replica."""
    strategy, look = distribution.strategy, _make_look(built)
    seeds = keras_seeds(strategy)

    def replica(part: Batch, is_own: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        use_keras_seeds(seeds)
        none = tf.constant(0.0), tf.constant(0.0)
        return tf.cond(is_own, lambda: look(part), lambda: none)

    @tf.function(autograph=False)
    def step(share: Share) -> tuple[tf.Tensor, tf.Tensor]:
        return _summed(strategy, strategy.run(replica, args=share))

    def look_at(element: Any) -> LossSums:
        return [step(share) for share in shares(load(element), strategy)]

    return lambda spec: look_at  # noqa: ARG005 - each size has a step of its own


def _make_look(built: BuiltModel) -> Callable[[Batch], tuple[tf.Tensor, tf.Tensor]]:
    """Return the function of a replica: batch -> mean loss over its rows x number of rows; number of rows."""
    loss_of_batch = _make_loss(built)

    def look(batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        rows = tf.cast(rows_of(batch), tf.float32)
        return tf.cast(loss_of_batch(batch), tf.float32) * rows, rows

    return look


def _summed(strategy: tf.distribute.Strategy, sums: Any) -> tuple[tf.Tensor, tf.Tensor]:
    loss_sum, rows = (strategy.reduce(tf.distribute.ReduceOp.SUM, part, axis=None) for part in sums)
    return loss_sum, rows


def _of_any_rows(spec: Any) -> Any:
    return tf.nest.map_structure(
        lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), spec
    )


def _make_loss(built: BuiltModel) -> Callable[[Batch], tf.Tensor]:
    """Return the function of a replica: batch -> mean loss over its rows. It also updates the metrics."""
    model = built.model

    def by_test_step(batch: Batch) -> tf.Tensor:
        logs = run_custom_step(model, "test_step", (built.adapt(batch[0]), *batch[1:]))
        return tf.reduce_mean(logs["loss"])

    def by_loss(batch: Batch) -> tf.Tensor:
        outputs = model(built.adapt(batch[0]), training=False)
        with unscaled_losses():
            loss = compute_loss(model, loss_arguments(batch, outputs), training=False)
        update_metrics(model, loss_arguments(batch, outputs))
        return loss

    return by_test_step if "test_step" in overrides(model) else by_loss


def results(model: Any, prefix: str = "") -> dict[str, float]:
    """Return the current metrics; they contain the loss only if a user-defined step tracks it."""
    found = {name: float(value) for name, value in model.get_metrics_result().items()}
    if not _tracks_loss(model):
        found.pop("loss", None)
    return {prefix + name: value for name, value in found.items()}


def _tracks_loss(model: Any) -> bool:
    """Return whether the metric named `loss` has values; only a user-defined step updates this metric."""
    means = [metric for metric in model.metrics if metric.name == "loss"]
    return bool(means) and hasattr(means[-1], "count") and means[-1].count.numpy() > 0


ROUNDING_ERRORS = 4.0
"""Maximum difference of two scores with the same meaning, in rounding errors of their dtype."""

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "tensor_float_32": 2.0**-11}
"""Compute dtype -> its relative rounding error."""

GPU_FLOAT32 = 1e-4
"""Tolerance of float32 on a GPU, where, unlike on a CPU, the order of sums depends on the batch."""

LOGIT_THRESHOLD, PROBABILITY_THRESHOLD = 0.0, 0.5
"""A score above this threshold counts as a yes: for logits, and for probabilities."""


def tolerance_of(compute_dtype: str, *, on_gpu: bool, tensor_float_32: bool) -> float:
    """Return up to which difference two scores count as equal, relative to the row's largest score.

    Results on a GPU differ between two batches, and 16-bit dtypes round coarsely, so a smaller difference
    does not show that the decoders differ.

    Args:
        compute_dtype: The compute dtype of the model's layers.
        on_gpu: Whether the model runs on a GPU.
        tensor_float_32: Whether a GPU rounds float32 products to TensorFloat-32.
    """
    if compute_dtype in UNIT:
        return ROUNDING_ERRORS * UNIT[compute_dtype]
    if not on_gpu:
        return TIE
    return ROUNDING_ERRORS * UNIT["tensor_float_32"] if tensor_float_32 else GPU_FLOAT32


def _tolerance(built: BuiltModel) -> float:
    return tolerance_of(
        str(built.model.dtype_policy.compute_dtype),
        on_gpu=bool(tf.config.list_logical_devices("GPU")),
        tensor_float_32=bool(tf.config.experimental.tensor_float_32_execution_enabled()),
    )


def agreed_metrics(
    built: BuiltModel,
    held_out: AnyFeed,
    metrics: Mapping[str, float],
    *,
    batch_size: int,
    validate: Callable[[AnyFeed], dict[str, float]],
) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Compare the model's answers with those for the exported graph's image decoder; correct the metrics.

    Args:
        built: The compiled model with the best weights.
        held_out: The feed of the eval split from which `metrics` were computed.
        metrics: Metrics of these weights; metrics with `val_` are computed again if an answer differs.
        batch_size: Number of rows of a validation batch.
        validate: Computes the metrics with `val_` for another feed of the same rows.

    Returns:
        The corrected metrics, and the facts to record: `rows`, `differ` and `path` (quick or reference).
        The facts are None without images, a faster decoder, or classes: nothing was compared then.

    Raises:
        DataError: A shard is damaged.
    """
    outputs = built.outputs_of_classes
    if not outputs:
        return dict(metrics), None

    @tf.autograph.experimental.do_not_convert
    def answer(features: Any) -> list[Any]:
        answered = built.model(built.adapt(features), training=False)
        scores = named_outputs(built.model, answered)
        return [scores[output] for output in outputs if output in scores] or [*scores.values()]

    logits = [built.from_logits(output) for output in outputs]
    feed, found = compare_with_reference(
        held_out,
        answer,
        thresholds=[LOGIT_THRESHOLD if each else PROBABILITY_THRESHOLD for each in logits],
        batch_size=batch_size,
        tolerance=_tolerance(built),
    )
    if found is None:
        return dict(metrics), None
    facts = asdict(found) | {"path": "quick" if found.holds else "reference"}
    if found.holds:
        return dict(metrics), facts
    return {**metrics, **validate(feed)}, facts
