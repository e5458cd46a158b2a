"""Output of `stoker jobs`: the list, a job, a sweep."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from stoker.cli.output import print_result
from stoker.core.errors import EXIT_USER

if TYPE_CHECKING:
    from stoker.app.job_run import JobRun
    from stoker.jobs.job import Resources
    from stoker.jobs.overview import Here, KnownJob, Listed
    from stoker.jobs.sweep import Sweep
    from stoker.jobs.sweep_overview import SweepState


def print_jobs(found: Sequence[Listed | SweepState]) -> None:
    """Print a line for each job or sweep."""
    _print_table([_row(each) for each in found])


def show_job(known: KnownJob, *, as_json: bool) -> None:
    """Print the facts of a job and of its run."""
    from stoker.app.job_run import run_of_job
    from stoker.jobs.overview import events_of

    run = run_of_job(known.place)
    if as_json:
        facts = {"state": asdict(known.state), "folder": str(known.place)}
        target = known.target.name if known.target else None
        shown = None if run is None else asdict(run) | {"folder": str(run.folder)}
        more: dict[str, Any] = {"target": target, "job": known.job.to_json(), "run": shown}
        more["events"] = [asdict(event) for event in events_of(known)]
        print_result(json.dumps(facts | more, indent=1))
        return
    for name, value in (*_facts(known), *_run_facts(known, run)):
        if value:
            print_result(f"{name + ':':<14}{value}")
    for event in events_of(known):
        times = f" ({event.times} times)" if event.times > 1 else ""
        at = _time(event.at_s)
        print_result(f"{at}  {event.about}  {event.reason}: {event.message}{times}")


def _row(each: Listed | SweepState) -> tuple[str, str, str, str, str]:
    """Return ID, target, phase, time and reason of a job; for a sweep, the counts of its jobs replace the reason."""
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


def show_sweep(sweep: Sweep, here: Here, *, as_json: bool) -> None:
    """Print a line for each job of a sweep."""
    from stoker.jobs.sweep_overview import state_of_sweep

    found, problems = state_of_sweep(sweep, here)
    _print_sweep(sweep, found, as_json=as_json)
    report_problems(problems)


def report_problems(problems: Sequence[str]) -> None:
    """Print a line for each target that did not answer. If there is one, the list is incomplete and the exit code 2."""
    for problem in problems:
        typer.echo(f"stoker: {problem}", err=True)
    if problems:
        raise typer.Exit(EXIT_USER)


def _print_sweep(sweep: Sweep, found: SweepState, *, as_json: bool) -> None:
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
    hours = needs.gpu_hours
    yield "budget", "" if hours is None else f"{hours:,.4g} GPU hours for each start"
    yield "workers", f"{needs.workers}, each with {_each(needs)}"
    yield "labels", ", ".join(f"{key}={value}" for key, value in job.labels.items())
    yield "command", f"stoker {' '.join(job.command)} {job.folder}"
    yield "code", job.code
    yield "folder", str(known.place)
    yield "logs", f"stoker logs {job.id}"


def _each(needs: Resources) -> str:
    """Return the resources of one worker as text; the target chooses values that are not set."""
    cores = f", {needs.cpus} core(s)" if needs.cpus else ""
    memory = f", {needs.memory_gib:g} GiB of memory" if needs.memory_gib else ""
    return f"{needs.gpus} GPU(s){cores}{memory}"


def _run_facts(known: KnownJob, run: JobRun | None) -> Iterator[tuple[str, str]]:
    from stoker.core.incarnation import INCARNATIONS
    from stoker.jobs.provider import Phase
    from stoker.measure.findings import shown_busy
    from stoker.pages.numbers import percent

    if run is None:
        if known.state.phase is Phase.RUNNING and not (known.place / INCARNATIONS).is_dir():
            where = f"{known.job.runs} of the workers is not seen from here"
            yield "run", f"{where}; its progress: stoker logs {known.job.id}"
        return
    yield "run", str(run.folder)
    if run.step is not None:
        epoch = "" if run.epoch is None else f", epoch {run.epoch:g}"
        yield "step", f"{run.step:,}{epoch}"
    busy = [] if run.busy_fraction is None else [f"U {shown_busy(run.busy_fraction)}"]
    parts = (
        ("MFU", run.mfu),
        ("W", run.input_wait),
        ("goodput so far", run.goodput),
    )
    shown = [f"{name} {percent(value)}" for name, value in parts if value is not None]
    yield "utilization", ", ".join(busy + shown)
    if run.tensorboard.is_dir():
        yield "TensorBoard", f"stoker jobs tensorboard {known.job.id}"


def _time(at_s: float | None) -> str:
    return "" if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
