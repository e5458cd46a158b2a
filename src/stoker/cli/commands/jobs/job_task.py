"""`stoker job-start` and `stoker job-task`: what a scheduler runs on the machines of a job.

They are not in the list of `stoker --help`, because no person calls them.
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
    """Take the number of the next start of a job, and print it."""
    from stoker.app.task.job_start import start_job

    print_result(str(start_job(job)))


def job_task(
    job: JobFolder,
    incarnation: Annotated[
        int, typer.Option("--incarnation", min=1, help="Number that `stoker job-start` printed.")
    ],
) -> None:
    """Run one task of a job: find its place, unpack the code, run the job's command."""
    with ends_when_asked():  # until the task listens itself
        from stoker.app.task.job_task import run_task

        code = run_task(job, incarnation, out=tolerant(sys.stdout))
    raise typer.Exit(code)
