"""`stoker jobs`, `stoker logs` and `stoker stop`: what was submitted, and how it is doing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.options import AsJson
from stoker.cli.output import print_result
from stoker.core.errors import ConfigError

if TYPE_CHECKING:
    from stoker.jobs.overview import Here, KnownJob

RunsFolders = Annotated[
    list[Path] | None,
    typer.Option(
        "--runs",
        metavar="DIR",
        help="Folder of runs whose jobs count, too; may be repeated. The current experiment's counts anyway.",
    ),
]

JobName = Annotated[str, typer.Argument(help="Job's ID, or the beginning of it.", metavar="JOB")]

app = typer.Typer(
    help="List jobs, the newest first; `show` one.",
    rich_markup_mode=None,
    invoke_without_command=True,
)


@app.callback()
def list_(context: typer.Context, runs: RunsFolders = None, as_json: AsJson = False) -> None:
    """List all jobs, the newest first."""
    if context.invoked_subcommand is not None:
        return
    from stoker.jobs.overview import list_jobs

    listed, problems = list_jobs(_here(runs))
    for problem in problems:
        typer.echo(f"stoker: {problem}", err=True)
    if as_json:
        rows = [asdict(each.state) | {"target": each.target} for each in listed]
        print_result(json.dumps(rows, indent=1))
        return
    if not listed:
        print_result("no jobs; submit one: stoker submit EXPERIMENT --on local")
        return
    width = max(len(each.state.id) for each in listed)
    where = max(len(each.target) for each in listed)
    for each in listed:
        state = each.state
        reason = f"  {state.reason}" if state.reason else ""
        at = _time(state.submitted_s)
        print_result(
            f"{state.id:<{width}}  {each.target:<{where}}  {state.phase:<10}  {at:<20}{reason}".rstrip()
        )


@app.command()
def show(job: JobName, runs: RunsFolders = None, as_json: AsJson = False) -> None:
    """Show a job: its state, why it waits or failed, its starts, where its files are."""
    from stoker.jobs.overview import events_of, find_job

    known = find_job(job, _here(runs))
    if as_json:
        facts: dict[str, Any] = {"state": asdict(known.state), "folder": str(known.place)}
        facts |= {"target": known.target.name if known.target else None, "job": known.job.to_json()}
        facts["events"] = [asdict(event) for event in events_of(known)]
        print_result(json.dumps(facts, indent=1))
        return
    for name, value in _facts(known):
        if value:
            print_result(f"{name + ':':<14}{value}")
    for event in events_of(known):
        times = f" ({event.times} times)" if event.times > 1 else ""
        at = _time(event.at_s)
        print_result(f"{at}  {event.about}  {event.reason}: {event.message}{times}")


def logs(
    job: Annotated[
        str,
        typer.Argument(
            help="Job's ID or its beginning, and perhaps a worker.", metavar="JOB[/WORKER]"
        ),
    ],
    follow: Annotated[
        bool,
        typer.Option("-f", "--follow", help="Go on until the job is over, through its restarts."),
    ] = False,
    runs: RunsFolders = None,
) -> None:
    """Print what the workers of a job have printed, of all its starts; also of a job that is gone."""
    from stoker.jobs.overview import find_job, lines_of, lines_of_place
    from stoker.jobs.places import find_place

    here = _here(runs)
    named, slash, worker = job.partition("/")
    rank = _rank(worker) if slash else None
    if not follow:
        _print_lines(lines_of_place(find_place(named, here.runs), here.targets, worker=rank))
        return
    known = find_job(named, here)
    if rank is not None and rank >= known.job.resources.workers:
        raise ConfigError(
            f"the workers of job {known.job.id} are 0 to {known.job.resources.workers - 1}",
            got=rank,
        )
    _print_lines(lines_of(known, here.targets, worker=rank))


def stop(job: JobName, runs: RunsFolders = None, as_json: AsJson = False) -> None:
    """End a job after its workers have saved; of a job that is over, say so."""
    from stoker.jobs.overview import find_job, stop_job

    known = find_job(job, _here(runs))
    state = stop_job(known)
    if as_json:
        print_result(json.dumps(asdict(state)))
    elif known.state.phase.is_over:
        print_result(f"job {state.id} is over: {state.phase}")
    else:
        print_result(f"job {state.id} is {state.phase}; what its workers saved stays")


def _here(runs: list[Path] | None) -> Here:
    from stoker.jobs.overview import read_here

    return read_here(Path.cwd(), runs or [])


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 6):
        raise ConfigError("JOB/WORKER takes the number of a worker", got=text, fix="E.g. JOB/0.")
    return int(text)


def _facts(known: KnownJob) -> Iterator[tuple[str, str]]:
    state, job = known.state, known.job
    yield "job", job.id
    yield "state", f"{state.phase}{': ' if state.reason else ''}{state.reason}"
    yield "target", known.target.name if known.target else ""
    yield "scheduler", state.scheduler_id
    yield "submitted", _time(state.submitted_s)
    yield "expected", _time(state.expected_start_s)
    yield "started", _time(state.started_s)
    yield "ended", _time(state.ended_s)
    yield "restarts", str(state.restarts)
    yield "nodes", ", ".join(state.nodes)
    yield "GPU seconds", "" if state.gpu_seconds is None else f"{state.gpu_seconds:,.0f}"
    needs = job.resources
    yield "workers", f"{needs.workers}, {needs.gpus} GPU(s) each"
    yield "command", f"stoker {' '.join(job.command)} {job.folder}"
    yield "code", job.code
    yield "folder", str(known.place)
    yield "logs", f"stoker logs {job.id}"
    yield "TensorBoard", f"stoker monitor tensorboard {job.folder}"


def _time(at_s: float | None) -> str:
    return "" if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _print_lines(lines: Iterator[str]) -> None:
    """Print lines as they come; a reader that has gone (`| head`) or Ctrl-C ends it, not the job."""
    try:
        for line in lines:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        return
    except BrokenPipeError:
        # Python flushes once more on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
