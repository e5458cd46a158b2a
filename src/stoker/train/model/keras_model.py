"""Facts about a compiled Keras model: overridden methods, optimizers, weights and outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.autograph.impl.api import StagingError

from stoker.core.config import nearest
from stoker.core.errors import ConfigError, Plain, UserError
from stoker.core.multi_output import ONLY
from stoker.core.user_code import call

METHODS = ("train_step", "test_step", "compute_loss", "compute_metrics")
"""Keras's methods that a user's class may override and that `fit` then uses."""


def overrides(model: keras.Model) -> frozenset[str]:
    """Return those of `METHODS` that the user's class or instance overrides."""
    return frozenset(name for name in METHODS if _is_own(model, name))


def _is_own(model: keras.Model, name: str) -> bool:
    return name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name)


def extra_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Return optimizers of a model other than the compiled one, by attribute name.

    Keras counts their variables neither as the model's nor as the optimizer's, so checkpoints must
    include them separately.
    """
    return {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer) and value is not model.optimizer
    }


def has_builtin_metrics_only(model: keras.Model) -> bool:
    """Return whether XLA may compile the metrics with the step: all of them are Keras's own.

    Args:
        model: Compiled and built.
    """
    own = "compute_metrics" in overrides(model)
    metrics = [part for each in model.metrics for part in (each, *getattr(each, "metrics", ()))]
    parts = [part for metric in metrics for part in (type(metric), getattr(metric, "_fn", metric))]
    return not own and all(_module(part).partition(".")[0] == "keras" for part in parts)


def update_metrics(model: keras.Model, parts: Mapping[str, Any]) -> None:
    """Update a model's metrics without computing their results, unlike Keras's own method.

    Args:
        model: Compiled and built.
        parts: As for `compute_metrics`.
    """
    if _is_own(model, "compute_metrics") or _is_own(model, "get_metrics_result"):
        model.compute_metrics(**parts)
        return
    # The same as Keras's `compute_metrics`, without the results.
    metrics = model._compile_metrics  # noqa: SLF001 - Keras has no public one
    if metrics is not None:
        metrics.update_state(parts["y"], parts["y_pred"], parts.get("sample_weight"))


def has_builtin_optimizer(model: keras.Model) -> bool:
    """Return whether everything that an update writes is known: the optimizer is Keras's own."""
    outer = model.optimizer
    optimizers = (outer, getattr(outer, "inner_optimizer", outer))
    return all(_module(type(each)).partition(".")[0] == "keras" for each in optimizers)


def _module(part: Any) -> str:
    return str(getattr(part, "__module__", type(part).__module__))


def loss_of(model: keras.Model, parts: Mapping[str, Any], *, training: bool) -> tf.Tensor:
    """Return the model's loss, even if a user's `compute_loss` does not take `training`.

    Args:
        model: Compiled.
        parts: `x`, `y`, `y_pred`, and optionally `sample_weight`.
        training: Whether it is computed for a gradient.
    """
    return model._compute_loss(**parts, training=training)  # noqa: SLF001 - as Keras's steps do it


@tf.autograph.experimental.do_not_convert
def run_custom_step(
    model: keras.Model, method: str, batch: tuple[Any, ...]
) -> dict[str, tf.Tensor]:
    """Run an overridden `train_step` or `test_step` on a batch; works inside a `tf.function`.

    As in `fit`, AutoGraph does not convert the method. In a replica of a strategy it reduces its
    gradients itself, with `optimizer.apply`, and its logs are those of the replica.

    Args:
        model: Compiled and built, including its metrics: the first trace must not create variables.
        method: `train_step` or `test_step`.
        batch: The model's input, the labels, and optionally weights.

    Returns:
        The logs, flat. The method defines `loss`: in Keras's own methods it is the mean since the
        epoch started.

    Raises:
        ConfigError: It failed (the error shows the user's line), or its logs are not a dict with a
            `loss`.
    """
    what = f"{type(model).__name__}.{method}"
    logs = call(getattr(model, method), batch, what=what)
    flat = _flat(logs) if isinstance(logs, Mapping) else {}
    if "loss" not in flat:
        parts = " and ".join(name for name in flat if name.endswith("loss"))
        raise ConfigError(
            f"{what} must return a dict with a `loss`",
            got=Plain(", ".join(flat) or type(logs).__name__),
            fix=f"Add to it: 'loss', the sum of {parts}. Training ends where it is not finite."
            if parts
            else "E.g. `return {metric.name: metric.result() for metric in self.metrics}`.",
        )
    return flat


@contextmanager
def unwrap_user_errors() -> Iterator[None]:
    """Raise a UserError from inside a traced `tf.function` as it is.

    AutoGraph wraps it in an error of its own type.
    """
    try:
        yield
    except StagingError as error:
        within: BaseException | None = error
        while within is not None and not isinstance(within, UserError):
            within = within.__context__
        raise within or error from error


def with_class_weights(batch: tuple[Any, ...], weights: Mapping[int, float]) -> tuple[Any, ...]:
    """Multiply the sample weights of a batch by the weight of each sample's class.

    `fit` accepts either sample weights or class weights; here both are applied.

    Args:
        batch: Features, labels, and optionally sample weights [batch, ...].
        weights: Class -> weight; 1 for other classes.

    Raises:
        ConfigError: There are several outputs, or the labels are not classes.
    """
    features, labels, *own = batch
    by_row = class_weights(labels, weights)
    if own:
        given = tf.cast(own[0], by_row.dtype)
        by_row = given * tf.reshape(by_row, [-1] + [1] * (given.shape.rank - 1))
    return features, labels, by_row


def class_weights(labels: tf.Tensor, weights: Mapping[int, float]) -> tf.Tensor:
    """Return the weight of each label's class.

    Args:
        labels: Classes as numbers, [batch] or [batch, 1], or one-hot [batch, classes].
        weights: Class -> weight; 1 for other classes.

    Returns:
        [batch] float32.

    Raises:
        ConfigError: There are several outputs, labels are text or of a higher rank, or a weight is
            negative or not finite.

    Source: Keras, `Model.fit`, argument `class_weight`.
    """
    _check_class_weights(labels, weights)
    rank, classes = labels.shape.rank, labels.shape[-1]
    if rank == 2 and classes != 1:
        ids = tf.argmax(labels, axis=-1, output_type=tf.int64)
    else:
        rounded = tf.round(tf.cast(labels, tf.float64))
        ids = tf.cast(tf.reshape(rounded, [-1]), tf.int64)
    known = tf.constant(sorted(weights), tf.int64)
    values = tf.constant([weights[key] for key in sorted(weights)], tf.float32)
    nearest = tf.minimum(tf.searchsorted(known, ids), len(weights) - 1)
    return tf.where(tf.gather(known, nearest) == ids, tf.gather(values, nearest), 1.0)


def arrange_labels(labels: Mapping[str, Any], outputs: Any, *, names: Sequence[str]) -> Any:
    """Arrange labels by name in the structure of the model's outputs.

    Args:
        labels: Output name -> labels [batch, ...].
        outputs: The model's output, or its symbolic `output`: a tensor, a list, or a dict.
        names: The model's `output_names`; the keys of a dict take precedence.

    Returns:
        The argument `y` of `compute_loss` and `compute_metrics`.

    Raises:
        ConfigError: An output has no label, or a label has no output.
    """
    if isinstance(outputs, Mapping):
        names = list(outputs)
    elif not isinstance(outputs, list | tuple):
        names = names[:1] or ["output"]
    require_labels(labels, names)
    ordered = [labels[name] for name in names]
    if isinstance(outputs, Mapping):
        return dict(zip(names, ordered, strict=True))
    return type(outputs)(ordered) if isinstance(outputs, list | tuple) else ordered[0]


def require_labels(labels: Collection[str], outputs: Collection[str]) -> None:
    """Reject labels that do not match the model's outputs.

    Args:
        labels: The outputs that have one; `ONLY` for a label without a name.
        outputs: Names of the model's outputs.

    Raises:
        ConfigError: An output has no label, or a label no output; suggests the nearest one.
    """
    if set(labels) == set(outputs):
        return
    wrong = [name for name in labels if name not in outputs]
    free = [name for name in outputs if name not in labels]
    named = ", ".join(labels) if wrong != [ONLY] else "one label without an output's name"
    near = f" {nearest(wrong[0], free)}" if wrong and free and wrong != [ONLY] else ""
    raise ConfigError(
        f"label must name each of the model's outputs: {', '.join(outputs)}",
        got=Plain(named or "none"),
        fix="Write `label: {OUTPUT: COLUMN, ...}`; an output's name is that of its last layer,"
        f" or its key where the model returns a dict.{near}",
    )


def adapt_load(
    load: Callable[[Any], tuple[Any, ...]],
    model: keras.Model,
    *,
    class_weight: Mapping[int, float] | None = None,
) -> Callable[[Any], tuple[Any, ...]]:
    """Extend a feed's `load` so that labels and weights match the model's loss.

    load: Element -> features, label, and optionally weights.
        load: Element -> features, label, and weights where there are.
        model: Compiled.
        class_weight: Class -> weight.
    """

    def loaded(element: Any) -> tuple[Any, ...]:
        batch = load(element)
        if class_weight:
            batch = with_class_weights(batch, class_weight)
        return labels_for_outputs(batch, model)

    return loaded


def labels_for_outputs(batch: tuple[Any, ...], model: keras.Model) -> tuple[Any, ...]:
    """Give each output of a model its label, or the only label to all outputs.

    The label is not changed for a model with one output, with a user-defined `train_step` or
    `compute_loss`, or with unknown outputs, because it is not functional.

    Args:
        batch: Features, label [batch, ...] or one such label per output, and optionally sample
            weights.
        model: Compiled.

    Raises:
        ConfigError: An output has no label, or a label has no output.
    """
    if overrides(model) & {"train_step", "compute_loss"}:
        return batch
    features, labels, *weights = batch
    if isinstance(labels, Mapping):
        if outputs_of(model):
            labels = arrange_labels(labels, model.output, names=model.output_names)
    elif len(outputs_of(model)) > 1:
        labels = arrange_weights(labels, model.output)
    return features, labels, *(arrange_weights(weight, labels) for weight in weights)


def output_names(model: keras.Model) -> list[str]:
    """Return the output names of a functional model, in Keras's order; empty if unknown."""
    if not outputs_of(model):
        return []
    if isinstance(model.output, Mapping):
        # Keras flattens a dict in the order of its sorted keys.
        return list(keras.tree.flatten({name: name for name in model.output}))
    return list(model.output_names)


def outputs_of(model: keras.Model) -> list[Any]:
    """Return the symbolic outputs; empty if the model is not functional."""
    return list(getattr(model, "outputs", None) or [])


def arrange_weights(weights: Any, labels: Any) -> Any:
    """Arrange sample weights in the structure of the labels: equal for every output, as in `fit`.

    Args:
        weights: [batch], or one per output already.
        labels: From `arrange_labels`.
    """
    if keras.tree.is_nested(weights):
        return weights
    return keras.tree.map_structure(lambda _: weights, labels)


def _check_class_weights(labels: Any, weights: Mapping[int, float]) -> None:
    if keras.tree.is_nested(labels):
        raise ConfigError(
            "train.class_weight needs a model with one output",
            got=Plain(f"{len(keras.tree.flatten(labels))} outputs"),
            fix="Weight the rows of each output with train.sample_weight.",
        )
    wrong = {key: value for key, value in weights.items() if not 0 <= value < math.inf}
    if wrong or not weights:
        raise ConfigError("train.class_weight must be classes with weights of 0 or more", got=wrong)
    if labels.dtype == tf.string or labels.shape.rank not in (1, 2):
        raise ConfigError(
            "train.class_weight needs labels that are classes: numbers or one-hot",
            got=Plain(f"{labels.dtype.name} of shape {labels.shape}"),
            fix="Convert them to ids in preprocessing_fn.",
        )


def _flat(logs: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat |= _flat(value) if isinstance(value, Mapping) else {name: value}
    return flat
