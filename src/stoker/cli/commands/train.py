"""`stoker train`: the chain up to the trained model, or a dry run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.app.runs.resume import Resume
from stoker.cli.options import (
    AcceptChange,
    Again,
    AsJson,
    ExperimentFolder,
    Gpus,
    Overrides,
    ResumeRun,
    use_gpus,
)
from stoker.cli.run_stages import Works, run_until
from stoker.cli.stdout import print_result, tolerant
from stoker.core.errors import ConfigError

if TYPE_CHECKING:
    from stoker.app.context import Work
    from stoker.app.experiment import Experiment

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Build the model, run two steps, export and call the untrained model; do not train.",
    ),
]
"""Finds early what cannot be trained, does not fit in memory or cannot be served."""

Workers = Annotated[
    int | None,
    typer.Option("--workers", help="Train with this number of processes on this machine."),
]
"""None: train in this process."""

Servers = Annotated[
    int,
    typer.Option(
        "--parameter-servers", help="With --workers: number of processes that hold the variables."
    ),
]
"""With parameter servers, workers do not wait for each other."""

Pin = Annotated[
    bool, typer.Option("--pin", help="With --workers: pin each worker to its own CPU cores.")
]
"""Otherwise the workers share all cores, and each uses its share of the threads."""


def train(
    experiment: ExperimentFolder = Path(),
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    again: Again = False,
    dry_run: DryRun = False,
    workers: Workers = None,
    servers: Servers = 0,
    pin: Pin = False,
    resume: ResumeRun = None,
    accept_change: AcceptChange = False,
    gpus: Gpus = None,
    as_json: AsJson = False,
) -> None:
    """Train the model; keep the best checkpoint and the measured utilization.

    Earlier stages run first if their inputs have changed.
    """
    use_gpus(gpus)
    if dry_run:
        _rehearse(experiment, overrides, as_json=as_json)
        return
    which = Resume(run=resume, accept_change=accept_change)
    works = _on_workers(workers, servers, pin=pin)
    run_until(
        "train", experiment, overrides, again=again, as_json=as_json, resume=which, works=works
    )


def _on_workers(workers: int | None, servers: int, *, pin: bool) -> Works | None:
    if workers is None:
        if servers or pin:
            raise ConfigError(
                "--parameter-servers and --pin need --workers", fix="Add --workers 2."
            )
        return None

    def works(experiment: Experiment, log: Callable[[str], None]) -> Mapping[str, Work]:
        from stoker.app.task.workers_stage import on_workers

        return on_workers(experiment, workers=workers, servers=servers, pin=pin, log=log)

    return works


def _rehearse(experiment: Path, overrides: list[str], *, as_json: bool) -> None:
    from dataclasses import asdict

    from rich.console import Console

    from stoker.app.dry_run import dry_run
    from stoker.app.tuned_settings import load_tuned
    from stoker.cli.dry_run_output import print_rehearsal
    from stoker.cli.progress import ConsoleListener

    loaded = load_tuned(experiment, overrides=overrides)
    with ConsoleListener(loaded.lock_note) as listener:
        rehearsal = dry_run(loaded.used, listener)
    if as_json:
        print_result(json.dumps(asdict(rehearsal), indent=2))
    else:
        print_rehearsal(Console(file=tolerant(sys.stdout), highlight=False), rehearsal)
