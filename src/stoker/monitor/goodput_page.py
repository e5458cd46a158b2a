"""The HTML page about the goodput of runs."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.monitor.goodput import RunGoodput, restarts_line
from stoker.pages.bars import Bar, waterfall_of_parts
from stoker.pages.html import Html, page, paragraph, section
from stoker.pages.numbers import percent, seconds
from stoker.pages.table import Number, Prose, facts, table


def goodput_page(reports: Sequence[RunGoodput]) -> str:
    """Return a page that shows the parts of each run's wall time.

    Args:
        reports: The wall times of at least one run.
    """
    note = paragraph(
        "Goodput is the share of a run's wall time that is spent in training steps that were not repeated. "
        "The wall time covers all processes of the run and the time between them, without the stages "
        "before training.",
        quiet=True,
    )
    compared = []
    if len(reports) > 1:
        rows = [
            (each.run, percent(each.goodput), seconds(each.wall_s), restarts_line(each))
            for each in reports
        ]
        columns = ("run", Number("goodput"), Number("wall time"), Prose("restarts"))
        compared = [section("Runs", table(columns, rows))]
    return page("Goodput", [note, *compared, *map(_of_run, reports)])


def _of_run(report: RunGoodput) -> Html:
    bars = [
        Bar(
            label=part.label,
            value=part.seconds,
            shown=f"{seconds(part.seconds)}, {percent(part.share)}",
        )
        for part in report.parts
    ]
    rows = [
        (part.label, seconds(part.seconds), percent(part.share), part.advice)
        for part in report.parts
    ]
    return section(
        f"Run {report.run}",
        facts(
            [
                ("goodput", percent(report.goodput)),
                ("wall time", seconds(report.wall_s)),
                ("processes", f"{report.processes}; {restarts_line(report)}"),
                ("steps done again", f"{report.repeated_steps:,}"),
            ]
        ),
        waterfall_of_parts(bars, title=f"Parts of the wall time of run {report.run}"),
        table(("part", Number("time"), Number("share"), Prose("how to reduce it")), rows),
    )
