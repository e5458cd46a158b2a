"""A step that the user's own `train_step` makes: it runs forward, backward and the update itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from stoker.core.errors import ConfigError, Plain
from stoker.train.checkpoints.seeds import distinct_replica_seeds, keras_seeds, use_keras_seeds
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.model.keras_model import (
    extra_optimizers,
    loss_of,
    overrides,
    require_labels,
    run_custom_step,
)
from stoker.train.optimizer.deferred_finite_check import all_finite
from stoker.train.optimizer.loss_scaling import build_once
from stoker.train.setup.build_model import BuiltModel
from stoker.train.setup.strategy import Distribution
from stoker.train.step.step import (
    Batch,
    StepSettings,
    loss_arguments,
    make_train_step,
    part_of_replica,
    rows_of,
)
from stoker.train.step.step_totals import StepResult


def has_custom_train_step(model: keras.Model) -> bool:
    """Whether the model's `train_step` is the user's."""
    return "train_step" in overrides(model)


def _trained_by(model: keras.Model, optimizer: str) -> str:
    """The part of a model that an optimizer most likely trains, by their first letters."""
    parts = [
        name
        for name, value in vars(model).items()
        if isinstance(value, keras.layers.Layer) and value.trainable_variables
    ]
    alike = [name for name in parts if name[0] == optimizer[0]]
    return f"{(alike or parts)[0]}." if parts else ""


def first_pass(built: BuiltModel, batch: Batch) -> Any:
    """Make all that a step changes, in the strategy's scope: what is traced must not make variables.

    Args:
        built: The compiled model.
        batch: As the model takes it.

    Returns:
        The model's answers.
    """
    model, features = built.model, built.adapt(batch[0])
    outputs = model(features, training=False)
    if isinstance(batch[1], Mapping) and isinstance(outputs, Mapping):
        require_labels(batch[1], outputs)
    elif isinstance(batch[1], Mapping) and not overrides(model) & {"train_step", "compute_loss"}:
        _require_names(batch[1], outputs)
    if has_custom_train_step(model):
        # What `fit` makes before a step that is the user's: nobody else knows what it needs.
        batch_of_fit = (features, *batch[1:])
        model._symbolic_build(data_batch=batch_of_fit)  # noqa: SLF001 - Keras has no public one
    else:
        loss_of(model, loss_arguments(batch, outputs), training=False)
        model.compute_metrics(**loss_arguments(batch, outputs))
    model.reset_metrics()
    return outputs


def _require_names(labels: Mapping[str, Any], outputs: Any) -> None:
    if isinstance(outputs, (list, tuple)):
        raise ConfigError(
            f"a model that is no graph of layers must name its outputs as the labels are: {', '.join(labels)}",
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
    """Stoker's step, or the one that the user's `train_step` makes; see `make_train_step`."""
    make = make_custom_train_step if has_custom_train_step(built.model) else make_train_step
    return make(built, load, distribution=distribution, settings=settings)


def make_custom_train_step(
    built: BuiltModel,
    load: Callable[[Any], Batch],
    *,
    distribution: Distribution,
    settings: StepSettings,
) -> Callable[[Any], StepResult]:
    """A step by the user's `train_step`, with what `make_train_step` promises of a step, but this.

    It updates before its loss is known: a step that is not finite has changed the weights, which are
    looked at behind each step where `settings.checks_before_update`, else when a call ends. Over
    several replicas it is as in `fit`: `optimizer.apply` sums the gradients, so that replicas count
    alike, also where the last batch is shared unevenly; a replica without rows sees one of others.

    Args:
        built: The compiled model; its optimizer is built here, its metrics are already.
        load: The feed's way from an element, or a part of it, to a batch.
        distribution: Over what it is spread.
        settings: How it is made; of those that `check_custom_train_step` lets pass.
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
    """Refuse what Stoker does inside a step, where the step is the user's.

    Raises:
        ConfigError: a setting of `train` is Stoker's step's, or an optimizer of the model's own is
            not built: its variables would be made inside the compiled step.
    """
    of_ours = {
        "accumulate": resolved.accumulate > 1,
        "clip_norm": config.clip_norm is not None,
        "loss_scale": config.loss_scale != "auto",
        "xla": resolved.xla,
        "strategy: tpu": resolved.strategy == "tpu",
        "reduction_dtype": config.reduction_dtype != "float32",
        # Between workers the strategy itself sends in packs.
        "reduction_bytes_per_pack": config.reduction_bytes_per_pack > 0
        and resolved.strategy == "mirrored",
    }
    wrong = [f"train.{name}" for name, is_set in of_ours.items() if is_set]
    kind = type(model).__name__
    if wrong:
        raise ConfigError(
            f"{kind}.train_step does its own backward pass: a setting of Stoker's must be left out",
            got=Plain(" and ".join(wrong)),
            fix="Do it inside train_step, or override compute_loss instead of it.",
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
            fix=f"Add to build, after compile, with the variables that each trains: {calls}",
        )
