"""`evaluation.html`: one file, no script, nothing loaded; every name in it is escaped."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType

from stoker.core.files import write_atomic
from stoker.evaluate.drawing import bar, calibration_chart
from stoker.evaluate.evaluation import Evaluation, OutputEvaluation
from stoker.evaluate.gates import BaselineMetrics, SliceResult, Verdict
from stoker.evaluate.metrics import MetricValue, Undefined, better_direction
from stoker.evaluate.task import Task

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; margin: 2rem auto; max-width: 60rem;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
p.sub { color: #5b6b7b; margin-top: .2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: #5b6b7b; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #e4e9ee; vertical-align: top;
  overflow-wrap: anywhere; }
td.n, th.n { text-align: right; white-space: nowrap; }
.badge { color: #fff; border-radius: .3rem; padding: .1rem .6rem; font-size: .85rem; white-space: nowrap; }
.yes { background: #1f8a4c; } .no { background: #c0392b; }
.undefined { color: #8a6d1f; } .bar { fill: #3b7dbf; } .grid { stroke: #dfe5ea; }
.line { fill: none; stroke: #3b7dbf; stroke-width: 2; } .dot { fill: #3b7dbf; }
svg text { font: 11px system-ui, sans-serif; fill: #5b6b7b; }
table.confusion { width: auto; } table.confusion td { border: 1px solid #fff; text-align: right;
  padding: .2rem .5rem; }
"""

_SHOWN_CLASSES = 30
"""Widest confusion matrix that a page shows; the JSON holds it up to 100 classes."""


_NO_NAMES: Mapping[str, Sequence[str]] = MappingProxyType({})
"""Classes are numbers."""


def write_report(
    evaluation: Evaluation,
    path: Path,
    *,
    title: str = "",
    classes: Mapping[str, Sequence[str]] = _NO_NAMES,
) -> None:
    """Write the evaluation as a page for people.

    Args:
        evaluation: What was found.
        path: The HTML file.
        title: What was evaluated, e.g. the experiment's name.
        classes: Output -> class id -> what the data calls it; numbers where there are none.
    """
    write_atomic(path, report_html(evaluation, title=title, classes=classes))


def report_html(
    evaluation: Evaluation, *, title: str = "", classes: Mapping[str, Sequence[str]] = _NO_NAMES
) -> str:
    """The page as text."""
    heading = f"Evaluation of {title}" if title else "Evaluation"
    parts = [
        _header(evaluation, heading),
        _gates(evaluation.verdicts),
        _metrics(evaluation.metrics, evaluation.baseline),
        *_slices(evaluation),
    ]
    for output, found in evaluation.outputs.items():
        names = classes.get(output, ())
        parts += [_confusion(output, found, class_names=names), _calibration(output, found)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy"\n'
        " content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(heading)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _header(evaluation: Evaluation, heading: str) -> str:
    word = "blessed" if evaluation.blessed else "refused"
    kind = "; ".join(_kind(output, found.task) for output, found in evaluation.outputs.items())
    return (
        f"<h1>{escape(heading)} {_badge(word, passed=evaluation.blessed)}</h1>\n"
        f'<p class="sub">{evaluation.rows:,} rows of the eval split, {kind}</p>'
    )


def _kind(output: str, task: Task) -> str:
    return f"{escape(output)}: {task.described}" if output else task.described


def _gates(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return "<h2>Gates</h2>\n<p>None: nothing was asked of the model.</p>"
    rows = (
        [
            _badge("pass" if verdict.passed else "fail", passed=verdict.passed),
            escape(verdict.subject),
            escape(verdict.rule),
            escape(verdict.reason),
            f"<code>{escape(verdict.key)}</code>",
        ]
        for verdict in sorted(verdicts, key=lambda verdict: verdict.passed)
    )
    return "<h2>Gates</h2>\n" + _table(["", "what", "must be", "found", "asked by"], rows)


def _metrics(metrics: Mapping[str, MetricValue], baseline: BaselineMetrics | None) -> str:
    head = ["metric", "value", "better is"]
    if baseline:
        head.insert(2, escape(baseline.version))
    rows = []
    for name, value in metrics.items():
        row = [escape(name), _value(value), better_direction(name) or ""]
        if baseline:
            missing = Undefined(reason=baseline.error or "it was not computed")
            row.insert(2, _value(baseline.metrics.get(name, missing)))
        rows.append(row)
    return "<h2>Metrics</h2>\n" + _table(head, rows)


def _slices(evaluation: Evaluation) -> list[str]:
    by_column = itertools.groupby(evaluation.slices, key=lambda piece: piece.column)
    return [
        _slice_table(column, list(pieces), evaluation.main_metric) for column, pieces in by_column
    ]


def _slice_table(column: str, pieces: Sequence[SliceResult], metric: str) -> str:
    values = [piece.metrics.get(metric) for piece in pieces]
    most = max((abs(value) for value in values if isinstance(value, float)), default=0.0)
    rows = [
        [
            escape(piece.value),
            f"{piece.rows:,}",
            bar(abs(value), most=most) if isinstance(value, float) else "",
            _value(value),
        ]
        for piece, value in zip(pieces, values, strict=True)
    ]
    head = [escape(column), "rows", "", escape(metric)]
    return f"<h2>{escape(metric)} by {escape(column)}</h2>\n" + _table(head, rows)


def _confusion(output: str, found: OutputEvaluation, *, class_names: Sequence[str]) -> str:
    table = found.confusion
    if not table or len(table) > _SHOWN_CLASSES:
        return ""
    names = [escape(name) for name in _names(len(table), class_names)]
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "\n".join(
        f"<tr><th>{name}</th>{''.join(_cell(count, sum(row)) for count in row)}</tr>"
        for name, row in zip(names, table, strict=True)
    )
    return (
        f'<h2>Confusion{_of(output)}</h2>\n<p class="sub">Rows: the label. Columns: the prediction.</p>\n'
        f'<table class="confusion"><tr><th></th>{head}</tr>\n{body}</table>'
    )


def _names(classes: int, class_names: Sequence[str]) -> list[str]:
    named = len(class_names) == classes
    return list(class_names) if named else [str(number) for number in range(classes)]


def _cell(count: int, of_label: int) -> str:
    share = count / of_label if of_label else 0.0
    ink = "#fff" if share > 0.5 else "#1c2733"
    return f'<td style="background:rgba(59,125,191,{share:.2f});color:{ink}">{count}</td>'


def _of(output: str) -> str:
    return f" of {escape(output)}" if output else ""


def _calibration(output: str, found: OutputEvaluation) -> str:
    if not found.calibration:
        return ""
    return (
        f'<h2>Calibration{_of(output)}</h2>\n<p class="sub">Mean label by mean prediction, in tenths of the '
        "rows; on the diagonal the model's figure can be taken at its word.</p>\n"
        + calibration_chart(found.calibration)
    )


def _badge(word: str, *, passed: bool) -> str:
    return f'<span class="badge {"yes" if passed else "no"}">{word}</span>'


def _value(value: MetricValue | None) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    reason = value.reason if value else "it was not computed"
    return f'<span class="undefined">undefined: {escape(reason)}</span>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>\n{body}</table>"
