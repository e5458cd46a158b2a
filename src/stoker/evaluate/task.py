"""The task of a model, and its labels and predictions in the form that every metric takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import ConfigError, DataError, Plain

Kind = Literal["binary", "multiclass", "multilabel", "regression"]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What an output of the model predicts."""

    kind: Kind
    """`binary`: one column, the probability of class 1. `multiclass`: one column per class, one class
    per row. `multilabel`: one column per label, any number of labels per row. `regression`: numbers."""

    classes: int
    """Number of classes or labels: 2 for `binary`, 0 for `regression`."""

    from_logits: bool = False
    """Whether the output is a logit: sigmoid or softmax not yet applied."""

    @property
    def two_classes(self) -> bool:
        """Whether a row has one of two classes."""
        return self.classes == 2 and self.kind != "multilabel"

    @property
    def described(self) -> str:
        """The kind and the number of classes as text."""
        what = "labels" if self.kind == "multilabel" else "classes"
        return f"{self.kind}, {self.classes} {what}" if self.classes else self.kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """Labels and predictions in the form that every metric takes."""

    task: Task
    """Task of the output."""

    labels: FloatArray
    """[rows] class ids, or values of a regression; [rows, k] values of a regression with k outputs, or 0 and 1
    for k labels per row."""

    predictions: FloatArray
    """[rows] probability of class 1, or value of a regression; [rows, k] probability of each class or label, or k
    values."""

    scores: FloatArray
    """[rows] the higher the number, the more likely is class 1; [rows, k] the same for each of k labels. They are
    logits if available, because the sigmoids of large logits are rounded to the same number. Empty for a regression
    and for more than two classes."""

    finite: NDArray[np.bool_]
    """[rows] whether label and prediction are finite numbers."""

    @property
    def rows(self) -> int:
        """Number of examples."""
        return len(self.labels)

    def take(self, rows: NDArray[Any]) -> Examples:
        """Some of the examples, by index or by mask."""
        return Examples(
            task=self.task,
            labels=self.labels[rows],
            predictions=self.predictions[rows],
            scores=self.scores[rows] if self.scores.size else self.scores,
            finite=self.finite[rows],
        )

    def of_label(self, label: int) -> Examples:
        """One label of a multi-label task as a binary task."""
        return self._as_binary(lambda values: values[:, label], finite=self.finite)

    def flat(self) -> Examples:
        """All labels of all rows as the rows of one binary task."""
        finite = np.repeat(self.finite, self.task.classes)
        return self._as_binary(lambda values: values.reshape(-1), finite=finite)

    def _as_binary(
        self, part: Callable[[FloatArray], FloatArray], *, finite: NDArray[np.bool_]
    ) -> Examples:
        return Examples(
            task=Task(kind="binary", classes=2),
            labels=part(self.labels),
            predictions=part(self.predictions),
            scores=part(self.scores),
            finite=finite,
        )


def infer_task(
    labels: NDArray[Any],
    prediction_shape: Sequence[int],
    *,
    from_logits: bool = False,
    multi_hot: bool = False,
    one_class: bool = False,
) -> Task:
    """Infer the task from labels and output shape.

    Args:
        labels: [rows], [rows, 1] or one-hot [rows, k]; any numeric dtype. NaN is ignored.
        prediction_shape: [rows], [rows, 1] or [rows, k].
        from_logits: The loss was compiled with `from_logits=True`.
        multi_hot: At least one row of the whole dataset has no class or several classes; such a row need not be
            among these rows.
        one_class: The model is trained for exactly one class per row, so its outputs are classes, not labels.

    Returns:
        multiclass: k > 1 outputs, and class ids or one-hot labels; multilabel: k > 1 outputs, and labels of 0
        and 1 with any number of ones per row; binary: one output, and labels of 0 and 1; otherwise: regression.

    Raises:
        ConfigError: the output has another rank; or `one_class`, and a row does not have exactly one class.
        DataError: labels and outputs do not match.
    """
    outputs = _outputs(prediction_shape)
    values = _numbers(labels)
    if outputs == 1:
        return _one_output(values, from_logits=from_logits)
    if values.ndim == 1:
        _require_class_ids(values[np.isfinite(values)], outputs)
        return Task(kind="multiclass", classes=outputs, from_logits=from_logits)
    task = _many_labels(values, outputs, from_logits=from_logits)
    if task.kind == "multilabel" and one_class:
        _refuse_several(values)
    if task.kind == "multiclass" and multi_hot and not one_class:
        return replace(task, kind="multilabel")
    return task


def pair(labels: NDArray[Any], predictions: NDArray[Any], *, task: Task) -> Examples:
    """Convert labels and predictions to the form that every metric takes.

    Args:
        labels: [rows], [rows, 1], or one-hot or multi-hot [rows, k].
        predictions: [rows], [rows, 1] or [rows, k].
        task: Their task.

    Raises:
        DataError: the numbers of rows differ, or a label is not a class of the model.
    """
    values, raw = _numbers(labels), _numbers(predictions)
    if len(values) != len(raw):
        raise DataError(
            "the model must give one prediction for each row",
            got=Plain(f"{len(raw)} predictions for {len(values)} rows"),
            fix="Let the model keep the batch dimension of its inputs.",
        )
    _require_shapes(values, raw, task)
    finite = _finite_rows(values) & _finite_rows(raw)
    if task.kind == "multiclass" and values.ndim == 2:
        values = _argmax_labels(values)
    if task.kind != "regression":
        classes = 2 if task.kind == "multilabel" else task.classes
        _require_class_ids(values[np.isfinite(values)], classes)
    return Examples(
        task=task,
        labels=values,
        predictions=_activated(raw, task),
        scores=_scores(raw, task),
        finite=finite,
    )


def _outputs(shape: Sequence[int]) -> int:
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[1] < 1):
        raise ConfigError(
            "the model's output must have shape [rows], [rows, 1] or [rows, k] to be evaluated",
            got=Plain(str(list(shape))),
            fix="Reduce the output to one answer per row.",
        )
    return 1 if len(shape) == 1 else int(shape[1])


def _numbers(values: NDArray[Any]) -> FloatArray:
    """Values as float64, [rows, 1] flattened to [rows]."""
    try:
        numbers = np.asarray(values).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(
            "labels and predictions must be numbers",
            got=Plain(str(np.asarray(values).dtype)),
            fix="Convert a text label to class ids in preprocessing_fn.",
        ) from error
    return numbers[:, 0] if numbers.ndim == 2 and numbers.shape[1] == 1 else numbers


def _one_output(values: FloatArray, *, from_logits: bool) -> Task:
    if values.ndim != 1:
        raise DataError(
            "a model with one output needs one label per row",
            got=Plain(f"labels of shape {list(values.shape)}"),
            fix="Give the model one output per label, or give each row a single label.",
        )
    present = values[np.isfinite(values)]
    if bool(np.isin(present, (0.0, 1.0)).all()):
        return Task(kind="binary", classes=2, from_logits=from_logits)
    return Task(kind="regression", classes=0)


def _many_labels(values: FloatArray, outputs: int, *, from_logits: bool) -> Task:
    if values.ndim != 2 or values.shape[1] != outputs:
        raise DataError(
            f"a model with {outputs} outputs needs one class id or {outputs} labels per row",
            got=Plain(f"labels of shape {list(values.shape)}"),
        )
    present = values[_finite_rows(values)]
    if not np.isin(present, (0.0, 1.0)).all():
        return Task(kind="regression", classes=0)
    one_hot = (present.sum(axis=1) == 1.0).all()
    kind: Kind = "multiclass" if one_hot else "multilabel"
    return Task(kind=kind, classes=outputs, from_logits=from_logits)


def _refuse_several(values: FloatArray) -> NoReturn:
    ones = values[_finite_rows(values)].sum(axis=1)
    wrong = ones[ones != 1.0]
    raise ConfigError(
        "every row must have exactly one class, as the model's loss or softmax requires",
        got=Plain(f"{len(wrong):,} rows with another number of classes, such as {int(wrong[0])}"),
        fix="Leave such rows out, or for several classes at once use sigmoid and "
        "binary_crossentropy.",
    )


def _require_shapes(labels: FloatArray, outputs: FloatArray, task: Task) -> None:
    of_label, of_output = labels.shape[1:], outputs.shape[1:]
    if task.kind == "multiclass":
        fits = of_output == (task.classes,) and of_label in ((), of_output)
    elif task.kind == "multilabel":
        fits = of_output == of_label == (task.classes,)
    else:
        fits = of_label == of_output and len(of_output) <= (task.kind == "regression")
    if not fits:
        raise DataError(
            f"the shapes of labels and predictions must match for a {task.kind} task",
            got=Plain(f"labels {list(labels.shape)}, predictions {list(outputs.shape)}"),
            fix="Give the model one output per label, or one output per class.",
        )


def _require_class_ids(present: FloatArray, classes: int) -> None:
    wrong = present[(present != np.floor(present)) | (present < 0) | (present >= classes)]
    if wrong.size:
        raise DataError(
            f"labels must be class ids from 0 to {classes - 1}: the model has outputs for "
            f"{classes} classes",
            got=float(wrong[0]),
            fix="Give the model as many outputs as there are classes, and number them from 0.",
        )


def _argmax_labels(one_hot: FloatArray) -> FloatArray:
    """Class ids of one-hot rows; NaN for rows with a value that is not finite."""
    whole = _finite_rows(one_hot)
    ids = np.full(len(one_hot), np.nan)
    ids[whole] = one_hot[whole].argmax(axis=1)
    return ids


def _finite_rows(values: FloatArray) -> NDArray[np.bool_]:
    finite: NDArray[np.bool_] = np.isfinite(values)
    return finite if finite.ndim == 1 else np.asarray(finite.all(axis=1))


def _activated(raw: FloatArray, task: Task) -> FloatArray:
    if task.kind == "regression" or not task.from_logits:
        return raw
    with np.errstate(invalid="ignore", over="ignore"):
        if raw.ndim == 1 or task.kind == "multilabel":
            return 1.0 / (1.0 + np.exp(-raw))
        shifted = np.exp(raw - raw.max(axis=1, keepdims=True))
        return shifted / shifted.sum(axis=1, keepdims=True)


def _scores(raw: FloatArray, task: Task) -> FloatArray:
    if task.kind == "multilabel":
        return raw
    if task.classes != 2:
        return np.empty(0)
    if raw.ndim == 1:
        return raw
    with np.errstate(invalid="ignore"):
        return raw[:, 1] - raw[:, 0] if task.from_logits else raw[:, 1]
