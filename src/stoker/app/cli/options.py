"""What several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ExperimentFolder = Annotated[
    Path, typer.Argument(help="The folder with stoker.yaml.", metavar="[EXPERIMENT]")
]
"""Where the experiment is; the current folder by default."""

Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting, e.g. train.epochs=3."),
]
"""Any number of `--set a.b=value`."""

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
"""For other programs; what a person reads goes to stderr."""

ResumeRun = Annotated[
    str | None,
    typer.Option(
        "--resume", metavar="RUN", help="Go on with this run, e.g. 20261121T184133Z-4f1a."
    ),
]
"""By default the newest unfinished run of equal inputs is gone on with."""

AcceptChange = Annotated[
    bool,
    typer.Option(
        "--accept-change",
        help="Go on though settings, code, data or versions have changed; the run records it.",
    ),
]
"""Without it a run goes on as what it began as."""

Again = Annotated[
    bool, typer.Option("--again", help="Do this stage again even where nothing has changed.")
]
"""Takes no notice of an earlier output of the last stage."""
