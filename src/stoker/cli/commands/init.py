"""`stoker init`: writes stoker.yaml and model.py for the user's data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="A CSV, JSON Lines, Parquet or TFRecord file, or a folder with one folder of images per "
            "class: a local path, s3:// or gs://.",
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder to write to (default: a new folder named after the data)."),
    ] = None,
    label: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the experiment (default: the folder's name).")
    ] = None,
) -> None:
    """Write stoker.yaml and model.py for your data.

    `stoker run` works with the files as written; edit them as you like.
    """
    from stoker.scaffold import default_name, write_experiment

    target = folder or Path(name or default_name(source))
    if folder is None and target.is_dir() and target.resolve() == Path(source).resolve():
        target = Path(f"{target}-experiment")
    # The name of a folder that the user gave is better for the model than `data`.
    named = name or (folder.resolve().name if folder else None)
    made = write_experiment(target, source, label=label, name=named)
    for path in made.files:
        typer.echo(f"wrote {path}")
    typer.echo(made.note)
    typer.echo(f"next: stoker run {target}")
