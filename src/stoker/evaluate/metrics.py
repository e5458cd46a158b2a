"""The metrics: exact, computed over all rows at once; an undefined metric has a reason instead of NaN."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import ConfigError, Plain
from stoker.core.multi_output import of_output
from stoker.evaluate.task import Examples, FloatArray, Kind, Task

Direction = Literal["higher", "lower", "neither"]

PROBABILITY_FLOOR = 1e-7
"""Minimum probability whose logarithm is taken: Keras's epsilon, about the spacing of float32 at 1.
Source: `keras.config.epsilon`."""

_PROBABILITY_SLACK = 1e-3
"""How far a probability may be outside 0..1: the rounding error of bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Undefined:
    """A metric that is undefined for these rows."""

    reason: str
    """Why it is undefined, e.g. `no row has the label 1`."""


MetricValue = float | Undefined


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric: its computation, its tasks, and whether higher or lower is better."""

    compute: Callable[[Examples], MetricValue]
    """Computes the metric. There must be at least one row, and all labels and predictions must be finite."""

    tasks: tuple[Kind, ...]
    """Tasks for which it is defined. A multiclass model with two output columns also gets the metrics of
    binary tasks."""

    direction: Direction
    """Whether higher or lower values are better, or neither."""

    reads: Literal["scores", "classes", "probabilities", "values"]
    """The part of a prediction that it uses."""


def measure(name: str, examples: Examples) -> MetricValue:
    """Compute one metric.

    Args:
        name: One of `METRICS`.
        examples: The rows.

    Returns:
        A finite number, or why it is undefined.
    """
    metric = METRICS[name]
    reason = _why_undefined(name, metric, examples)
    if reason:
        return Undefined(reason=reason)
    with np.errstate(all="ignore"):
        value = metric.compute(examples)
    if isinstance(value, Undefined):
        return value
    if not np.isfinite(value):
        return Undefined(reason="the result is too large for a number")
    return float(value)


def measure_all(names: Iterable[str], outputs: Mapping[str, Examples]) -> dict[str, MetricValue]:
    """Compute several metrics, each once, in the order of `names`.

    Args:
        names: Each is one of `metrics_of(outputs)`.
        outputs: The rows by output.
    """
    known = metrics_of(outputs)
    found = {name: known[name] for name in dict.fromkeys(names)}
    return {name: measure(metric, outputs[output]) for name, (output, metric) in found.items()}


def metrics_of(outputs: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Name of every metric (with several outputs `{output}_{metric}`) -> output and metric.

    Raises:
        ConfigError: two metrics would have the same name.
    """
    found: dict[str, tuple[str, str]] = {}
    for output, metric in itertools.product(outputs, METRICS):
        name = of_output(output, metric)
        if name in found:
            raise ConfigError(
                f"the names of outputs must not give two metrics the name {name}",
                got=Plain(f"outputs {found[name][0]!r} and {output!r}"),
                fix="Give one of the outputs' layers another name.",
            )
        found[name] = output, metric
    return found


def better_direction(name: str) -> Direction | None:
    """Whether higher or lower is better for a metric of any output; None if no metric has the name.

    The name may end with the names of several metrics (`top_5_accuracy`, `accuracy`): these have the same direction.
    """
    ends = (metric for ending, metric in METRICS.items() if f"_{name}".endswith(f"_{ending}"))
    metric = next(ends, None)
    return None if metric is None else metric.direction


def default_metrics(task: Task) -> tuple[str, ...]:
    """The default metrics of a task, the main one first."""
    if task.kind == "regression":
        return ("rmse", "mae", "r2", "mean_label", "mean_prediction")
    if task.kind == "multilabel":
        return (
            *("macro_auc", "micro_auc", "macro_auc_pr", "macro_f1", "micro_f1"),
            *("macro_precision", "micro_precision", "macro_recall", "micro_recall"),
            *("subset_accuracy", "hamming_loss", "log_loss"),
        )
    if task.classes == 2:
        return (
            *("auc", "accuracy", "auc_pr", "precision", "recall", "f1", "log_loss"),
            *("mean_label", "mean_prediction"),
        )
    top = ("top_5_accuracy",) if task.classes > _TOP else ()
    return ("accuracy", *top, "macro_f1", "log_loss")


def applies(metric: Metric, task: Task) -> bool:
    """Whether a metric is defined for a task."""
    return task.kind in metric.tasks or (task.two_classes and "binary" in metric.tasks)


def metrics_of_labels(task: Task) -> tuple[str, ...]:
    """The default metrics of each label; none for more than `LABELS_MEASURED` labels."""
    if task.kind != "multilabel" or task.classes > LABELS_MEASURED:
        return ()
    names = ("precision", "recall", "f1", "auc")
    return tuple(of_label(label, name) for label in range(task.classes) for name in names)


def by_label(outputs: Mapping[str, Examples]) -> dict[str, Examples]:
    """The outputs, plus each label of multi-label outputs as an output of its own."""
    found = dict(outputs)
    for output, examples in outputs.items():
        if examples.task.kind == "multilabel":
            for label in range(examples.task.classes):
                found[of_output(output, of_label(label))] = examples.of_label(label)
    return found


def of_label(label: int, metric: str = "") -> str:
    """The name of a label, or of one of its metrics; `label` is its index in the row."""
    return f"label_{label}_{metric}" if metric else f"label_{label}"


def without_label(name: str) -> str:
    """Remove the label from a metric's name: the result names the metric over all labels of the output."""
    return re.sub(r"(^|_)label_\d+_", r"\1", name, count=1)


def is_of_label(name: str) -> bool:
    """Whether a metric belongs to a single label."""
    return without_label(name) != name


LABELS_MEASURED = 20
"""Maximum number of labels for which each label has default metrics of its own."""


def predicted_ids(examples: Examples) -> NDArray[np.int64]:
    """[rows] the predicted class. One column: 1 if above 0.5, else 0; several: index of the largest column.

    For a multi-label task, [rows, labels]: 1 for each label above 0.5, else 0.
    """
    if examples.predictions.ndim == 1 or examples.task.kind == "multilabel":
        return (examples.predictions > 0.5).astype(np.int64)
    return examples.predictions.argmax(axis=1).astype(np.int64)


def probability_of_one(examples: Examples) -> FloatArray:
    """[rows] the probability of class 1, or the predicted value."""
    two_columns = examples.predictions.ndim == 2 and examples.task.two_classes
    return examples.predictions[:, 1] if two_columns else examples.predictions


def _why_undefined(name: str, metric: Metric, examples: Examples) -> str:
    task = examples.task
    if not applies(metric, task):
        others = [other for other in default_metrics(task) if other.endswith(f"_{name}")]
        fix = f" (use {' or '.join(others)})" if others else ""
        return (
            f"{name} is for {' or '.join(metric.tasks)} models, and this model is "
            f"{task.described}{fix}"
        )
    if not examples.rows:
        return "there are no rows"
    invalid = int((~examples.finite).sum())
    if invalid:
        return f"NaN or infinite predictions or labels in {invalid} of {examples.rows} rows"
    if _needs_probabilities(metric, examples) and not _are_probabilities(examples.predictions):
        return (
            "predictions outside 0..1 are not probabilities "
            "(compile the loss with from_logits=True if they are logits)"
        )
    return ""


def _needs_probabilities(metric: Metric, examples: Examples) -> bool:
    if examples.task.kind == "regression":
        return False
    per_column = examples.predictions.ndim == 1 or examples.task.kind == "multilabel"
    by_threshold = metric.reads == "classes" and per_column
    return by_threshold or metric.reads == "probabilities"


def _are_probabilities(predictions: FloatArray) -> bool:
    return bool(
        predictions.min() >= -_PROBABILITY_SLACK and predictions.max() <= 1.0 + _PROBABILITY_SLACK
    )


def _accuracy(examples: Examples) -> MetricValue:
    return float((predicted_ids(examples) == examples.labels).mean())


def _auc(examples: Examples) -> MetricValue:
    """The share of (positive, negative) pairs in the right order; a tie counts half.

    Source: Mann-Whitney U; Fawcett, An introduction to ROC analysis (2006).
    """
    positive = examples.labels == 1
    n1 = int(positive.sum())
    n0 = examples.rows - n1
    if not n1 or not n0:
        return Undefined(reason=f"all {examples.rows} rows have the label {1 if n1 else 0}")
    _, place, counts = np.unique(examples.scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[place]
    return float((ranks[positive].sum() - n1 * (n1 + 1) / 2.0) / (n1 * n0))


def _average_precision(examples: Examples) -> MetricValue:
    """Precision at each distinct score, weighted by the increase of recall.

    It does not interpolate, which would overestimate. Source: scikit-learn, `average_precision_score`.
    """
    positives = float((examples.labels == 1).sum())
    if not positives:
        return Undefined(reason=f"none of the {examples.rows} rows has the label 1")
    order = np.argsort(-examples.scores, kind="stable")
    scores = examples.scores[order]
    last_of_tie = np.append(np.diff(scores) != 0, True)
    hits = np.cumsum(examples.labels[order] == 1)[last_of_tie]
    ranks = (np.arange(len(scores)) + 1)[last_of_tie]
    recall_added = np.diff(hits, prepend=0) / positives
    return float((hits / ranks * recall_added).sum())


def _counts(examples: Examples) -> tuple[int, int, int]:
    """Number of true positives, of rows predicted positive, and of rows labeled positive."""
    predicted, true = predicted_ids(examples) == 1, examples.labels == 1
    return int((predicted & true).sum()), int(predicted.sum()), int(true.sum())


def _precision(examples: Examples) -> MetricValue:
    hits, predicted, _ = _counts(examples)
    return hits / predicted if predicted else Undefined(reason="no row is predicted as class 1")


def _recall(examples: Examples) -> MetricValue:
    hits, _, true = _counts(examples)
    return hits / true if true else Undefined(reason="no row has the label 1")


def _f1(examples: Examples) -> MetricValue:
    hits, predicted, true = _counts(examples)
    if not predicted + true:
        return Undefined(reason="no row has the label 1 and none is predicted as class 1")
    return 2.0 * hits / (predicted + true)


def _micro(compute: Callable[[Examples], MetricValue]) -> Callable[[Examples], MetricValue]:
    """A binary metric over all labels of all rows."""

    def over_all(examples: Examples) -> MetricValue:
        value = compute(examples.flat())
        if isinstance(value, Undefined):
            return Undefined(reason=f"if each label of each row counts as a row, {value.reason}")
        return value

    return over_all


def _macro(compute: Callable[[Examples], MetricValue]) -> Callable[[Examples], MetricValue]:
    """The unweighted mean of a binary metric over the labels for which it is defined.

    Source: scikit-learn, `average="macro"` with `zero_division=numpy.nan`.
    """

    def over_labels(examples: Examples) -> MetricValue:
        values = [compute(examples.of_label(label)) for label in range(examples.task.classes)]
        defined = [value for value in values if not isinstance(value, Undefined)]
        if not defined:
            return Undefined(reason="it is undefined for every label in these rows")
        return float(np.mean(defined))

    return over_labels


def _subset_accuracy(examples: Examples) -> MetricValue:
    """Share of rows whose labels are all correct."""
    return float((predicted_ids(examples) == examples.labels).all(axis=1).mean())


def _hamming_loss(examples: Examples) -> MetricValue:
    """Share of wrong labels among all labels of all rows."""
    return float((predicted_ids(examples) != examples.labels).mean())


def _macro_f1(examples: Examples) -> MetricValue:
    """The unweighted mean of F1 over the classes that occur as label or prediction."""
    if examples.task.kind == "multilabel":
        return _macro(_f1)(examples)
    predicted, true = predicted_ids(examples), examples.labels.astype(np.int64)
    size = examples.task.classes
    hits = np.bincount(true[predicted == true], minlength=size)
    both = np.bincount(predicted, minlength=size) + np.bincount(true, minlength=size)
    occurs = both > 0
    return float((2.0 * hits[occurs] / both[occurs]).mean())


def _log_loss(examples: Examples) -> MetricValue:
    """The mean over rows, and over the labels of each row, as in Keras."""
    ids = examples.labels.astype(np.int64)
    if examples.predictions.ndim == 1 or examples.task.kind == "multilabel":
        of_label = np.where(ids == 1, examples.predictions, 1.0 - examples.predictions)
    else:
        total = examples.predictions.sum(axis=1)
        of_label = examples.predictions[np.arange(len(ids)), ids] / total
    return float(-np.log(np.clip(of_label, PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)).mean())


_TOP = 5
"""Number of classes with the largest predictions in which `top_5_accuracy` looks for the label."""


def _top_5_accuracy(examples: Examples) -> MetricValue:
    """Share of rows whose label is among the five largest predictions.

    If several classes are tied for the last of these five places, each counts in part; otherwise a constant model
    would get 100 %.
    """
    if examples.task.classes <= _TOP:
        return Undefined(reason=f"with {examples.task.classes} classes it is always 1")
    ids = examples.labels.astype(np.int64)
    of_label = examples.predictions[np.arange(len(ids)), ids][:, None]
    above = (examples.predictions > of_label).sum(axis=1)
    tied = (examples.predictions == of_label).sum(axis=1)
    return float(np.clip((_TOP - above) / tied, 0.0, 1.0).mean())


def _error(examples: Examples) -> FloatArray:
    return examples.predictions - examples.labels


def _mae(examples: Examples) -> MetricValue:
    return float(np.abs(_error(examples)).mean())


def _mse(examples: Examples) -> MetricValue:
    return float(np.square(_error(examples)).mean())


def _rmse(examples: Examples) -> MetricValue:
    return float(np.sqrt(np.square(_error(examples)).mean()))


def _r2(examples: Examples) -> MetricValue:
    """1 - squared error / squared deviation of the labels, averaged over the outputs."""
    spread = np.square(examples.labels - examples.labels.mean(axis=0)).sum(axis=0)
    if not np.all(spread > 0):
        return Undefined(reason=f"all {examples.rows} labels are equal")
    return float((1.0 - np.square(_error(examples)).sum(axis=0) / spread).mean())


def _mean_label(examples: Examples) -> MetricValue:
    return float(examples.labels.mean())


def _mean_prediction(examples: Examples) -> MetricValue:
    return float(probability_of_one(examples).mean())


def _calibration(examples: Examples) -> MetricValue:
    """Mean prediction / mean label: 1 if the model is right on average.

    Source: TensorFlow Model Analysis, `tfma.metrics.Calibration`.
    """
    mean_label = float(examples.labels.mean())
    if mean_label == 0.0:
        return Undefined(reason="the mean label is 0")
    return float(probability_of_one(examples).mean()) / mean_label


def _metric(
    compute: Callable[[Examples], MetricValue],
    *tasks: Kind,
    direction: Direction = "higher",
    reads: Literal["scores", "classes", "probabilities", "values"],
) -> Metric:
    return Metric(compute=compute, tasks=tasks, direction=direction, reads=reads)


_AVERAGE_PRECISION = _metric(_average_precision, "binary", reads="scores")
_MEAN: dict[str, Any] = {"direction": "neither", "reads": "probabilities"}

METRICS: dict[str, Metric] = {
    "accuracy": _metric(_accuracy, "binary", "multiclass", reads="classes"),
    "auc": _metric(_auc, "binary", reads="scores"),
    "auc_pr": _AVERAGE_PRECISION,
    "average_precision": _AVERAGE_PRECISION,
    "precision": _metric(_precision, "binary", reads="classes"),
    "recall": _metric(_recall, "binary", reads="classes"),
    "f1": _metric(_f1, "binary", reads="classes"),
    "macro_f1": _metric(_macro_f1, "binary", "multiclass", "multilabel", reads="classes"),
    "top_5_accuracy": _metric(_top_5_accuracy, "multiclass", reads="scores"),
    "log_loss": _metric(
        *(_log_loss, "binary", "multiclass", "multilabel"),
        direction="lower",
        reads="probabilities",
    ),
    "macro_auc": _metric(_macro(_auc), "multilabel", reads="scores"),
    "micro_auc": _metric(_micro(_auc), "multilabel", reads="scores"),
    "macro_auc_pr": _metric(_macro(_average_precision), "multilabel", reads="scores"),
    "micro_auc_pr": _metric(_micro(_average_precision), "multilabel", reads="scores"),
    "macro_precision": _metric(_macro(_precision), "multilabel", reads="classes"),
    "micro_precision": _metric(_micro(_precision), "multilabel", reads="classes"),
    "macro_recall": _metric(_macro(_recall), "multilabel", reads="classes"),
    "micro_recall": _metric(_micro(_recall), "multilabel", reads="classes"),
    "micro_f1": _metric(_micro(_f1), "multilabel", reads="classes"),
    "subset_accuracy": _metric(_subset_accuracy, "multilabel", reads="classes"),
    "hamming_loss": _metric(_hamming_loss, "multilabel", direction="lower", reads="classes"),
    "mae": _metric(_mae, "regression", direction="lower", reads="values"),
    "mse": _metric(_mse, "regression", direction="lower", reads="values"),
    "rmse": _metric(_rmse, "regression", direction="lower", reads="values"),
    "r2": _metric(_r2, "regression", reads="values"),
    "mean_label": _metric(_mean_label, "binary", "regression", **_MEAN),
    "mean_prediction": _metric(_mean_prediction, "binary", "regression", **_MEAN),
    "calibration": _metric(_calibration, "binary", "regression", **_MEAN),
}
"""Name in `evaluate.metrics` -> metric."""
