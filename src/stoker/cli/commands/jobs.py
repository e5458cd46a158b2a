"""`stoker jobs`, `stoker logs` and `stoker stop`: what was submitted, and how it is doing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import AsJson
from stoker.cli.output import print_result
from stoker.core.errors import ConfigError

if TYPE_CHECKING:
    from stoker.jobs.overview import Here, KnownJob, Listed
    from stoker.jobs.sweep import Sweep
    from stoker.jobs.sweep_overview import SweepState

RunsFolders = Annotated[
    list[Path] | None,
    typer.Option(
        "--runs",
        metavar="DIR",
        help="Folder of runs whose jobs count, too; may be repeated. The current experiment's counts anyway.",
    ),
]

JobName = Annotated[
    str,
    typer.Argument(
        help="Job's ID, or the beginning of it; or a sweep's, SWEEP/3 for its job 3.", metavar="JOB"
    ),
]

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
    from stoker.jobs.sweep_overview import list_with_sweeps

    here = _here(runs)
    if as_json:
        listed, problems = list_jobs(here)
        rows = [asdict(each.state) | {"target": each.target} for each in listed]
        print_result(json.dumps(rows, indent=1))
    else:
        found, problems = list_with_sweeps(here)
        _print_table([_row(each) for each in found])
    for problem in problems:
        typer.echo(f"stoker: {problem}", err=True)


@app.command()
def show(job: JobName, runs: RunsFolders = None, as_json: AsJson = False) -> None:
    """Show a job: its state, why it waits or failed, its starts, where its files are; of a sweep all its jobs."""
    from stoker.jobs.overview import find_job
    from stoker.jobs.sweep_overview import find_element

    here = _here(runs)
    sweep, named = find_element(job, here)
    if sweep is not None:
        _show_sweep(sweep, here, as_json=as_json)
        return
    known = find_job(named, here)
    if as_json:
        facts = {"state": asdict(known.state), "folder": str(known.place)}
        target = known.target.name if known.target else None
        print_result(json.dumps(facts | {"target": target, "job": known.job.to_json()}, indent=1))
        return
    for name, value in _facts(known):
        if value:
            print_result(f"{name + ':':<14}{value}")


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
    from stoker.jobs.logs import job_lines
    from stoker.jobs.overview import find_job, state_of
    from stoker.jobs.sweep_overview import find_element

    here = _here(runs)
    sweep, named = find_element(job, here)
    if sweep is not None:
        raise ConfigError("a sweep has no logs of its own", got=job, fix=f"E.g. {sweep.id}/0.")
    named, slash, worker = named.partition("/")
    rank = _rank(worker) if slash else None
    if not follow:
        from stoker.jobs.places import find_place

        _print_lines(job_lines(find_place(named, here.runs), worker=rank))
        return
    known = find_job(named, here)
    if rank is not None and rank >= known.job.resources.workers:
        raise ConfigError(
            f"the workers of job {known.job.id} are 0 to {known.job.resources.workers - 1}",
            got=rank,
        )

    def is_over() -> bool:
        return known.target is None or state_of(known.place, here.targets).phase.is_over

    _print_lines(job_lines(known.place, worker=rank, until=is_over))


def stop(job: JobName, runs: RunsFolders = None, as_json: AsJson = False) -> None:
    """End a job, or all jobs of a sweep, after its workers have saved; of a job that is over, say so."""
    from stoker.jobs.overview import find_job, stop_job
    from stoker.jobs.sweep_overview import find_element

    here = _here(runs)
    sweep, named = find_element(job, here)
    if sweep is not None:
        _stop_sweep(sweep, here, as_json=as_json)
        return
    known = find_job(named, here)
    state = stop_job(known)
    if as_json:
        print_result(json.dumps(asdict(state)))
    elif known.state.phase.is_over:
        print_result(f"job {state.id} is over: {state.phase}")
    else:
        print_result(f"job {state.id} is {state.phase}; what its workers saved stays")


def _row(each: Listed | SweepState) -> tuple[str, str, str, str, str]:
    """Return ID, target, phase, time and reason of a job; of a sweep the counts of its jobs instead of the reason."""
    from stoker.jobs.overview import Listed

    if isinstance(each, Listed):
        state = each.state
        return state.id, each.target, state.phase, _time(state.submitted_s), state.reason
    return each.sweep.id, each.target, "sweep", _time(each.submitted_s), each.counts()


def _print_table(rows: list[tuple[str, str, str, str, str]]) -> None:
    if not rows:
        print_result("no jobs; submit one: stoker submit EXPERIMENT --on local")
        return
    width, where = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, target, phase, at, reason in rows:
        print_result(
            f"{name:<{width}}  {target:<{where}}  {phase:<10}  {at:<20}  {reason}".rstrip()
        )


def _show_sweep(sweep: Sweep, here: Here, *, as_json: bool) -> None:
    from stoker.jobs.sweep_overview import state_of_sweep

    found, problems = state_of_sweep(sweep, here)
    for problem in problems:
        typer.echo(f"stoker: {problem}", err=True)
    if as_json:
        rows = [
            asdict(element) | {"state": asdict(known.state) if known else None}
            for element, known in found.jobs
        ]
        facts = {"sweep": sweep.id, "folder": str(sweep.place), "target": found.target}
        print_result(json.dumps(facts | {"elements": rows}, indent=1))
        return
    print_result(f"sweep {sweep.id} on {found.target}: {found.counts()}")
    settings = max(len(" ".join(element.settings)) for element, _ in found.jobs)
    for number, (element, known) in enumerate(found.jobs):
        phase, reason = (known.state.phase, known.state.reason) if known else ("unknown", "")
        values = " ".join(element.settings)
        line = f"{number:>4}  {element.job}  {values:<{settings}}  {phase:<10}  {reason}"
        print_result(line.rstrip())


def _stop_sweep(sweep: Sweep, here: Here, *, as_json: bool) -> None:
    from stoker.jobs.sweep_overview import state_of_sweep, stop_sweep

    states = stop_sweep(sweep, here)
    if as_json:
        print_result(json.dumps([asdict(state) for state in states]))
        return
    print_result(f"sweep {sweep.id}: {state_of_sweep(sweep, here)[0].counts()}")


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
