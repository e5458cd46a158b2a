"""`stoker jobs`, `stoker logs` and `stoker stop`: show jobs and their logs, and stop them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.commands.jobs.shown import print_jobs, report_problems, show_job, show_sweep
from stoker.cli.commands.monitor import Port, open_tensorboard
from stoker.cli.options import AsJson
from stoker.cli.output import print_result
from stoker.core.errors import ConfigError, UserError

if TYPE_CHECKING:
    from stoker.jobs.overview import Here
    from stoker.jobs.sweep import Sweep

RunsFolders = Annotated[
    list[Path] | None,
    typer.Option(
        "--runs",
        metavar="DIR",
        help="Additional folder of runs with jobs; may be repeated. The current experiment's folder is always included.",
    ),
]

JobName = Annotated[
    str,
    typer.Argument(
        help="ID of a job or a sweep, or the first characters of the ID; SWEEP/3: job 3 of a sweep.",
        metavar="JOB",
    ),
]

Worker = Annotated[
    str,
    typer.Argument(
        help="ID of a job, or the first characters of the ID; optionally followed by the number of a worker.",
        metavar="JOB[/WORKER]",
    ),
]

app = typer.Typer(
    help="List jobs, the newest first; `show JOB` shows one job.",
    rich_markup_mode=None,
    invoke_without_command=True,
)


@app.callback()
def list_(context: typer.Context, runs: RunsFolders = None, as_json: AsJson = False) -> None:
    """List all jobs, the newest first; exit 2 if a target does not answer."""
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
        if found or not problems:
            print_jobs(found)
    report_problems(problems)


@app.command()
def show(job: JobName, runs: RunsFolders = None, as_json: AsJson = False) -> None:
    """Show a job's state, why it waits or failed, its starts and its files; or all jobs of a sweep."""
    from stoker.jobs.overview import find_job
    from stoker.jobs.sweep_overview import find_element

    here = _here(runs)
    sweep, named = find_element(job, here)
    if sweep is not None:
        show_sweep(sweep, here, as_json=as_json)
        return
    known = find_job(named, here)
    show_job(known, as_json=as_json)


@app.command()
def tensorboard(job: JobName, port: Port = 6006, runs: RunsFolders = None) -> None:
    """Open the run of a job, or all runs of a sweep's experiment, in TensorBoard, on 127.0.0.1, until Ctrl-C."""
    from stoker.app.job_run import tensorboard_folder
    from stoker.jobs.places import find_place
    from stoker.jobs.sweep_overview import find_element

    here = _here(runs)
    sweep, named = find_element(job, here)
    if sweep is not None:
        open_tensorboard(sweep.runs / sweep.name, port)
    open_tensorboard(tensorboard_folder(find_place(named, here.runs)), port)


@app.command("port-forward")
def port_forward(
    job: Worker,
    ports: Annotated[
        list[str] | None,
        typer.Argument(
            help="Port of the worker, optionally with another port on this machine (0: a free port). Default: the port of the run's metrics.",
            metavar="[LOCAL:]REMOTE",
        ),
    ] = None,
    runs: RunsFolders = None,
) -> None:
    """Forward ports of a worker (metrics, profiler) to 127.0.0.1 of this machine, until Ctrl-C. Default: worker 0."""
    from stoker.app.job_run import metrics_port
    from stoker.jobs.forward import LOOPBACK, forwarded, parse_ports, reach_worker
    from stoker.jobs.overview import find_job

    here = _here(runs)
    named, rank = _named_worker(job, here)
    known, worker = find_job(named, here), rank or 0
    pairs = [parse_ports(each) for each in ports or []]
    connect = reach_worker(known, worker)
    if not pairs:
        pairs = [parse_ports(str(metrics_port(known.place)))]
    if connect is None:
        for pair in pairs:
            where = ", ".join(known.state.nodes) or "this machine"
            print_result(f"worker {worker} runs on {where}: {LOOPBACK}:{pair.remote}")
        return
    with forwarded(pairs, connect, on_problem=_print_problem) as opened:
        for pair, port in zip(pairs, opened, strict=True):
            print_result(f"{LOOPBACK}:{port} -> port {pair.remote} of worker {worker}")
        _wait_for_ctrl_c()


def _print_problem(problem: UserError) -> None:
    typer.echo(f"stoker: {problem.line()}", err=True)


def _wait_for_ctrl_c() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            signal.pause()


def logs(
    job: Worker,
    follow: Annotated[
        bool,
        typer.Option(
            "-f", "--follow", help="Print new output until the job is over, across its restarts."
        ),
    ] = False,
    runs: RunsFolders = None,
) -> None:
    """Print the output of a job's workers.

    The output of all starts is kept after the job has ended.
    """
    from stoker.jobs.overview import fetch_logs, find_job, lines_of, lines_of_place
    from stoker.jobs.places import find_place

    here = _here(runs)
    named, rank = _named_worker(job, here)
    if not follow:
        place = find_place(named, here.runs)
        if problem := fetch_logs(place, here.targets):
            typer.echo(f"stoker: {problem}", err=True)
        _print_lines(lines_of_place(place, here.targets, worker=rank))
        return
    known = find_job(named, here)
    if rank is not None and rank >= known.job.resources.workers:
        raise ConfigError(
            f"the workers of job {known.job.id} are 0 to {known.job.resources.workers - 1}",
            got=rank,
        )
    _print_lines(lines_of(known, here.targets, worker=rank))


def stop(job: JobName, runs: RunsFolders = None, as_json: AsJson = False) -> None:
    """End a job, or all jobs of a sweep, once the workers saved.

    If a job is over already, print only its state.
    """
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


def _stop_sweep(sweep: Sweep, here: Here, *, as_json: bool) -> None:
    from stoker.jobs.sweep_overview import stop_sweep

    stopped = stop_sweep(sweep, here)
    if as_json:
        print_result(json.dumps([asdict(each.state) for _, each in stopped.jobs if each]))
        return
    print_result(f"sweep {sweep.id}: {stopped.counts()}")


def _here(runs: list[Path] | None) -> Here:
    from stoker.jobs.overview import read_here

    return read_here(Path.cwd(), runs or [])


def _named_worker(job: str, here: Here) -> tuple[str, int | None]:
    """Return the job and the worker of `JOB/WORKER`; the worker is None if the text names none."""
    from stoker.jobs.sweep_overview import find_element

    sweep, named = find_element(job, here)
    if sweep is not None:
        raise ConfigError(
            "this command needs a job of the sweep", got=job, fix=f"E.g. {sweep.id}/0."
        )
    named, slash, worker = named.partition("/")
    return named, _rank(worker) if slash else None


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 6):
        raise ConfigError("WORKER in JOB/WORKER must be a number", got=text, fix="E.g. JOB/0.")
    return int(text)


def _print_lines(lines: Iterator[str]) -> None:
    """Print lines as they arrive; a closed pipe (`| head`) or Ctrl-C ends the printing, not the job."""
    try:
        for line in lines:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        return
    except BrokenPipeError:
        # Python flushes stdout again on exit, which would fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
