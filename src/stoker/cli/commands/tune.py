"""`stoker tune`: searches for faster settings; `--check` measures the settings of its lock file again."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import AsJson, ExperimentFolder, Gpus, Overrides, use_gpus
from stoker.cli.output import print_result, tolerant
from stoker.core.durations import seconds_of
from stoker.core.errors import EXIT_CHECK

if TYPE_CHECKING:
    from stoker.app.tuning.tuning import Check, Tuning

Budget = Annotated[
    str,
    typer.Option(
        "--budget",
        help="Time limit: 90s, 10m, 1h. Settings that were accepted before the limit are kept.",
    ),
]
"""Limit of wall time."""


def tune(
    experiment: ExperimentFolder = Path(),
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    budget: Budget = "20m",
    parity_steps: Annotated[
        int,
        typer.Option(
            "--parity-steps", min=10, help="Number of steps for which loss curves are compared."
        ),
    ] = 100,
    lever_timeout_s: Annotated[
        float,
        typer.Option(
            "--lever-timeout-s",
            min=1.0,
            help="Treat the trial of a setting as hung after this many seconds without an answer.",
        ),
    ] = 300.0,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Change nothing: measure the figures of the lock file again; exit code 3 if one is no longer reached.",
        ),
    ] = False,
    gpus: Gpus = None,
    as_json: AsJson = False,
) -> None:
    """Measure settings, and write the faster ones to a lock file.

    One setting is changed at a time, and measured in a new process, alternating with the current settings.
    A change that affects the numerical results is kept only if it changes the loss curve no more than a new seed does.
    """
    budget_s = budget_of(budget)
    use_gpus(gpus)
    if check:
        _check(experiment, overrides, as_json=as_json)
        return
    from stoker.app.experiment import load_experiment
    from stoker.app.tuning.tuning import as_json as tuning_as_json
    from stoker.app.tuning.tuning import tune as run_tuning
    from stoker.cli.progress import ConsoleListener
    from stoker.tune.search import Limits

    loaded = load_experiment(experiment, overrides=overrides)
    with ConsoleListener() as listener:

        def log(line: str, left_s: float) -> None:
            listener.log(f"{_time(left_s)} left  {line}")

        limits = Limits(budget_s=budget_s, parity_steps=parity_steps, lever_s=lever_timeout_s)
        tuning = run_tuning(
            loaded,
            limits=limits,
            log=log,
            progress=lambda line: listener.progress(line, None),
        )
    if as_json:
        facts = tuning_as_json(tuning.tuned, usd_per_hour=loaded.resources.usd_per_hour)
        files = {"lock": str(tuning.lock), "report": str(tuning.report)}
        facts["kept_lock"] = tuning.kept_lock
        print_result(json.dumps(facts | files | {"ledger": str(tuning.ledger)}, indent=2))
    else:
        _print(tuning)


def budget_of(text: str) -> float:
    """Return a budget in seconds; a number without a unit is seconds.

    Raises:
        ConfigError: the text is not a duration of at least a second.
    """
    text = text.strip()
    is_number = re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII)
    return seconds_of(f"{text}s" if is_number else text, name="--budget", least_s=1.0)


def _check(folder: Path, overrides: list[str], *, as_json: bool) -> None:
    from dataclasses import asdict

    from stoker.app.tuned_settings import load_tuned
    from stoker.app.tuning.tuning import check
    from stoker.cli.progress import ConsoleListener

    loaded = load_tuned(folder, overrides=overrides)
    with ConsoleListener(loaded.lock_note) as listener:
        found = check(loaded.used, progress=lambda line: listener.progress(line, None))
    if as_json:
        print_result(json.dumps(asdict(found), indent=2))
    else:
        _print_check(found)
    if found.broken:
        raise typer.Exit(EXIT_CHECK)


def _print_check(found: Check) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(file=tolerant(sys.stdout), highlight=False)
    table = Table("", Column("promised", justify="right"), Column("now", justify="right"))
    for name in ("busy_fraction", "input_wait", "samples_per_s", "epoch_s"):
        pair = (found.promised.get(name), found.measured.get(name))
        # Noise of the measurement can raise the busy fraction above 1.
        most = 1.0 if name == "busy_fraction" else math.inf
        table.add_row(
            name, *("" if value is None else f"{min(most, value):,.4g}" for value in pair)
        )
    console.print(table)
    for line in found.broken:
        console.print(f"broken: {line}", markup=False)
    if not found.broken:
        console.print("The figures of the lock file are still reached.")
    for note in filter(None, (found.slower, found.not_quiet)):
        console.print(note, markup=False)


def _print(tuning: Tuning) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    tuned = tuning.tuned
    console = Console(file=tolerant(sys.stdout), highlight=False, soft_wrap=True)
    console.print(f"Before: {tuned.diagnosis_before.text}", markup=False)
    table = Table(*(Column(name, overflow="fold") for name in ("lever", "decision", "why")))
    for outcome in tuned.outcomes:
        table.add_row(escape(outcome.lever), outcome.decision, escape(outcome.why))
    console.print(table)
    before, after = tuned.before, tuned.after
    console.print(
        f"{after.samples_per_s / before.samples_per_s:.2f}x: {before.samples_per_s:,.0f} -> "
        f"{after.samples_per_s:,.0f} samples/s, U {min(1.0, before.busy_fraction):.0%} -> "
        f"{min(1.0, after.busy_fraction):.0%}, W {before.input_wait:.0%} -> {after.input_wait:.0%}; "
        f"{tuned.ended}, {tuned.took_s:.0f} s"
    )
    if tuning.kept_lock:
        console.print(
            "The tuning ended early without keeping a setting: the earlier lock file is unchanged."
        )
    for name, path in (("lock", tuning.lock), ("report", tuning.report)):
        console.print(f"{name:<7}{path}", markup=False)


def _time(left_s: float) -> str:
    minutes, seconds = divmod(int(left_s), 60)
    return f"{minutes:>3}:{seconds:02d}"
