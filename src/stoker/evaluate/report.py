"""Writes an evaluation as an HTML page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from stoker.core.files import write_atomic
from stoker.evaluate.evaluation import CalibrationBin, Evaluation, OutputEvaluation
from stoker.evaluate.gates import BaselineMetrics, SliceResult, Verdict
from stoker.evaluate.metrics import MetricValue, Undefined, better_direction
from stoker.pages.bars import meter
from stoker.pages.html import Html, badge, element, join, page, paragraph, section
from stoker.pages.numbers import number
from stoker.pages.plot import Axis, line_plot
from stoker.pages.table import Code, Fill, Number, Prose, table

_SHOWN_CLASSES = 30
"""Maximum number of classes for which the page shows a confusion matrix; the JSON has it for up to 100."""

_PLOT_PX = 300
"""Width and height of the calibration chart, pixels."""

_NO_NAMES: Mapping[str, Sequence[str]] = MappingProxyType({})
"""Default of `classes`: no class has a name."""


def write_report(
    evaluation: Evaluation,
    path: Path,
    *,
    title: str = "",
    classes: Mapping[str, Sequence[str]] = _NO_NAMES,
) -> None:
    """Write the page.

    Args:
        evaluation: The results.
        path: The HTML file.
        title: The subject, e.g. the name of the experiment.
        classes: Output -> names of its classes, in the order of their ids; for any other output, the page
            shows ids.
    """
    write_atomic(path, report_html(evaluation, title=title, classes=classes))


def report_html(
    evaluation: Evaluation, *, title: str = "", classes: Mapping[str, Sequence[str]] = _NO_NAMES
) -> str:
    """Return the page as text."""
    kinds = [
        f"{output}: {found.task.described}" if output else found.task.described
        for output, found in evaluation.outputs.items()
    ]
    parts = [
        paragraph(f"{evaluation.rows:,} rows of the eval split, {'; '.join(kinds)}", quiet=True),
        _gates(evaluation.verdicts),
        section("Metrics", _metrics(evaluation.metrics, evaluation.baseline)),
        *_slices(evaluation),
    ]
    for output, found in evaluation.outputs.items():
        of_output = f" of {output}" if output else ""
        parts += [
            section(f"Confusion{of_output}", *_confusion(found, classes.get(output, ()))),
            section(f"Calibration{of_output}", *_calibration(found.calibration)),
        ]
    word = _passed(evaluation.blessed, "blessed", "refused")
    return page(f"Evaluation of {title}" if title else "Evaluation", parts, next_to_title=word)


def _passed(passed: bool, yes: str, no: str) -> Html:
    return badge(yes if passed else no, kind="good" if passed else "bad")


def _gates(verdicts: Sequence[Verdict]) -> Html:
    if not verdicts:
        return section(
            "Gates", paragraph("None: the model may be pushed, whatever its metrics are.")
        )
    rows = (
        [
            _passed(verdict.passed, "pass", "fail"),
            verdict.subject,
            verdict.rule,
            verdict.reason,
            verdict.key,
        ]
        for verdict in sorted(verdicts, key=lambda verdict: verdict.passed)
    )
    columns = ["", "what", "must be", Prose("found"), Code("set by")]
    return section("Gates", table(columns, rows))


def _metrics(metrics: Mapping[str, MetricValue], baseline: BaselineMetrics | None) -> Html:
    missing = Undefined(reason=baseline.error or "it was not computed" if baseline else "")
    columns: list[str] = ["metric", Number("value")]
    if baseline:
        columns.append(Number(baseline.version))
    rows, notes = [], []
    for name, value in metrics.items():
        values = [value, *([baseline.metrics.get(name, missing)] if baseline else [])]
        rows.append([name, *map(_value, values), better_direction(name) or ""])
        notes += [
            f"{name}: undefined{_of(title)}, {each.reason}."
            for title, each in zip(columns[1:], values, strict=True)
            if isinstance(each, Undefined)
        ]
    return join([table([*columns, "better is"], rows), *map(_note, notes)])


def _of(title: str) -> str:
    return "" if title == "value" else f" for {title}"


def _note(text: str) -> Html:
    return element("p", text, class_="warning")


def _slices(evaluation: Evaluation) -> Iterator[Html]:
    metric = evaluation.main_metric
    for column, pieces in itertools.groupby(evaluation.slices, key=lambda piece: piece.column):
        yield section(f"{metric} by {column}", _slice_table(column, list(pieces), metric))


def _slice_table(column: str, pieces: Sequence[SliceResult], metric: str) -> Html:
    values = [piece.metrics.get(metric) for piece in pieces]
    most = max((abs(value) for value in values if isinstance(value, float)), default=0.0)
    rows = [
        [piece.value, f"{piece.rows:,}", _value(value), _bar(value, most)]
        for piece, value in zip(pieces, values, strict=True)
    ]
    return table([column, Number("rows"), Number(metric), Fill()], rows)


def _bar(value: MetricValue | None, most: float) -> Html:
    if isinstance(value, float):
        return meter(abs(value), most=most)
    return element("span", value.reason if value else "it was not computed", class_="warning")


def _confusion(found: OutputEvaluation, class_names: Sequence[str]) -> Iterator[Html]:
    counts = found.confusion
    if not counts or len(counts) > _SHOWN_CLASSES:
        return
    named = len(class_names) == len(counts)
    names = list(class_names) if named else [str(each) for each in range(len(counts))]
    yield paragraph("Rows: the label. Columns: the prediction.", quiet=True)
    columns = ["", *map(Number, names)]
    rows = (
        [name, *(_count(count, sum(row)) for count in row)]
        for name, row in zip(names, counts, strict=True)
    )
    yield table(columns, rows, class_="matrix")


def _count(count: int, of_label: int) -> Html:
    share = round(100 * count / of_label) if of_label else 0
    ink = "#fff" if share > 50 else "inherit"
    style = f"background:color-mix(in srgb,var(--fill) {share}%,transparent);color:{ink}"
    return element("div", f"{count:,}", style=style)


def _calibration(bins: Sequence[CalibrationBin]) -> Iterator[Html]:
    if not bins:
        return
    values = [value for part in bins for value in (part.mean_prediction, part.mean_label)]
    low, high = min(values), max(values)
    if not high - low > 0 or not math.isfinite(high - low):
        yield paragraph(f"Every prediction and every mean label is {number(low)}.")
        return
    points = [
        ((part.mean_prediction - low) / (high - low), (part.mean_label - low) / (high - low))
        for part in bins
    ]
    places = (0.0, 0.25, 0.5, 0.75, 1.0)
    ticks = [(place, number(low + place * (high - low), 3)) for place in places]
    yield paragraph(
        "Each dot is a tenth of the rows, sorted by prediction. On the diagonal, predictions are right on average.",
        quiet=True,
    )
    yield line_plot(
        points,
        across=Axis(name="mean prediction", ticks=ticks),
        up=Axis(name="mean label", ticks=ticks),
        size_px=(_PLOT_PX, _PLOT_PX),
        title="mean label by mean prediction",
        diagonal=True,
    )


def _value(value: MetricValue | None) -> str:
    return number(value) if isinstance(value, float) else "undefined"
