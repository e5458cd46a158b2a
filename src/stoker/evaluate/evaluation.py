"""One evaluation: metrics, slices, calibration, confusion matrix and verdicts of the gates; and its JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import DataError, Plain
from stoker.core.files import read_json, write_json
from stoker.core.multi_output import ONLY, alone, of_output
from stoker.evaluate.config import EvaluateConfig, require_metrics_of
from stoker.evaluate.gates import BaselineMetrics, SliceResult, Verdict, check_gates
from stoker.evaluate.metrics import (
    MetricValue,
    Undefined,
    by_label,
    default_metrics,
    measure_all,
    metrics_of,
    metrics_of_labels,
    predicted_ids,
    probability_of_one,
)
from stoker.evaluate.slices import slice_rows
from stoker.evaluate.task import Examples, FloatArray, Task

_BINS = 10
"""Number of calibration bins, each with about the same number of rows."""

_MAX_CLASSES = 100
"""Maximum number of classes for which a confusion matrix is computed: it has 10,000 cells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationBin:
    """Rows with similar predictions."""

    rows: int
    """Number of rows."""

    mean_prediction: float
    """Mean of the predictions."""

    mean_label: float
    """Mean of the labels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputEvaluation:
    """All results of one output except its metrics."""

    task: Task
    """Task of the output."""

    calibration: tuple[CalibrationBin, ...] = ()
    """Mean prediction and mean label by tenths of the rows, sorted by prediction; empty unless the task has two classes
    or is a regression with one output."""

    confusion: tuple[tuple[int, ...], ...] = ()
    """[label][prediction] number of rows; empty for a regression, for several labels per row, and for more than
    100 classes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Results on the eval split, and whether the model may be pushed."""

    rows: int
    """Rows of the eval split."""

    outputs: Mapping[str, OutputEvaluation]
    """Output of the model -> its results."""

    metrics: Mapping[str, MetricValue]
    """Metrics of the whole split, the main one first. With several outputs their names are
    `{output}_{metric}`, as in Keras."""

    slices: tuple[SliceResult, ...]
    """Metrics of each slice: columns in the order of the configuration, slices of a column by number of rows."""

    verdicts: tuple[Verdict, ...]
    """One verdict per limit, and one per check that applies to every model."""

    baseline: BaselineMetrics | None
    """The version that `max_drop` compares with; None if no version was pushed."""

    @property
    def main_metric(self) -> str:
        """Name of the main metric: the first in the configuration, or the default of the task."""
        return next(iter(self.metrics))

    @property
    def blessed(self) -> bool:
        """Whether every verdict passed: the model may be pushed."""
        return all(verdict.passed for verdict in self.verdicts)


def evaluate(
    outputs: Mapping[str, Examples],
    *,
    slice_columns: Mapping[str, NDArray[Any]],
    config: EvaluateConfig,
    baseline: BaselineMetrics | None,
) -> Evaluation:
    """Compute metrics of a model's predictions and check the gates.

    Args:
        outputs: Output -> labels and predictions (from `pair`), all of the same rows; the key of a
            single output is `ONLY`.
        slice_columns: Raw column -> [rows] values, for the columns that `config` slices by.
        config: Metrics, slices and gates.
        baseline: Metrics of the version in the repository on the same rows (`measure_baseline`); None
            if no version was pushed.

    Raises:
        ConfigError: no output has a configured metric.
    """
    labeled = by_label(outputs)
    require_metrics_of(config, list(labeled))
    rows = _rows(outputs)
    names = _metric_names(config, outputs)
    metrics = measure_all(names, labeled)
    slices = tuple(_measure_slices(names, labeled, slice_columns, config.all_slices))
    gates = check_gates(config, rows=rows, metrics=metrics, slices=slices, baseline=baseline)
    return Evaluation(
        rows=rows,
        outputs={
            output: OutputEvaluation(
                task=examples.task,
                calibration=calibration_bins(examples),
                confusion=confusion_matrix(examples),
            )
            for output, examples in outputs.items()
        },
        metrics=metrics,
        slices=slices,
        verdicts=(*gates, *_always_checked(outputs)),
        baseline=baseline,
    )


def measure_baseline(
    outputs: Mapping[str, Examples], *, config: EvaluateConfig, version: str
) -> BaselineMetrics:
    """Compute the metrics of the version in the repository on the rows of the new model.

    Args:
        outputs: As for `evaluate`, but with the predictions of the version in the repository.
        config: The metrics.
        version: Name of this version in messages, e.g. `version 3`.
    """
    metrics = measure_all(_metric_names(config, outputs), by_label(outputs))
    return BaselineMetrics(version=version, rows=_rows(outputs), metrics=metrics)


def calibration_bins(examples: Examples) -> tuple[CalibrationBin, ...]:
    """Mean prediction and mean label by tenths of the rows, sorted by prediction.

    Args:
        examples: Two classes, or a regression with one output.

    Returns:
        At most ten bins; equal predictions are in the same bin. No bins for other tasks.
    """
    whole = examples.take(examples.finite)
    predictions = probability_of_one(whole)
    if predictions.ndim != 1 or not whole.rows:
        return ()
    _, place, counts = np.unique(predictions, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - counts / 2.0
    bin_of = np.minimum((middle * _BINS / whole.rows).astype(np.int64), _BINS - 1)[place]
    bins = [bin_of == number for number in range(_BINS) if (bin_of == number).any()]
    return tuple(_calibration_bin(whole.labels[inside], predictions[inside]) for inside in bins)


def _calibration_bin(labels: FloatArray, predictions: FloatArray) -> CalibrationBin:
    """Return the bin of these rows. Values are divided before the sum, so that large numbers do not overflow."""
    rows = len(predictions)
    return CalibrationBin(
        rows=rows,
        mean_prediction=float((predictions / rows).sum()),
        mean_label=float((labels / rows).sum()),
    )


def confusion_matrix(examples: Examples) -> tuple[tuple[int, ...], ...]:
    """[label][prediction] number of rows with finite values.

    Empty for a regression, for more than 100 classes, and if a row may have several labels.
    """
    classes = 0 if examples.task.kind == "multilabel" else examples.task.classes
    if not 0 < classes <= _MAX_CLASSES:
        return ()
    whole = examples.take(examples.finite)
    cells = whole.labels.astype(np.int64) * classes + predicted_ids(whole)
    table = np.bincount(cells, minlength=classes * classes).reshape(classes, classes)
    return tuple(tuple(int(cell) for cell in row) for row in table)


def write_evaluation(evaluation: Evaluation, path: Path) -> None:
    """Write `evaluation.json`."""
    write_json(path, evaluation_to_json(evaluation))


def read_evaluation(path: Path) -> Evaluation:
    """Read `evaluation.json`.

    Raises:
        DataError: it is missing or damaged.
    """
    raw = read_json(path)
    try:
        return evaluation_from_json(raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path} must be an evaluation",
            got=Plain(f"{type(error).__name__}: {error}"),
            fix="Run `stoker evaluate` again.",
        ) from error


def evaluation_to_json(evaluation: Evaluation) -> dict[str, Any]:
    """Convert an evaluation to types that JSON has; an undefined metric becomes `{"undefined": reason}`."""
    baseline = evaluation.baseline
    return {
        "blessed": evaluation.blessed,
        "rows": evaluation.rows,
        "metrics": _metrics_to_json(evaluation.metrics),
        "metric_order": list(evaluation.metrics),
        "slices": [_result_to_json(piece) for piece in evaluation.slices],
        "verdicts": [dataclasses.asdict(verdict) for verdict in evaluation.verdicts],
        "baseline": None if baseline is None else _result_to_json(baseline),
        **_outputs_to_json(evaluation.outputs),
    }


def evaluation_from_json(raw: Mapping[str, Any]) -> Evaluation:
    """The inverse of `evaluation_to_json`.

    Raises:
        KeyError, TypeError, ValueError: it is not an evaluation.
    """
    baseline, order = raw["baseline"], raw["metric_order"]
    evaluation = Evaluation(
        rows=raw["rows"],
        outputs=_outputs_from_json(raw),
        metrics=_metrics_from_json(raw["metrics"], order),
        slices=tuple(SliceResult(**_measured(piece, order)) for piece in raw["slices"]),
        verdicts=tuple(Verdict(**verdict) for verdict in raw["verdicts"]),
        baseline=None if baseline is None else BaselineMetrics(**_measured(baseline, order)),
    )
    if evaluation.blessed != raw["blessed"]:
        raise ValueError("blessed does not follow from the verdicts")
    return evaluation


def _rows(outputs: Mapping[str, Examples]) -> int:
    return next(iter(outputs.values())).rows


def _metric_names(config: EvaluateConfig, outputs: Mapping[str, Examples]) -> tuple[str, ...]:
    chosen = config.metrics or [
        of_output(output, metric)
        for output, examples in outputs.items()
        for metric in (*default_metrics(examples.task), *metrics_of_labels(examples.task))
    ]
    return tuple(dict.fromkeys([*chosen, *config.gates, *config.slice_gates]))


def _measure_slices(
    metrics: tuple[str, ...],
    outputs: Mapping[str, Examples],
    columns: Mapping[str, NDArray[Any]],
    names: tuple[str, ...],
) -> list[SliceResult]:
    known = metrics_of(outputs)
    measured = {known[name][0] for name in metrics}
    outputs = {name: examples for name, examples in outputs.items() if name in measured}
    return [
        SliceResult(
            column=piece.column,
            value=piece.value,
            rows=len(piece.rows),
            metrics=measure_all(
                metrics, {name: examples.take(piece.rows) for name, examples in outputs.items()}
            ),
        )
        for name in names
        for piece in slice_rows(name, columns)
    ]


def _always_checked(outputs: Mapping[str, Examples]) -> list[Verdict]:
    """Checks that need no gate: the split has rows, and every prediction and label is finite."""
    failed = []
    if not _rows(outputs):
        failed.append(("evaluate.rows", "eval split", "at least one row", "0 rows"))
    for output, examples in outputs.items():
        broken = int((~examples.finite).sum())
        if broken:
            reason = f"NaN or infinite predictions or labels in {broken} of {examples.rows} rows"
            subject = of_output(output, "predictions")
            failed.append(("evaluate.predictions", subject, "finite numbers", reason))
    return [
        Verdict(key=key, subject=subject, rule=rule, passed=False, reason=reason)
        for key, subject, rule, reason in failed
    ]


def _outputs_to_json(outputs: Mapping[str, OutputEvaluation]) -> dict[str, Any]:
    """The results of a single output; several outputs are under the key `outputs`, by name."""
    parts = alone({name: dataclasses.asdict(output) for name, output in outputs.items()})
    return parts if ONLY in outputs else {"outputs": parts}


def _outputs_from_json(raw: Mapping[str, Any]) -> dict[str, OutputEvaluation]:
    return {
        name: OutputEvaluation(
            task=Task(**parts["task"]),
            calibration=tuple(CalibrationBin(**part) for part in parts["calibration"]),
            confusion=tuple(tuple(row) for row in parts["confusion"]),
        )
        for name, parts in raw.get("outputs", {ONLY: raw}).items()
    }


def _result_to_json(result: SliceResult | BaselineMetrics) -> dict[str, Any]:
    plain = {part.name: getattr(result, part.name) for part in dataclasses.fields(result)}
    return plain | {"metrics": _metrics_to_json(result.metrics)}


def _metrics_to_json(metrics: Mapping[str, MetricValue]) -> dict[str, Any]:
    return {
        name: {"undefined": value.reason} if isinstance(value, Undefined) else value
        for name, value in metrics.items()
    }


def _metrics_from_json(raw: Mapping[str, Any], order: Sequence[str]) -> dict[str, MetricValue]:
    """Metrics in their original order, which a file with sorted keys does not keep."""
    return {name: _value_from_json(raw[name]) for name in order if name in raw}


def _value_from_json(raw: Any) -> MetricValue:
    return Undefined(reason=raw["undefined"]) if isinstance(raw, dict) else float(raw)


def _measured(raw: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    return {**raw, "metrics": _metrics_from_json(raw["metrics"], order)}
