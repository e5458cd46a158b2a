"""`stoker profile -- COMMAND`: what a script that knows nothing of Stoker does with its time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stoker.cli.stdout import print_result, tolerant

if TYPE_CHECKING:
    from rich.console import Console

    from stoker.scriptprofile import ScriptProfile
    from stoker.scriptprofile.loops import Loop

OUT = Path("stoker-profile")
"""Where the profile is written by default."""

UNBROKEN = 10_000
"""Columns that no line reaches."""

SHOWN_SHARE = 0.05
"""Of the input's CPU time: a stage below it is printed only where the user wrote it."""


def profile_script_command(
    command: Sequence[str], *, as_json: bool = False, out: Path = OUT, seconds: float = 0.0
) -> None:
    """Run a command, say where its training's time went, and exit as it did.

    Args:
        command: Argument vector.
        as_json: Print the profile as JSON on stdout; what the command prints goes to stderr.
        out: Folder of profile.json and profile.html.
        seconds: End the command after so long; 0 lets it run to its end.

    Raises:
        UserError: the command cannot be started, or `seconds` is negative.
        typer.Exit: with the command's own exit code, where it is not 0.
    """
    from rich.console import Console

    from stoker.core.errors import UserError
    from stoker.core.files import write_atomic, write_json
    from stoker.scriptprofile import profile_script
    from stoker.scriptprofile.page import page_html

    if not seconds >= 0:
        raise UserError("--seconds must be 0 or more", got=seconds, fix="0 lets the script end.")
    stdout = 2 if as_json else None
    profile = profile_script(command, folder=out, seconds=seconds or None, stdout=stdout)
    write_json(out / "profile.json", profile.to_json())
    # A path need not be UTF-8.
    write_atomic(out / "profile.html", page_html(profile).encode(errors="backslashreplace"))
    if as_json:
        print_result(json.dumps(profile.to_json(), indent=2, sort_keys=True, allow_nan=False))
    else:
        # Lines end where a terminal ends; in a pipe they are whole.
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else UNBROKEN
        console = Console(file=tolerant(sys.stdout), highlight=False, width=width)
        print_profile(console, profile)
        console.print(f"written: {out / 'profile.json'}, {out / 'profile.html'}", markup=False)
    if profile.exit_code:
        raise typer.Exit(profile.exit_code)


def print_profile(console: Console, profile: ScriptProfile) -> None:
    """Each loop's table, the findings in plain words, and what went wrong with the watcher."""
    console.print()
    console.print(f"profile of {profile.shown_command()}", style="bold", markup=False)
    console.print(
        f"{profile.ending()}; {profile.wall_s:.1f} s",
        style="bold red" if profile.failed else "",
        markup=False,
    )
    if note := profile.note():
        console.print(f"{note}.", markup=False)
    for name, figure in profile.machine():
        console.print(f"{name}: {figure}", markup=False)
    for loop in profile.loops:
        _print_loop(console, loop, profile.name_of(loop))
    _print_findings(console, profile)
    for failure in profile.failures:
        console.print(f"the watcher failed: {failure}", markup=False, soft_wrap=True)


def _print_findings(console: Console, profile: ScriptProfile) -> None:
    for number, finding in enumerate(profile.findings, start=1):
        console.print()
        head = f"{number}. {finding.kind} in {finding.place}: {finding.gain_text()}, {finding.sure}"
        console.print(head, style="bold", markup=False)
        console.print(f"   {finding.place.file}:{finding.place.line}", markup=False, soft_wrap=True)
        console.print(f"   {finding.observation}. {finding.why}", markup=False)
        for line in finding.change.splitlines():
            console.print(f"       {line}", markup=False, soft_wrap=True)
    if profile.loops and not profile.findings:
        console.print(f"\n{profile.nothing_found()}")
    if profile.minor:
        console.print("\nSeen too, of less weight here:")
    for finding in profile.minor:
        console.print(f"  {finding.kind} in {finding.place}: {finding.observation}", markup=False)
        console.print(f"      {finding.change}", markup=False, soft_wrap=True)


def _print_loop(console: Console, loop: Loop, name: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    from stoker.pages.numbers import seconds

    split = loop.split
    console.print()
    console.print(f"{name}: {loop.counted()}", style="bold", markup=False)
    if split is None:
        console.print("  too few steps to measure")
        return
    measures = [f"{'a call' if loop.unit == 'call' else 'step'} {seconds(split.step_s)}"]
    measures += [split.shown_busy()] if split.busy is not None else []
    measures += [f"W {split.input_wait:.1%}"] if split.input_wait is not None else []
    starts = loop.epoch_starts
    if starts is not None and starts.share >= SHOWN_SHARE:
        measures += [f"{seconds(starts.each_s)} before an epoch ({starts.share:.0%} of the time)"]
    console.print(f"  {', '.join(measures)}")
    if split.busy is None:
        console.print(f"  U was not measured: {split.no_busy}", markup=False)
    if split.no_wait:
        console.print(f"  W was not measured: {split.no_wait}", markup=False)
    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    for part, part_s in split.parts.items():
        table.add_row(escape(part), seconds(part_s), f"{part_s / split.step_s:.0%}")
    for cost in loop.costs:
        if cost.place is None and cost.share < SHOWN_SHARE:
            continue
        where = f" ({cost.place})" if cost.place else ""
        table.add_row(
            escape(f"  input: {cost.name}{where}"),
            f"{seconds(cost.cpu_s_per_sample)} CPU a sample",
            f"{cost.share:.0%} of input",
        )
    console.print(table)
