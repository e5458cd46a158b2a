"""Options and arguments that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

ExperimentFolder = Annotated[
    Path, typer.Argument(help="The folder with stoker.yaml.", metavar="EXPERIMENT")
]
"""The experiment folder; default: the current folder."""

Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting, e.g. train.epochs=3."),
]
"""Any number of `--set a.b=value`."""

Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="LIST",
        help="GPUs to use: indices as in nvidia-smi, or UUIDs, e.g. 0,2 or GPU-8932f937 or MIG-...; "
        "none: use the CPU. Default: all that CUDA_VISIBLE_DEVICES allows.",
    ),
]
"""`use_gpus` applies the option before TensorFlow is imported; child processes inherit it."""

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
"""For programs; messages for the user go to stderr."""

ResumeRun = Annotated[
    str | None,
    typer.Option("--resume", metavar="RUN", help="Continue this run, e.g. 20261121T184133Z-4f1a."),
]
"""Default: the newest unfinished run with equal inputs."""

AcceptChange = Annotated[
    bool,
    typer.Option(
        "--accept-change",
        help="Continue although settings, code, data or versions have changed; the run records the change.",
    ),
]
"""Without it, a run continues only if its inputs have not changed."""

Again = Annotated[
    bool, typer.Option("--again", help="Run this stage again even if nothing has changed.")
]
"""Only the last stage runs again; earlier stages are still skipped if nothing has changed."""


def use_gpus(listed: str | None) -> None:
    """Make only the listed GPUs visible to this process and its children; None changes nothing.

    Raises:
        ConfigError: a name is malformed, unknown or listed twice, or no driver was found.
    """
    if listed is None:
        return
    from stoker.cluster.doctor.gpus import read_gpus
    from stoker.cluster.doctor.visible import choose_gpus, unused_slices

    variables = choose_gpus(listed, read_gpus())
    if unused := unused_slices(variables):
        typer.echo(
            f"stoker: CUDA gives each process one MIG slice: {unused} of the listed slices are for "
            "other workers",
            err=True,
        )
    os.environ.update(variables)
