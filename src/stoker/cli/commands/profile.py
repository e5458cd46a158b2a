"""`stoker profile`: shows how the training of an experiment or a script spends its time."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from stoker.cli.commands.tune import Budget, budget_of
from stoker.cli.options import AsJson, ExperimentFolder, Gpus, Overrides, use_gpus
from stoker.cli.output import print_result, tolerant
from stoker.core.errors import ConfigError, Plain, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from stoker.scriptprofile import ScriptProfile
    from stoker.scriptprofile.loops import Loop
    from stoker.tune.report import ProfileReport


_COMMAND = "stoker.profile.command"
"""Key of the command after `--` in `typer.Context.meta`."""


OUT = Path("stoker-profile")
"""Default folder of the profile."""


class BeforeCommand(TyperCommand):
    """Parses the arguments before `--`, and stores the command after it in the context."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the arguments at the first `--`; the command may contain another `--`."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND], args = args[at + 1 :], args[:at]
        elif args and (args[0].endswith(".py") or args[0].startswith("python")):
            command = shlex.join(args if args[0].startswith("python") else ["python", *args])
            raise ConfigError(
                "the command of a script to profile must follow `--`",
                got=Plain(shlex.join(args)),
                fix=f"Run stoker profile -- {command}.",
            )
        return super().parse_args(ctx, args)


def profile(
    context: typer.Context,
    experiment: ExperimentFolder = Path(),
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    budget: Budget = "5m",
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            help="For a script: stop it after this many seconds (default: 0, no limit).",
        ),
    ] = 0.0,
    out: Annotated[
        Path, typer.Option("--out", help="For a script: folder to write its profile to.")
    ] = OUT,
    gpus: Gpus = None,
    as_json: AsJson = False,
) -> None:
    """Measure a training, and explain how it spends its time.

    The report says how busy the device is, and what to change. `stoker profile -- python train.py`
    does the same for a script without Stoker.
    """
    command = context.meta.get(_COMMAND)
    _require_fitting(context, of_a_script=command is not None)
    use_gpus(gpus)
    if command is not None:
        _require_command_alone(command, experiment, overrides)
        profile_script_command(command, as_json=as_json, out=out, seconds=seconds)
        return
    from stoker.app.tuned_settings import load_tuned
    from stoker.app.tuning.profiling import profile as run_profile
    from stoker.cli.progress import ConsoleListener

    budget_s = budget_of(budget)
    loaded = load_tuned(experiment, overrides=overrides)
    with ConsoleListener(loaded.lock_note) as listener:
        found = run_profile(
            loaded.used,
            log=listener.log,
            progress=lambda line: listener.progress(line, None),
            budget_s=budget_s,
        )
    if as_json:
        print_result(json.dumps(found.to_json(), indent=2))
    else:
        _print(found)


def _require_fitting(context: typer.Context, *, of_a_script: bool) -> None:
    """Reject an option for an experiment if a script is profiled, and the reverse."""
    others = ("budget",) if of_a_script else ("seconds", "out")
    sources = {name: context.get_parameter_source(name) for name in others}
    given = [name for name, source in sources.items() if source and source.name != "DEFAULT"]
    if given:
        raise UserError(
            f"--{given[0]} is for {'an experiment' if of_a_script else 'a script'}",
            got=Plain("a command after `--`" if of_a_script else "an experiment"),
            fix="Use --seconds to limit a script, and --budget to limit the measurement of an experiment.",
        )


def _require_command_alone(command: list[str], experiment: Path, overrides: list[str]) -> None:
    if not command or experiment != Path() or overrides:
        raise UserError(
            "`stoker profile` takes an experiment, or `--` and a command",
            got=Plain(_given(experiment, overrides) if command else "nothing after `--`"),
            fix="E.g. `stoker profile -- python train.py`.",
        )


def _given(experiment: Path, overrides: list[str]) -> str:
    """Return the unexpected arguments before `--`."""
    settings = [f"--set {override}" for override in overrides]
    return " ".join([f"{experiment}"] * (experiment != Path()) + settings)


def _print(found: ProfileReport) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from stoker.pages.numbers import seconds
    from stoker.tune.profile import PARTS
    from stoker.tune.report import rows_of

    console = Console(file=tolerant(sys.stdout), highlight=False, soft_wrap=True)
    facts = Table(show_header=False)
    for row in rows_of(found):
        facts.add_row(*map(escape, row))
    console.print(facts)
    parts = Table("part of a step", "time", "share")
    split = found.profile.split
    for name, share in split.shares().items():
        parts.add_row(PARTS[name], seconds(share * split.step_s), f"{share:.1%}")
    console.print(parts)
    if found.stages:
        stages = Table("stage of the input", "CPU per sample", "share")
        for stage in found.stages:
            took = seconds(stage["cpu_s_per_sample"])
            stages.add_row(escape(stage["name"]), took, f"{stage['share']:.1%}")
        console.print(stages)
    _print_device(console, found)
    console.print(found.diagnosis.text, markup=False)
    for finding in found.findings:
        console.print(finding.line(), markup=False)
    console.print(f"page   {found.page}", markup=False)


def _print_device(console: Console, found: ProfileReport) -> None:
    """Print the device time by class of kernels, its summary and the finding about it."""
    from rich.markup import escape
    from rich.table import Table

    from stoker.measure.device_page import class_rows, summary

    if found.no_device:
        console.print(f"The device time was not measured: {found.no_device}.", markup=False)
    if found.device is None:
        return
    classes = Table("the device's time", "share")
    for label, share in class_rows(found.device):
        classes.add_row(escape(label), share)
    console.print(classes)
    console.print(summary(found.device), markup=False)
    if found.device_finding is not None:
        console.print(found.device_finding.text, markup=False)


UNBROKEN = 10_000
"""Console width if stdout is not a terminal, characters; so wide that lines are not wrapped."""

SHOWN_SHARE = 0.05
"""An input stage with a smaller share of the input's CPU time is printed only if it is the user's code."""


def profile_script_command(
    command: Sequence[str], *, as_json: bool = False, out: Path = OUT, seconds: float = 0.0
) -> None:
    """Run a command, print where its training spent its time, and exit with the command's exit code.

    Args:
        command: Argument vector.
        as_json: Print the profile as JSON on stdout; the output of the command goes to stderr.
        out: Folder of profile.json and profile.html.
        seconds: Stop the command after this many seconds; 0: no limit.

    Raises:
        UserError: the command cannot be started, or `seconds` is negative.
        typer.Exit: the command failed; with its exit code.
    """
    from rich.console import Console

    from stoker.core.files import write_atomic, write_json
    from stoker.scriptprofile import profile_script
    from stoker.scriptprofile.page import page_html

    if not seconds >= 0:
        raise UserError("--seconds must be 0 or more", got=seconds, fix="Use 0 for no limit.")
    stdout = 2 if as_json else None
    profile = profile_script(command, folder=out, seconds=seconds or None, stdout=stdout)
    write_json(out / "profile.json", profile.to_json())
    # The page contains paths, which may not be valid UTF-8.
    write_atomic(out / "profile.html", page_html(profile).encode(errors="backslashreplace"))
    if as_json:
        print_result(json.dumps(profile.to_json(), indent=2, sort_keys=True, allow_nan=False))
    else:
        # Wrap lines on a terminal only.
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else UNBROKEN
        console = Console(file=tolerant(sys.stdout), highlight=False, width=width)
        print_profile(console, profile)
        console.print(f"written: {out / 'profile.json'}, {out / 'profile.html'}", markup=False)
    if profile.exit_code:
        raise typer.Exit(profile.exit_code)


def print_profile(console: Console, profile: ScriptProfile) -> None:
    """Print a table for each loop, the findings, and failures of the watcher in the script's process."""
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
        console.print("\nAlso found, with less effect here:")
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
            f"{seconds(cost.cpu_s_per_sample)} CPU per sample",
            f"{cost.share:.0%} of input",
        )
    console.print(table)
