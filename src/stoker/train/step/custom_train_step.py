"""Steps that call a user-defined `train_step`, which runs the passes and the update itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from stoker.core.errors import ConfigError, Finding, Plain
from stoker.internals.keras_internals import build_for_own_step, compute_loss
from stoker.train.checkpoints.seeds import distinct_replica_seeds, keras_seeds, use_keras_seeds
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.model.keras_model import (
    extra_optimizers,
    overrides,
    require_labels,
    run_custom_step,
)
from stoker.train.optimizer.loss_scaling import all_finite, build_once
from stoker.train.setup.build_model import BuiltModel
from stoker.train.setup.id_checks import checked_ids
from stoker.train.setup.strategy import Distribution
from stoker.train.step.parts import part_of_replica, rows_of
from stoker.train.step.step import (
    Batch,
    StepSettings,
    loss_arguments,
    make_train_step,
)
from stoker.train.step.step_totals import StepResult


def has_custom_train_step(model: keras.Model) -> bool:
    """Return whether the model's `train_step` is user-defined."""
    return "train_step" in overrides(model)


def _trained_by(model: keras.Model, optimizer: str) -> str:
    """Return the part of a model that an optimizer probably trains: names with the same first letters."""
    parts = [
        name
        for name, value in vars(model).items()
        if isinstance(value, keras.layers.Layer) and value.trainable_variables
    ]
    alike = [name for name in parts if name[0] == optimizer[0]]
    return f"{(alike or parts)[0]}." if parts else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstPass:
    """The result of the first batch through a model."""

    outputs: Any
    """The model's outputs."""

    warnings: Sequence[Finding]
    """Warnings about values that the model's lookup layers do not know."""


def first_pass(built: BuiltModel, batch: Batch) -> FirstPass:
    """Run a first batch, to create all variables that a step changes; a trace must not create variables.

    Call this in the strategy's scope.

    Args:
        built: The compiled model.
        batch: A batch in the form that the model needs.

    Raises:
        ConfigError: An Embedding receives an id for which it has no row, or a label has no output.
    """
    model, features = built.model, built.adapt(batch[0])
    with checked_ids(batch[0]) as warnings:
        outputs = model(features, training=False)
    if isinstance(batch[1], Mapping) and isinstance(outputs, Mapping):
        require_labels(batch[1], outputs)
    elif isinstance(batch[1], Mapping) and not overrides(model) & {"train_step", "compute_loss"}:
        _require_names(batch[1], outputs)
    if has_custom_train_step(model):
        # Build the model as `fit` does before a user-defined step: only this creates all that the step needs.
        batch_of_fit = (features, *batch[1:])
        build_for_own_step(model, batch_of_fit)
    else:
        compute_loss(model, loss_arguments(batch, outputs), training=False)
        model.compute_metrics(**loss_arguments(batch, outputs))
    model.reset_metrics()
    return FirstPass(outputs=outputs, warnings=warnings)


def _require_names(labels: Mapping[str, Any], outputs: Any) -> None:
    if isinstance(outputs, (list, tuple)):
        raise ConfigError(
            f"a model that is not functional must name its outputs as the labels: {', '.join(labels)}",
            got=Plain(f"a {type(outputs).__name__} of {len(outputs)} without names"),
            fix="Return a dict in its call: `return {NAME: ..., ...}`.",
        )


def make_step(
    built: BuiltModel,
    load: Callable[[Any], Batch],
    *,
    distribution: Distribution,
    settings: StepSettings,
) -> Callable[[Any], StepResult]:
    """Return Stoker's own step, or a step that calls the user's `train_step`; see `make_train_step`."""
    make = make_custom_train_step if has_custom_train_step(built.model) else make_train_step
    return make(built, load, distribution=distribution, settings=settings)


def make_custom_train_step(
    built: BuiltModel,
    load: Callable[[Any], Batch],
    *,
    distribution: Distribution,
    settings: StepSettings,
) -> Callable[[Any], StepResult]:
    """Return a step that calls the user's `train_step`. It differs from `make_train_step` in two points.

    It updates the weights before its loss is known, so a step that is not finite has changed them. The
    weights are checked after each step with `checks_before_update`, else at the end of a call.

    With several replicas, it works as in `fit`: `optimizer.apply` sums the gradients, so all replicas have
    equal weight, even if they have different numbers of rows of the last batch. A replica without rows
    uses rows of another replica.

    Args:
        built: The compiled model; its optimizer is built here, its metrics are built already.
        load: Converts an element, or a part of it, to a batch.
        distribution: Devices that share a step.
        settings: Settings that `check_custom_train_step` accepts.
    """
    model, strategy = built.model, distribution.strategy
    with strategy.scope():
        build_once(model)
    seeds = keras_seeds(strategy)

    def replica(element: Any) -> tf.Tensor:
        use_keras_seeds(seeds)
        first, rows = part_of_replica(
            rows_of(element), distribution, worker_rows_only=settings.worker_rows_only
        )
        last = tf.maximum(first + rows, 1)
        begin = tf.minimum(first, last - 1)
        batch = load(tf.nest.map_structure(lambda tensor: tensor[begin:last], element))
        with distinct_replica_seeds(distribution.replicas):
            logs = run_custom_step(model, "train_step", (built.adapt(batch[0]), *batch[1:]))
        if settings.average is not None:
            settings.average.update()
        loss, count = tf.cast(tf.reduce_mean(logs["loss"]), tf.float32), tf.cast(rows, tf.float32)
        signals = tf.constant([0, 0]) if settings.signals is None else settings.signals
        facts = tf.stack([loss * count, count, *tf.unstack(tf.cast(signals, tf.float32))])
        if not distribution.shares_batches:
            return facts
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, facts)

    @tf.autograph.experimental.do_not_convert
    def step(element: Any) -> StepResult:
        facts = strategy.experimental_local_results(strategy.run(replica, args=(element,)))[0]
        finite = tf.math.is_finite(facts[0])
        if settings.checks_before_update:
            with tf.control_dependencies([facts]):
                finite = tf.logical_and(finite, all_finite(model))
        return StepResult(facts[0], facts[1], finite, tf.cast(facts[2:], tf.int32))

    return step


def check_custom_train_step(
    model: keras.Model, config: TrainConfig, resolved: ResolvedTraining
) -> None:
    """Reject settings that only Stoker's own step supports, if the step is user-defined.

    Raises:
        ConfigError: A setting of `train` applies only to Stoker's own step; or an additional optimizer of
            the model is not built, so its variables would be created inside the compiled step.
    """
    of_ours = {
        "accumulate": resolved.accumulate > 1,
        "clip_norm": config.clip_norm is not None,
        "loss_scale": config.loss_scale != "auto",
        "xla": resolved.xla,
        "strategy: tpu": resolved.strategy == "tpu",
        "reduction_dtype": config.reduction_dtype != "float32",
        # Between workers, the strategy itself sends gradients in packs, so this setting has an effect.
        "reduction_bytes_per_pack": config.reduction_bytes_per_pack > 0
        and resolved.strategy == "mirrored",
    }
    wrong = [f"train.{name}" for name, is_set in of_ours.items() if is_set]
    kind = type(model).__name__
    if wrong:
        raise ConfigError(
            f"{kind}.train_step does its own backward pass, so settings for Stoker's own step have no effect "
            "and must be left out",
            got=Plain(" and ".join(wrong)),
            fix="Do this inside train_step, or override compute_loss in place of train_step.",
        )
    unbuilt = [name for name, each in extra_optimizers(model).items() if not each.built]
    if unbuilt:
        calls = "; ".join(
            f"model.{name}.build(model.{_trained_by(model, name)}trainable_variables)"
            for name in unbuilt
        )
        raise ConfigError(
            f"{' and '.join(f'{kind}.{name}' for name in unbuilt)} must be built before the first step",
            got=Plain("optimizers that are not built"),
            fix=f"Add to build, after compile, with the variables of each optimizer: {calls}",
        )
