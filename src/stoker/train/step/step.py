"""A training step: forward pass, backward pass, reduction over replicas, update.

The gradient of a step is the gradient of the mean loss over the global batch. Each pass of each replica is
weighted by its number of rows, so the result does not depend on how the batch is divided, and the loss does
not depend on the strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from stoker.core.threads import Replaced
from stoker.internals.keras_internals import compute_loss, disable_gradient_reduction, losses_module
from stoker.train.checkpoints.seeds import (
    distinct_replica_seeds,
    keras_seeds,
    seed_states,
    use_keras_seeds,
)
from stoker.train.config import ReductionDtype
from stoker.train.context.local_step import LocalStepTime
from stoker.train.model.keras_model import (
    has_builtin_metrics_only,
    has_builtin_optimizer,
    update_metrics,
)
from stoker.train.optimizer.ema import WeightAverage
from stoker.train.optimizer.fused_kernels import fuse, fuse_batch_norms
from stoker.train.optimizer.gradients import Gradients, are_finite, dense, reduced, scaled, unique
from stoker.train.optimizer.loss_scaling import DeviceLossScale, build_once, scales_on_device
from stoker.train.optimizer.masked_assign import masked_assign
from stoker.train.setup.build_model import BuiltModel
from stoker.train.setup.strategy import Distribution, in_packs
from stoker.train.step.jit import jit
from stoker.train.step.one_program import OneProgram
from stoker.train.step.parts import part_of_replica, rows_of
from stoker.train.step.step_totals import StepResult
from stoker.train.step.virtual_workers import SUMS, PassSums, VirtualWorkers

Batch = tuple[Any, ...]
"""Features by name, each [batch, ...]; labels [batch, ...]; and optionally weights [batch]."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """How a step is built."""

    batch_size: int
    """Maximum number of rows of a pass of a replica."""

    accumulate: int = 1
    """Number of passes per update."""

    virtual_workers: int = 0
    """Number of virtual workers of an elastic training; each has its own pass per update. 0: not elastic."""

    steps_per_program: int = 1
    """Number of steps per XLA program. More than one is possible only if XLA compiles the whole step and all
    batches are full and have known shapes."""

    xla: bool = False
    """Whether XLA compiles the forward and backward pass, or, on a single device, the whole step."""

    reduction_dtype: ReductionDtype = "float32"
    """Dtype in which gradients are sent."""

    reduction_bytes_per_pack: int = 0
    """Minimum size of a pack of gradients, bytes; 0: a single pack."""

    average: WeightAverage | None = None
    """Moving average of the weights; None: no average."""

    worker_rows_only: bool = False
    """Whether an element contains only this worker's rows of the global batch."""

    checks_before_update: bool = True
    """Whether every gradient is checked before the update; if not, only the loss is checked, and the update is
    always made."""

    signals: tf.Variable | None = None
    """[2] int32 on the CPU: whether this process must stop after the step, and whether it must save after
    the call."""

    local_step: LocalStepTime | None = None
    """Measures this worker's time between two all-reduces; None without other workers."""


def loss_arguments(batch: Batch, outputs: Any) -> dict[str, Any]:
    """Return a batch and the model's outputs as keyword arguments of Keras's losses and metrics."""
    features, labels, *weights = batch
    parts = {"x": features, "y": labels, "y_pred": outputs}
    return parts | {"sample_weight": weights[0]} if weights else parts


def make_train_step(
    built: BuiltModel,
    load: Callable[[Any], Batch],
    *,
    distribution: Distribution,
    settings: StepSettings,
) -> Callable[[Any], StepResult]:
    """Return a step on a global batch, or on this worker's share of it.

    Args:
        built: The compiled model; its optimizer is built here.
        load: Converts an element, or a part of it, to a batch.
        distribution: Devices that share a step.
        settings: How the step is built.

    Returns:
        A function of an element, to be called in a `tf.function`; it updates the model. All tensors of an
        element have rows along their first axis, and each replica of this process takes its part.

    Raises:
        ConfigError: The loss or the model cannot be computed in parts.
    """
    with distribution.strategy.scope():
        optimizer = built.model.optimizer
        build_once(built.model)
        if distribution.shares_batches:
            # Keras's `apply` clips the gradients of each replica before it sums them. Stoker sums them before,
            # so that the gradient of the global batch is clipped.
            disable_gradient_reduction(getattr(optimizer, "inner_optimizer", optimizer))
    suit_kernels(built, distribution, xla=settings.xla)
    if settings.xla and _is_plain(distribution, settings) and has_builtin_optimizer(built.model):
        return _make_one_program(built, load, settings)
    return _make_replicated_step(built, load, distribution, settings)


def _make_replicated_step(
    built: BuiltModel,
    load: Callable[[Any], Batch],
    distribution: Distribution,
    settings: StepSettings,
) -> Callable[[Any], StepResult]:
    """Return a step that each replica runs on its rows, with or without a check before the update."""
    strategy = distribution.strategy
    gradients = _make_gradients(built, load, distribution, settings)
    apply = _make_apply(built, distribution, settings)

    def of_one(result: tuple[Any, ...]) -> StepResult:
        return StepResult(*(strategy.experimental_local_results(part)[0] for part in result))

    def check_and_update(element: Any, signals: tf.Tensor) -> StepResult:
        replicated, parts = strategy.run(gradients, args=(element, signals))
        result = of_one(parts)

        def update() -> tf.Tensor:
            strategy.run(apply, args=(replicated,))
            return tf.constant(0)

        updated = tf.cond(result.finite, update, lambda: tf.constant(0))
        with tf.control_dependencies([updated]):
            return result._replace(loss_sum=tf.identity(result.loss_sum))

    def update_at_once(element: Any, signals: tf.Tensor) -> StepResult:
        def replica(element: Any, signals: tf.Tensor) -> tuple[tf.Tensor, ...]:
            found, parts = gradients(element, signals)
            apply(found)
            return parts

        return of_one(strategy.run(replica, args=(element, signals)))

    whole_step = check_and_update if settings.checks_before_update else update_at_once

    @tf.autograph.experimental.do_not_convert
    def step(element: Any) -> StepResult:
        # Read the signals on the host, because a replica's device may see only its own variables.
        return whole_step(element, _signals(settings))

    return step


def suit_kernels(built: BuiltModel, distribution: Distribution, *, xla: bool) -> None:
    """Choose the kernels of optimizer and BatchNormalization for the next trace, with or without XLA.

    XLA fuses Keras's operations itself; without XLA, TensorFlow's own kernels are faster. Functions that
    are already traced do not change.

    Args:
        built: The compiled model.
        distribution: How the training is distributed.
        xla: Whether the next trace is for XLA.
    """
    by_xla = xla and not distribution.shares_batches
    fuse(built.model.optimizer, wanted=not by_xla and not distribution.takes_whole_batches)
    fuse_batch_norms(built.model, wanted=not xla and not distribution.takes_whole_batches)


def _make_gradients(
    built: BuiltModel,
    load: Callable[[Any], Batch],
    distribution: Distribution,
    settings: StepSettings,
) -> Callable[[Any, tf.Tensor], tuple[Gradients, tuple[tf.Tensor, ...]]]:
    """Return the function of a replica: (element, signals) -> gradients of the global mean loss, and facts.

    The results are equal on all replicas.
    """
    one_pass = _make_pass(built, settings)
    seeds = keras_seeds(distribution.strategy)
    averages = distribution.shares_batches or settings.virtual_workers
    statistics = _statistics(built.model) if averages else []
    summed = _make_sums(
        one_pass, load, built, statistics, distribution=distribution, settings=settings
    )

    def is_finite(gradients: Gradients, loss_sum: tf.Tensor) -> tf.Tensor:
        seen = gradients if settings.checks_before_update else []
        return are_finite(built.model, seen, loss_sum)

    def whole(element: Any, signals: tf.Tensor) -> tuple[Gradients, tuple[tf.Tensor, ...]]:
        use_keras_seeds(seeds)
        batch = load(element)
        loss, gradients = one_pass(batch)
        gradients = [unique(gradient) for gradient in gradients]
        rows = tf.cast(rows_of(batch), tf.float32)
        loss_sum = loss * rows
        return gradients, (loss_sum, rows, is_finite(gradients, loss_sum), signals)

    def shared(element: Any, signals: tf.Tensor) -> tuple[Gradients, tuple[tf.Tensor, ...]]:
        use_keras_seeds(seeds)
        gradients, seen, loss_sum, rows = summed(element)
        requests = tf.unstack(tf.cast(signals, rows.dtype))
        facts = tf.stack([loss_sum, rows, *requests])
        local = settings.local_step
        if local is not None:
            local.before_reduction([gradients, facts])
        if distribution.shares_batches:
            gradients, seen, facts = reduced(
                gradients,
                facts,
                seen,
                sent_as=SUMS if settings.virtual_workers else tf.as_dtype(settings.reduction_dtype),
                packs=in_packs(settings.reduction_bytes_per_pack),
            )
        if local is not None:
            local.after_reduction(facts)
        for variable, one in zip(statistics, seen, strict=True):
            mean = one / tf.cast(facts[1], one.dtype)
            variable.value.assign(tf.cast(mean, variable.value.dtype))
        loss_sum, total = tf.unstack(tf.cast(facts[:2], tf.float32))
        if settings.virtual_workers:
            gradients = [None if one is None else tf.cast(one, tf.float32) for one in gradients]
        gradients = [scaled(gradient, 1.0 / total) for gradient in gradients]
        finite = is_finite(gradients, loss_sum)
        return gradients, (loss_sum, total, finite, tf.cast(facts[2:], tf.int32))

    return whole if _is_plain(distribution, settings) else shared


def _make_sums(
    one_pass: Callable[..., tuple[tf.Tensor, Gradients]],
    load: Callable[[Any], Batch],
    built: BuiltModel,
    statistics: list[Any],
    *,
    distribution: Distribution,
    settings: StepSettings,
) -> Callable[[Any], PassSums]:
    """Return the function of a replica: element -> sums over the replica's rows."""
    if settings.virtual_workers:
        return VirtualWorkers(
            load=load,
            one_pass=one_pass,
            weights=built.model.trainable_variables,
            statistics=statistics,
            seeds=seed_states(built.model, keras_seeds(distribution.strategy)),
            distribution=distribution,
            count=settings.virtual_workers,
            batch_size=settings.batch_size,
            worker_rows_only=settings.worker_rows_only,
        )
    passes = _make_passes(one_pass, load, built, distribution=distribution, settings=settings)

    def sums(element: Any) -> PassSums:
        first, rows = part_of_replica(
            rows_of(element), distribution, worker_rows_only=settings.worker_rows_only
        )
        with distinct_replica_seeds(distribution.replicas):
            gradients, loss_sum = passes(element, first, rows)
        seen = [variable.value * tf.cast(rows, variable.value.dtype) for variable in statistics]
        return PassSums(gradients, seen, loss_sum, tf.cast(rows, tf.float32))

    return sums


def _is_plain(distribution: Distribution, settings: StepSettings) -> bool:
    """Return whether a step is a single pass of a single replica over a whole element."""
    passes = max(settings.accumulate, settings.virtual_workers)
    return passes == 1 and not distribution.shares_batches


def _make_one_program(
    built: BuiltModel, load: Callable[[Any], Batch], settings: StepSettings
) -> OneProgram:
    """Return a step that XLA compiles from the forward pass to the update."""
    model, average = built.model, settings.average
    forward_backward = _make_forward_backward(built)
    update = _make_update(built, settings, replicas=1)
    written = [v.value for v in [*model.trainable_variables, *model.optimizer.variables]]
    written += [] if average is None else average.variables
    metrics_too = has_builtin_metrics_only(model)

    def body(batch: Batch) -> tuple[tf.Tensor, Any, tf.Tensor]:
        loss, outputs, gradients = forward_backward(batch)
        loss = tf.cast(loss, tf.float32)
        gradients = [None if gradient is None else dense(gradient) for gradient in gradients]
        if settings.checks_before_update:
            finite = are_finite(model, gradients, loss)
            with masked_assign(finite, written):
                update(gradients)
        else:
            finite = tf.math.is_finite(loss)
            update(gradients)
        if metrics_too:
            update_metrics(model, loss_arguments(batch, outputs))
            outputs = ()
        return loss, outputs, finite

    def report(batch: Batch, outputs: Any) -> None:
        update_metrics(model, loss_arguments(batch, outputs))

    return OneProgram(
        body,
        load,
        update_metrics=None if metrics_too else report,
        rows=settings.batch_size,
        steps_per_program=settings.steps_per_program,
        signals=lambda: _signals(settings),
    )


def _make_pass(
    built: BuiltModel, settings: StepSettings
) -> Callable[..., tuple[tf.Tensor, Gradients]]:
    """Return the function of a pass: (batch, number of rows that update the metrics) -> loss, gradients."""
    model, forward_backward = built.model, _make_forward_backward(built)
    compiled = jit(forward_backward, role="gradients") if settings.xla else forward_backward

    def one_pass(batch: Batch, rows: tf.Tensor | None = None) -> tuple[tf.Tensor, Gradients]:
        loss, outputs, gradients = compiled(batch)
        seen = (batch, outputs)
        if rows is not None:
            seen = tf.nest.map_structure(lambda tensor: tensor[:rows], seen)
        update_metrics(model, loss_arguments(*seen))
        return tf.cast(loss, tf.float32), gradients

    return one_pass


def _make_forward_backward(
    built: BuiltModel,
) -> Callable[[Batch], tuple[tf.Tensor, Any, Gradients]]:
    model = built.model

    def forward_backward(batch: Batch) -> tuple[tf.Tensor, Any, Gradients]:
        with tf.GradientTape() as tape, unscaled_losses():
            outputs = model(built.adapt(batch[0]), training=True)
            loss = compute_loss(model, loss_arguments(batch, outputs), training=True)
            scaled = model.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, [v.value for v in model.trainable_variables])
        return loss, outputs, gradients

    return forward_backward


def unscaled_losses() -> AbstractContextManager[None]:
    """Return a context in which the loss of a replica is the mean over the replica's rows.

    Without it, Keras divides this loss by the number of replicas, which is correct only if all replicas have
    equally many rows and `compute_loss` is not overridden.
    """
    return _LOSSES_ARE_MEANS


def _as_it_is(value: Any) -> Any:
    return value


_LOSSES_ARE_MEANS = Replaced(
    losses_module,
    scale_loss_for_distribution=_as_it_is,
    unscale_loss_for_distribution=_as_it_is,
)


def _make_passes(
    one_pass: Callable[..., tuple[tf.Tensor, Gradients]],
    load: Callable[[Any], Batch],
    built: BuiltModel,
    *,
    distribution: Distribution,
    settings: StepSettings,
) -> Callable[[Any, tf.Tensor, tf.Tensor], tuple[Gradients, tf.Tensor]]:
    """Return the function of a replica: (element, first row, rows) -> sums of gradients and losses over rows."""
    size = settings.batch_size

    def of_pass(element: Any, first: tf.Tensor, rows: tf.Tensor) -> tuple[Gradients, tf.Tensor]:
        # A replica without rows uses rows of other replicas with weight zero. So all replicas draw equally
        # many random numbers, and none of them computes a mean over 0 rows.
        last = tf.clip_by_value(first + rows, 1, rows_of(element))
        begin = tf.where(rows > 0, first, tf.maximum(0, last - size))
        batch = load(tf.nest.map_structure(lambda tensor: tensor[begin:last], element))
        loss, gradients = one_pass(batch, rows)
        weight = tf.cast(rows, tf.float32)
        return [scaled(gradient, weight) for gradient in gradients], loss * weight

    def of_whole_pass(
        element: Any,
        first: tf.Tensor,
        rows: tf.Tensor,  # noqa: ARG001 - always `size`
    ) -> tuple[Gradients, tf.Tensor]:
        def cut(tensor: tf.Tensor) -> tf.Tensor:
            sides = tensor.shape[1:]
            return tf.slice(tensor, [first, *(0 for _ in sides)], [size, *sides])

        loss, gradients = one_pass(load(tf.nest.map_structure(cut, element)))
        return [scaled(gradient, tf.constant(float(size))) for gradient in gradients], loss * size

    if distribution.takes_whole_batches:
        of_pass = of_whole_pass
    if settings.accumulate == 1:
        return of_pass
    variables = built.model.trainable_variables

    def of_passes(element: Any, first: tf.Tensor, rows: tf.Tensor) -> tuple[Gradients, tf.Tensor]:
        def body(index: tf.Tensor, total: tf.Tensor, totals: Gradients) -> tuple[Any, ...]:
            begin = first + index * size
            gradients, loss = of_pass(
                element, begin, tf.clip_by_value(first + rows - begin, 0, size)
            )
            added = [
                kept if gradient is None else kept + tf.cast(dense(gradient), tf.float32)
                for kept, gradient in zip(totals, gradients, strict=True)
            ]
            return index + 1, total + loss, added

        passes = settings.accumulate if distribution.shares_batches else -(-rows // size)
        zeros = [tf.zeros(variable.shape, tf.float32) for variable in variables]
        _, total, totals = tf.while_loop(
            lambda index, *_: index < passes, body, (tf.constant(0), tf.constant(0.0), zeros)
        )
        return totals, total

    return of_passes


def _statistics(model: Any) -> list[Any]:
    """Return the variables that layers change without a gradient: BatchNorm's means and variances."""
    return [v for v in model.non_trainable_variables if v.dtype.startswith("float")]


def _make_apply(
    built: BuiltModel, distribution: Distribution, settings: StepSettings
) -> Callable[[Gradients], None]:
    update = _make_update(
        built, settings, replicas=max(distribution.replicas, settings.virtual_workers)
    )
    if not settings.xla or distribution.shares_batches or settings.virtual_workers:
        # Not compiled by XLA, because the update exchanges values between replicas. An elastic training with
        # one replica must use the same form.
        return update
    compiled = jit(update, role="update")

    def apply_compiled(gradients: Gradients) -> None:
        compiled([None if gradient is None else dense(gradient) for gradient in gradients])

    return apply_compiled


def _make_update(
    built: BuiltModel, settings: StepSettings, *, replicas: int
) -> Callable[[Gradients], None]:
    model, average = built.model, settings.average
    if scales_on_device(model, replicas=replicas):
        scale = DeviceLossScale(model.optimizer)
        return lambda gradients: scale.apply(gradients, model.trainable_variables, average)

    def update(gradients: Gradients) -> None:
        model.optimizer.apply(gradients, model.trainable_variables)
        if average is not None:
            average.update()

    return update


def _signals(settings: StepSettings) -> tf.Tensor:
    if settings.signals is None:
        return tf.constant([0, 0])
    return tf.convert_to_tensor(settings.signals)
