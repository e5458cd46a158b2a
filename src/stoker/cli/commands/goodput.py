"""`stoker goodput`: shows how runs spent their wall time, over all their restarts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import AsJson
from stoker.cli.output import print_result, require_writable_file

if TYPE_CHECKING:
    from stoker.monitor.goodput import RunGoodput


def goodput(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs, or IDs of runs in ./runs.", metavar="RUN"),
    ],
    as_json: AsJson = False,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Also write an HTML page.")
    ] = None,
) -> None:
    """Show how runs spent their wall time, over all restarts.

    Parts: steps, waiting for input, compiling, checkpoints, validation, lost work, waiting for machines.
    """
    from stoker.core.files import write_atomic
    from stoker.monitor.goodput import find_run, goodput_of
    from stoker.monitor.goodput_page import goodput_page

    reports = [goodput_of(find_run(each)) for each in runs]
    if page is not None:
        require_writable_file(page, flag="--page")
        write_atomic(page, goodput_page(reports).encode(errors="backslashreplace"))
    if as_json:
        print_result(json.dumps([asdict(report) for report in reports], indent=2))
        return
    print_result("\n\n".join(map(_shown, reports)))


def _shown(report: RunGoodput) -> str:
    from stoker.monitor.goodput import restarts_line
    from stoker.pages.numbers import percent, seconds

    share, wall = percent(report.goodput), seconds(report.wall_s)
    lines = [f"run {report.run}: goodput {share} of {wall}, {restarts_line(report)}"]
    width = max((len(part.label) for part in report.parts), default=0)
    lines += [
        f"  {part.label:<{width}}  {seconds(part.seconds):>14}  {percent(part.share):>6}"
        for part in report.parts
    ]
    return "\n".join(lines)
