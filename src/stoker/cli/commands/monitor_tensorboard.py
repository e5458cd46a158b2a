"""`stoker monitor tensorboard`: TensorBoard with the runs of an experiment."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from stoker.cli.options import ExperimentFolder, Overrides
from stoker.core.errors import ConfigError, Plain

Port = Annotated[int, typer.Option(help="Port of 127.0.0.1; 0: a free one.", min=0, max=65535)]


def tensorboard(
    experiment: ExperimentFolder = Path(),
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    port: Port = 6006,
) -> None:
    """Open the runs of an experiment in TensorBoard, on 127.0.0.1, until Ctrl-C."""
    from stoker.app.experiment import load_experiment

    loaded = load_experiment(experiment, overrides=overrides)
    runs = loaded.runs_root
    if not any(runs.glob("*/train/tensorboard")):
        raise ConfigError(
            "the experiment must have a run that has begun to train",
            got=Plain(f"none in {runs}"),
            fix="Run `stoker train` first.",
        )
    open_tensorboard(runs, port)


def open_tensorboard(runs: Path, port: int) -> NoReturn:
    """Replace this process by TensorBoard, on 127.0.0.1.

    Args:
        runs: Folder whose logs it shows, with those of all folders below.
        port: 0: a free one.
    """
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs)]
    where = ["--host", "127.0.0.1", "--port", str(port)]
    os.execv(sys.executable, [*command, *where])  # noqa: S606 - signals reach TensorBoard itself
