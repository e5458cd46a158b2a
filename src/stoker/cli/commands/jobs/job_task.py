"""`stoker job-start` and `stoker job-task`: commands that a scheduler runs on the machines of a job.

`stoker --help` does not list them, because users do not call them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.output import print_result, tolerant
from stoker.core.signals import ends_when_asked

JobFolder = Annotated[Path, typer.Argument(help="Folder of the job: RUNS/.jobs/ID.")]
"""All tasks see it at the same path."""


def job_start(job: JobFolder) -> None:
    """Reserve and print the number of a job's next start."""
    from stoker.app.task.job_start import start_job

    print_result(str(start_job(job)))


def job_task(
    job: JobFolder,
    incarnation: Annotated[
        int, typer.Option("--incarnation", min=1, help="Number that `stoker job-start` printed.")
    ],
) -> None:
    """Run one task of a job: find its rank, unpack the code, run the job's command."""
    with ends_when_asked():  # until the task installs its own handlers
        from stoker.app.task.job_task import run_task

        code = run_task(job, incarnation, out=tolerant(sys.stdout))
    raise typer.Exit(code)
