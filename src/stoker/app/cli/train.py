"""`stoker train`: the chain up to the trained model, or a rehearsal of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from stoker.app.cli.options import (
    AcceptChange,
    Again,
    AsJson,
    ExperimentFolder,
    Overrides,
    ResumeRun,
)
from stoker.app.cli.tolerant import print_result, tolerant
from stoker.app.cli.until import run_until
from stoker.app.resume import Resume

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Build the model, run two steps, export it untrained and ask it; train nothing.",
    ),
]
"""Finds on the first day what could not be trained, held in memory or served."""


def train(
    experiment: ExperimentFolder = Path(),
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    again: Again = False,
    dry_run: DryRun = False,
    resume: ResumeRun = None,
    accept_change: AcceptChange = False,
    as_json: AsJson = False,
) -> None:
    """Train the model; keep the best checkpoint and the measured utilisation.

    Stages before it run first where their inputs have changed.
    """
    if dry_run:
        _rehearse(experiment, overrides, as_json=as_json)
        return
    which = Resume(run=resume, accept_change=accept_change)
    run_until("train", experiment, overrides, again=again, as_json=as_json, resume=which)


def _rehearse(experiment: Path, overrides: list[str], *, as_json: bool) -> None:
    from dataclasses import asdict

    from rich.console import Console

    from stoker.app.cli.progress import ConsoleListener
    from stoker.app.cli.rehearsal import print_rehearsal
    from stoker.app.dry_run import dry_run
    from stoker.app.experiment import load_experiment

    loaded = load_experiment(experiment, overrides=overrides)
    with ConsoleListener() as listener:
        rehearsal = dry_run(loaded, listener)
    if as_json:
        print_result(json.dumps(asdict(rehearsal), indent=2))
    else:
        print_rehearsal(Console(file=tolerant(sys.stdout), highlight=False), rehearsal)
