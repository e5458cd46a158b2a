"""`stoker profile`: where a training's time goes, and what to do about it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from stoker.cli.commands.tune import Budget, seconds_of
from stoker.cli.options import AsJson, ExperimentFolder, Gpus, Overrides, use_gpus
from stoker.cli.stdout import print_result, tolerant
from stoker.core.errors import Plain, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from stoker.app.tuning.profiling import Profiled


_COMMAND = "stoker.profile.command"
"""Under which name the context holds what stands behind `--`."""


class BeforeCommand(TyperCommand):
    """Takes what stands before `--` as its own, and keeps what follows as it is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split once: the command may hold a `--` of its own."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND], args = args[at + 1 :], args[:at]
        return super().parse_args(ctx, args)


def profile(
    context: typer.Context,
    experiment: ExperimentFolder = Path(),
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    budget: Budget = "5m",
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", help="For a script: stop it after this many seconds; 0: no limit."
        ),
    ] = 0.0,
    out: Annotated[
        Path, typer.Option("--out", help="For a script: folder for its profile.")
    ] = Path("stoker-profile"),
    gpus: Gpus = None,
    as_json: AsJson = False,
) -> None:
    """Measure and explain one training: utilisation, where a step's time goes, what to change.

    `stoker profile -- python train.py` does the same to a script that knows nothing of Stoker.
    """
    command = context.meta.get(_COMMAND)
    _require_fitting(context, of_a_script=command is not None)
    use_gpus(gpus)
    if command is not None:
        _script(command, experiment, overrides, seconds=seconds, out=out, as_json=as_json)
        return
    from stoker.app.tuned_settings import load_tuned
    from stoker.app.tuning.profiling import profile as run_profile
    from stoker.cli.progress import ConsoleListener

    budget_s = seconds_of(budget)
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
    """An option of the other kind would be passed over without a word."""
    others = ("budget",) if of_a_script else ("seconds", "out")
    sources = {name: context.get_parameter_source(name) for name in others}
    given = [name for name, source in sources.items() if source and source.name != "DEFAULT"]
    if given:
        raise UserError(
            f"--{given[0]} is for {'an experiment' if of_a_script else 'a script'}",
            got=Plain("a command behind `--`" if of_a_script else "an experiment"),
            fix="A script is ended by --seconds, an experiment's measurement by --budget.",
        )


def _script(
    command: list[str],
    experiment: Path,
    overrides: list[str],
    *,
    seconds: float,
    out: Path,
    as_json: bool,
) -> None:
    from stoker.cli.commands.profile_script import profile_script_command

    if not command or experiment != Path() or overrides:
        raise UserError(
            "`stoker profile` takes an experiment, or `--` and a command",
            got=Plain(_given(experiment, overrides) if command else "nothing behind `--`"),
            fix="E.g. `stoker profile -- python train.py`.",
        )
    profile_script_command(command, as_json=as_json, out=out, seconds=seconds)


def _given(experiment: Path, overrides: list[str]) -> str:
    """What stands before the `--`, and should not."""
    settings = [f"--set {override}" for override in overrides]
    return " ".join([f"{experiment}"] * (experiment != Path()) + settings)


def _print(found: Profiled) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from stoker.app.tuning.profiling import rows_of
    from stoker.pages.numbers import seconds
    from stoker.tune.profile import PARTS

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
        stages = Table("stage of the input", "CPU a sample", "share")
        for stage in found.stages:
            took = seconds(stage["cpu_s_per_sample"])
            stages.add_row(escape(stage["name"]), took, f"{stage['share']:.1%}")
        console.print(stages)
    _print_device(console, found)
    console.print(found.diagnosis.text, markup=False)
    for finding in found.findings:
        console.print(finding.line(), markup=False)
    console.print(f"page   {found.page}", markup=False)


def _print_device(console: Console, found: Profiled) -> None:
    """Print the device time by class, and first the finding about it."""
    from rich.markup import escape
    from rich.table import Table

    from stoker.measure.device_page import class_rows, summary

    if found.no_device:
        console.print(f"The device's time was not measured: {found.no_device}.", markup=False)
    if found.device is None:
        return
    classes = Table("the device's time", "share")
    for label, share in class_rows(found.device):
        classes.add_row(escape(label), share)
    console.print(classes)
    console.print(summary(found.device), markup=False)
    if found.device_finding is not None:
        console.print(found.device_finding.text, markup=False)
