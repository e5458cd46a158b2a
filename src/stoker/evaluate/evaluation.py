"""One evaluation: metrics over the split and by slice, the gates' verdicts, and its JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from stoker.core.errors import DataError, Plain
from stoker.core.files import read_json, write_json
from stoker.core.multi_output import ONLY, alone, of_output
from stoker.evaluate.config import EvaluateConfig, require_metrics_of
from stoker.evaluate.curves import CalibrationBin, calibration_bins, confusion_matrix
from stoker.evaluate.gates import BaselineMetrics, SliceResult, Verdict, check_gates
from stoker.evaluate.metrics import (
    MetricValue,
    Undefined,
    by_label,
    default_metrics,
    measure_all,
    metrics_of,
    metrics_of_labels,
)
from stoker.evaluate.slices import slice_rows
from stoker.evaluate.task import Examples, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputEvaluation:
    """What was found of one output, beside its metrics."""

    task: Task
    """What the output means."""

    calibration: tuple[CalibrationBin, ...] = ()
    """Mean prediction against mean label by tenths of the predictions; not for many classes."""

    confusion: tuple[tuple[int, ...], ...] = ()
    """[label][prediction] rows; empty for a regression, several labels, and beyond 100 classes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What was found on the eval split, and whether the model may be pushed."""

    rows: int
    """Rows of the eval split."""

    outputs: Mapping[str, OutputEvaluation]
    """By the model's output."""

    metrics: Mapping[str, MetricValue]
    """Over the whole split; the first is the one to look at. Of several outputs they are named
    `{output}_{metric}`, as Keras names them."""

    slices: tuple[SliceResult, ...]
    """By slice, the configuration's order, then the largest first."""

    verdicts: tuple[Verdict, ...]
    """One a limit, and one for each thing that no model may do."""

    baseline: BaselineMetrics | None
    """The version that `max_drop` compared with; None where there is none yet."""

    @property
    def main_metric(self) -> str:
        """The metric to look at: the first that was asked for, or the task's own."""
        return next(iter(self.metrics))

    @property
    def blessed(self) -> bool:
        """True when nothing said no: the model may be pushed."""
        return all(verdict.passed for verdict in self.verdicts)


def evaluate(
    outputs: Mapping[str, Examples],
    *,
    slice_columns: Mapping[str, NDArray[Any]],
    config: EvaluateConfig,
    baseline: BaselineMetrics | None,
) -> Evaluation:
    """Measure a model's predictions and let the gates judge them.

    Args:
        outputs: Labels and predictions by output (`pair`), all of the same rows; a model of one
            output has it by `ONLY`.
        slice_columns: Raw column -> [rows] values, for the columns that `config` slices by.
        config: Metrics, slices and gates.
        baseline: The version now in the repository on the same rows (`measure_baseline`); None
            where there is none yet.

    Raises:
        ConfigError: a metric is asked for that no output has.
    """
    labelled = by_label(outputs)
    require_metrics_of(config, list(labelled))
    rows = _rows(outputs)
    names = _metric_names(config, outputs)
    metrics = measure_all(names, labelled)
    slices = tuple(_measure_slices(names, labelled, slice_columns, config.all_slices))
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
    """Measure the version now in the repository on the rows that the new model is measured on.

    Args:
        outputs: As for `evaluate`, the predictions those of the version in the repository.
        config: Names the metrics.
        version: What to call it, e.g. `version 3`.

    Returns:
        Its metrics.
    """
    metrics = measure_all(_metric_names(config, outputs), by_label(outputs))
    return BaselineMetrics(version=version, rows=_rows(outputs), metrics=metrics)


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
    """An evaluation in JSON's own types; an undefined metric is `{"undefined": reason}`."""
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
        KeyError, TypeError, ValueError: it is no evaluation.
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
    """What needs no gate: an empty split proves nothing, and NaN is no answer to serve."""
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
    """The only output's parts stand beside the others; of several `outputs` holds them by name."""
    told = alone({name: dataclasses.asdict(output) for name, output in outputs.items()})
    return told if ONLY in outputs else {"outputs": told}


def _outputs_from_json(raw: Mapping[str, Any]) -> dict[str, OutputEvaluation]:
    return {
        name: OutputEvaluation(
            task=Task(**told["task"]),
            calibration=tuple(CalibrationBin(**part) for part in told["calibration"]),
            confusion=tuple(tuple(row) for row in told["confusion"]),
        )
        for name, told in raw.get("outputs", {ONLY: raw}).items()
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
    """Metrics in their own order: a file of sorted keys has lost it."""
    return {name: _value_from_json(raw[name]) for name in order if name in raw}


def _value_from_json(raw: Any) -> MetricValue:
    return Undefined(reason=raw["undefined"]) if isinstance(raw, dict) else float(raw)


def _measured(raw: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    return {**raw, "metrics": _metrics_from_json(raw["metrics"], order)}
