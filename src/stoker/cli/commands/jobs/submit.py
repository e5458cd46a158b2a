"""`stoker submit`: sends an experiment as a job to a target."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.commands.jobs.sweep import SweepOrder, submit_sweep
from stoker.cli.options import AsJson, ExperimentFolder, Overrides
from stoker.cli.output import print_result
from stoker.core.durations import seconds_of
from stoker.core.errors import ConfigError

if TYPE_CHECKING:
    from stoker.jobs.archive import Archive
    from stoker.jobs.job import Job

MIN_GIB, MAX_GIB = 0.125, 65536
"""Range of --memory: TensorFlow needs the minimum, and a larger number was probably meant as bytes or MiB."""


class JobVerb(StrEnum):
    """Stoker's commands that each worker of a job can run."""

    RUN = "run"
    INGEST = "ingest"
    ANALYZE = "analyze"
    TRANSFORM = "transform"
    TRAIN = "train"
    EXPORT = "export"
    EVALUATE = "evaluate"
    PUSH = "push"


def submit(
    on: Annotated[
        str, typer.Option("--on", metavar="NAME", help="Target: local, or a name in targets.yaml.")
    ],
    experiment: ExperimentFolder = Path(),
    verb: Annotated[
        JobVerb, typer.Option("--verb", help="Stoker's command that each worker runs.")
    ] = JobVerb.TRAIN,
    workers: Annotated[int, typer.Option("--workers", help="Processes that train together.")] = 1,
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs of each worker.")] = 0,
    cpus: Annotated[
        int | None,
        typer.Option("--cpus", min=1, help="Cores of each worker (default: the target's)."),
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            "--memory", metavar="GIB", help="Memory of each worker, GiB (default: the target's)."
        ),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            "--time-limit",
            help="Maximum time that the job runs each time it is started or restarted: 90s, 30m, 4h, 2d, 1h30m. The job saves before the limit, and continues when it is started again.",
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    secrets: Annotated[
        list[str] | None,
        typer.Option(
            "--secret",
            metavar="NAME",
            help="Name of an environment variable that the job needs; its value is never written to a file. May be repeated.",
        ),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="KEY=VALUE",
            help="Label of the job in the scheduler (on Slurm, a part of the job's comment); may be repeated.",
        ),
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(
            "--after",
            metavar="JOB",
            help="Job of the same target that must succeed before this job starts; may be repeated.",
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=VALUE,VALUE",
            help="Submit one job for each of these values; if repeated, one job for each combination.",
        ),
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            "--at-once",
            min=1,
            help="Maximum number of jobs of a sweep that run at the same time (default on local: 1).",
        ),
    ] = None,
    code_limit_mib: Annotated[
        int,
        typer.Option("--code-limit", metavar="MIB", min=1, help="Maximum size of the code, MiB."),
    ] = 64,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Let the target check the job, and print the files of its code and its manifests or script; do not submit it.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Submit an experiment as a job. A repeated submission finds the same job, and starts it again if it is over."""
    from stoker.app.experiment import prepare_source
    from stoker.app.submission import JobRequest, prepare_job
    from stoker.jobs.job import Resources
    from stoker.jobs.overview import EXPERIMENT
    from stoker.jobs.provider import Phase
    from stoker.jobs.submission import require_predecessors
    from stoker.jobs.submission import submit as submit_job
    from stoker.jobs.targets import find_target, read_targets

    request = JobRequest(
        folder=experiment,
        verb=verb.value,
        overrides=overrides,
        resources=Resources(
            workers=workers,
            gpus=gpus,
            cpus=cpus,
            memory_gib=None if memory_gib is None else plausible_gib(memory_gib),
            time_limit_s=None
            if time_limit is None
            else seconds_of(time_limit, name="--time-limit", least_s=1.0),
        ),
        secrets=secrets or (),
        labels=labels or (),
        after=after or (),
        limit_bytes=code_limit_mib << 20,
    )
    if sweep or at_once:
        order = SweepOrder(on=on, sweeps=sweep or (), at_once=at_once, dry_run=dry_run)
        submit_sweep(request, order, as_json=as_json)
        return
    loaded, job, archive = prepare_job(request)
    targets = read_targets(loaded.targets, file=loaded.folder / EXPERIMENT)
    target = find_target(on, targets)
    target.open().validate(job)
    require_predecessors(job, on, targets)
    if dry_run:
        described = target.open().describe(job, archive.content)
        _show_dry_run(job, archive, on, described, as_json=as_json)
        return
    prepare_source(loaded, lambda line: typer.echo(line, err=True))
    receipt = submit_job(job, archive, target=target, targets=targets)
    if as_json:
        facts = {"job": job.id, "target": receipt.target, "already": receipt.already}
        state = asdict(receipt.state)
        print_result(json.dumps(facts | {"folder": str(job.place), "state": state}))
        return
    print_result(f"job {job.id} {_how(receipt.already, again=receipt.again)} on {receipt.target}")
    if receipt.already:
        print_result(f"it is {receipt.state.phase}; nothing was submitted a second time")
    if receipt.state.phase is Phase.RUNNING and receipt.state.reason:
        print_result(f"it is running: {receipt.state.reason}")
    print_result(f"logs: stoker logs -f {job.id}; end it: stoker stop {job.id}")


def plausible_gib(memory_gib: float) -> float:
    """Return the value of --memory.

    Raises:
        ConfigError: the number is out of range.
    """
    if not MIN_GIB <= memory_gib <= MAX_GIB:  # false for NaN too
        raise ConfigError(
            f"--memory must be from {MIN_GIB} to {MAX_GIB} GiB",
            got=memory_gib,
            fix="E.g. --memory 16.",
        )
    return memory_gib


def _how(already: bool, *, again: bool) -> str:
    if already:
        return "is there already"
    return "starts again" if again else "was submitted"


def _show_dry_run(job: Job, archive: Archive, on: str, described: str, *, as_json: bool) -> None:
    if as_json:
        facts = {"job": job.id, "target": on, "submitted": False, "code": archive.sizes}
        print_result(json.dumps(facts | {"description": job.to_json(), "would_submit": described}))
        return
    size, packed = sum(archive.sizes.values()), len(archive.content)
    print_result(f"job {job.id} could be submitted to {on}; nothing was written")
    print_result(f"command: stoker {' '.join(job.command)}")
    print_result(f"code: {len(archive.sizes)} files, {size:,} bytes, {packed:,} bytes packed")
    for name, bytes_ in sorted(archive.sizes.items()):
        print_result(f"  {name} ({bytes_:,} bytes)")
    print_result(f"what {on} would get:")
    print_result(described.rstrip("\n"))
