"""Facts about a compiled Keras model: overridden methods, optimizers, weights and outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from stoker.core.config import nearest
from stoker.core.errors import ConfigError, Plain, UserError
from stoker.core.multi_output import ONLY
from stoker.core.user_code import call
from stoker.internals.keras_internals import (
    compiled_metrics,
    metric_function,
    sublayers,
    user_metrics,
)
from stoker.internals.tensorflow_internals import StagingError

METHODS = ("train_step", "test_step", "compute_loss", "compute_metrics")
"""Methods of Keras that a user's class may override; `fit` then calls the user's method."""


def overrides(model: keras.Model) -> frozenset[str]:
    """Return which of `METHODS` the user's class or instance overrides."""
    return frozenset(name for name in METHODS if _is_own(model, name))


def _is_own(model: keras.Model, name: str) -> bool:
    return name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name)


def extra_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """Return attribute name -> optimizer, for all optimizers of a model but the compiled one.

    Keras does not list their variables, neither in the model nor in the compiled optimizer, so
    checkpoints must include them separately.
    """
    return {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer) and value is not model.optimizer
    }


def has_builtin_metrics_only(model: keras.Model) -> bool:
    """Return whether all metrics are Keras's own, so that XLA may compile them with the step.

    Args:
        model: The compiled and built model.
    """
    own = "compute_metrics" in overrides(model)
    metrics = [part for each in model.metrics for part in (each, *getattr(each, "metrics", ()))]
    parts = [part for metric in metrics for part in (type(metric), metric_function(metric))]
    return not own and all(_module(part).partition(".")[0] == "keras" for part in parts)


def update_metrics(model: keras.Model, parts: Mapping[str, Any]) -> None:
    """Update a model's metrics without computing their results, which Keras's own method would do.

    Args:
        model: The compiled and built model.
        parts: The arguments of `compute_metrics`.
    """
    if _is_own(model, "compute_metrics") or _is_own(model, "get_metrics_result"):
        model.compute_metrics(**parts)
        return
    # This is Keras's `compute_metrics` without its last line, which computes the results.
    metrics = compiled_metrics(model)
    if metrics is not None:
        metrics.update_state(parts["y"], parts["y_pred"], parts.get("sample_weight"))


def is_weighted_metric(model: keras.Model, monitor: str) -> bool:
    """Return whether a validation metric counts each row by its weight.

    It works before Keras has built the metrics. A user-defined `test_step` gets no class weights.

    Args:
        model: The compiled model.
        monitor: The metric's name, with `val_`.
    """
    metrics = compiled_metrics(model)
    if metrics is None or "test_step" in overrides(model):
        return False
    name = monitor.removeprefix("val_")
    plain, weighted = (
        {_metric_name(metric) for metric in keras.tree.flatten(given or [])}
        for given in user_metrics(metrics)
    )
    # Keras adds a prefix to the name of a weighted metric if an unweighted one has the same name.
    if name.removeprefix("weighted_") in plain & weighted:
        return name.startswith("weighted_")
    return any(name == each or name.endswith(f"_{each}") for each in weighted)


def _metric_name(metric: Any) -> str:
    return str(getattr(metric, "name", None) or getattr(metric, "__name__", None) or metric)


def has_builtin_optimizer(model: keras.Model) -> bool:
    """Return whether the optimizer is Keras's own, so that it is known what an update writes."""
    outer = model.optimizer
    optimizers = (outer, getattr(outer, "inner_optimizer", outer))
    return all(_module(type(each)).partition(".")[0] == "keras" for each in optimizers)


def _module(part: Any) -> str:
    return str(getattr(part, "__module__", type(part).__module__))


@tf.autograph.experimental.do_not_convert
def run_custom_step(
    model: keras.Model, method: str, batch: tuple[Any, ...]
) -> dict[str, tf.Tensor]:
    """Run an overridden `train_step` or `test_step` on a batch; works inside a `tf.function`.

    As in `fit`, AutoGraph does not convert the method. In a replica of a strategy, the method itself
    reduces the gradients, with `optimizer.apply`, and its logs are the replica's logs.

    Args:
        model: The compiled and built model; its metrics are built too, because the first trace must not
            create variables.
        method: `train_step` or `test_step`.
        batch: The model's input, the labels, and optionally weights.

    Returns:
        The logs, flat. The method decides what `loss` is; in Keras's own methods, it is the mean since
        the epoch started.

    Raises:
        ConfigError: The method failed (the error shows the user's line), or its logs are not a dict with
            a `loss`.
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
    """Raise the original UserError if the block traces a `tf.function` that raises one.

    AutoGraph would wrap it in an error of its own type.
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
        labels: The outputs that have a label; `ONLY` for a label without a name.
        outputs: Names of the model's outputs.

    Raises:
        ConfigError: An output has no label, or a label has no output; the error suggests a similar name.
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

    Args:
        load: Element -> features, label, and optionally weights.
        model: The compiled model.
        class_weight: Class -> weight; None: no class weights.
    """

    def loaded(element: Any) -> tuple[Any, ...]:
        batch = load(element)
        if class_weight:
            batch = with_class_weights(batch, class_weight)
        return labels_for_outputs(batch, model)

    return loaded


def labels_for_outputs(batch: tuple[Any, ...], model: keras.Model) -> tuple[Any, ...]:
    """Give each output of a model its label, or all outputs the only label.

    The label is not changed for a model that has a single output, a user-defined `train_step` or
    `compute_loss`, or unknown outputs because it is not functional.

    Args:
        batch: Features, label [batch, ...] or such a label for each output, and optionally sample
            weights.
        model: The compiled model.

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
        # Keras flattens a dict in the sorted order of its keys.
        return list(keras.tree.flatten({name: name for name in model.output}))
    return list(model.output_names)


def outputs_of(model: keras.Model) -> list[Any]:
    """Return the symbolic outputs of a model; empty if it is not functional."""
    return list(getattr(model, "outputs", None) or [])


def arrange_weights(weights: Any, labels: Any) -> Any:
    """Arrange sample weights in the structure of the labels: the same for every output, as in `fit`.

    Args:
        weights: [batch] weights, or already such weights for each output.
        labels: The result of `arrange_labels`.
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
        raise ConfigError("train.class_weight must map classes to weights of 0 or more", got=wrong)
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


def layer_types(model: keras.Model) -> dict[str, str]:
    """Return path -> class name, for every layer in a model."""
    return {path: type(layer).__name__ for path, layer in walk_layers(model)}


def walk_layers(model: keras.Model) -> Iterator[tuple[str, keras.Layer]]:
    """Yield each layer inside a model once, with its path; outer layers come before inner ones.

    Args:
        model: A functional, Sequential or subclassed model; its layers may be models.

    Yields:
        The path, e.g. `block1/attention`, and the layer. A layer that is used in two places has the path
        of the first one.
    """
    seen = {id(model)}
    waiting = [("", model)]
    while waiting:
        above, outer = waiting.pop()
        below = []
        for layer in sublayers(outer):
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            path = f"{above}{layer.name}"
            yield path, layer
            below.append((f"{path}/", layer))
        waiting.extend(reversed(below))
