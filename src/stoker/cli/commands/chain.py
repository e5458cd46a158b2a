"""`stoker run`, `stoker train`, and the commands that run the stages up to a named one."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.options import (
    AcceptChange,
    Again,
    AsJson,
    ExperimentFolder,
    Gpus,
    Overrides,
    ResumeRun,
    use_gpus,
)
from stoker.cli.output import print_result, tolerant
from stoker.core.errors import ConfigError
from stoker.telemetry.run_time import seconds_of_run, until_now
from stoker.telemetry.wall_time import WallTime, goodput

if TYPE_CHECKING:
    from stoker.app.chain import StageOutcome
    from stoker.app.context import Work
    from stoker.app.experiment import Experiment
    from stoker.app.run_folder import Resume

Log = Callable[[str], None]
"""Receives lines for the user."""

Works = Callable[["Experiment", Log], "Mapping[str, Work]"]
"""Yields functions that replace the work of stages: stage -> function."""

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Build the model, run two steps, export and call the untrained model; do not train.",
    ),
]
"""Finds early that a model cannot be trained, does not fit in memory or cannot be served."""

Workers = Annotated[
    int | None,
    typer.Option("--workers", help="Train with this number of processes on this machine."),
]
"""Default: train in this process."""

Servers = Annotated[
    int,
    typer.Option(
        "--parameter-servers", help="With --workers: number of processes that hold the variables."
    ),
]
"""With parameter servers, workers do not wait for each other (asynchronous training)."""

Pin = Annotated[
    bool, typer.Option("--pin", help="With --workers: pin each worker to its own CPU cores.")
]
"""Without it, all workers run on all cores, and each starts its share of the threads."""


def run(
    experiment: ExperimentFolder = Path(),
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    resume: ResumeRun = None,
    accept_change: AcceptChange = False,
    gpus: Gpus = None,
    as_json: AsJson = False,
) -> None:
    """Run the stages whose inputs have changed, then test the model in a server.

    The test calls the server with rows of the eval split. A killed run continues where it stopped.
    Stages with unchanged inputs are skipped.
    """
    use_gpus(gpus)
    from rich.console import Console

    from stoker.app.chain import run_chain
    from stoker.app.import_tensorflow import import_tensorflow
    from stoker.app.run_folder import Resume
    from stoker.app.tuned_settings import load_tuned
    from stoker.cli.progress import ConsoleListener

    wall = WallTime.of_process()
    loaded = load_tuned(experiment, overrides=overrides)
    with ConsoleListener(loaded.lock_note) as listener:
        if loaded.used.resources.accelerators is not None:
            listener.log(
                "This run uses this machine; the section `resources` applies to jobs on a cluster only."
            )
        if _trained_as_worker(loaded.written, listener.log):
            return
        which = Resume(run=resume, accept_change=accept_change)
        with _coordinated(loaded.written, listener.log) as works:
            result = run_chain(loaded.used, listener, resume=which, works=works, wall=wall)
        listener.stage_began("serve")
        import_tensorflow()
        from stoker.app.release import start_rollout
        from stoker.app.smoke_test import smoke_test
        from stoker.cli.summary import print_summary

        tested = smoke_test(loaded.used, result)
        listener.stage_ended(tested.outcome)
        if line := start_rollout(loaded.used, result.results["push"]["version"]):
            listener.log(line)
    if as_json:
        facts = [
            {"stage": o.stage, "skipped": o.skipped, "took_s": o.took_s, "output": str(o.output)}
            | {"result": o.result}
            for o in [*result.outcomes, tested.outcome]
        ]
        answers = [asdict(answer) for answer in tested.answers]
        print_result(
            json.dumps({"run": str(result.run), "stages": facts, "answers": answers}, indent=2)
        )
    else:
        console = Console(file=tolerant(sys.stdout), highlight=False)
        print_summary(console, loaded.used, experiment, result, tested, overrides=overrides)


def train(
    experiment: ExperimentFolder = Path(),
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    again: Again = False,
    dry_run: DryRun = False,
    workers: Workers = None,
    servers: Servers = 0,
    pin: Pin = False,
    resume: ResumeRun = None,
    accept_change: AcceptChange = False,
    gpus: Gpus = None,
    as_json: AsJson = False,
) -> None:
    """Train the model, and measure how busy the device was.

    The best epoch is kept. Earlier stages run first if their inputs have changed.
    """
    use_gpus(gpus)
    if dry_run:
        _dry_run(experiment, overrides, as_json=as_json)
        return
    from stoker.app.run_folder import Resume

    which = Resume(run=resume, accept_change=accept_change, again=again)
    works = _on_workers(workers, servers, pin=pin)
    _run_until("train", experiment, overrides, as_json=as_json, resume=which, works=works)


def _on_workers(workers: int | None, servers: int, *, pin: bool) -> Works | None:
    if workers is None:
        if servers or pin:
            raise ConfigError(
                "--parameter-servers and --pin need --workers", fix="Add --workers 2."
            )
        return None

    def works(experiment: Experiment, log: Callable[[str], None]) -> Mapping[str, Work]:
        from stoker.app.task.workers_stage import on_workers

        return on_workers(experiment, workers=workers, servers=servers, pin=pin, log=log)

    return works


def _dry_run(experiment: Path, overrides: list[str], *, as_json: bool) -> None:
    from rich.console import Console

    from stoker.app.dry_run import dry_run
    from stoker.app.tuned_settings import load_tuned
    from stoker.cli.progress import ConsoleListener
    from stoker.cli.summary import print_dry_run

    loaded = load_tuned(experiment, overrides=overrides)
    with ConsoleListener(loaded.lock_note) as listener:
        found = dry_run(loaded.used, listener)
    if as_json:
        print_result(json.dumps(asdict(found), indent=2))
    else:
        print_dry_run(Console(file=tolerant(sys.stdout), highlight=False), found)


def _run_until(
    stage: str,
    experiment: Path,
    overrides: list[str],
    *,
    as_json: bool,
    resume: Resume,
    works: Works | None = None,
) -> None:
    """Run the chain up to a stage, and print the folder of its output.

    Args:
        stage: The last stage.
        experiment: The folder with stoker.yaml.
        overrides: `key=value` strings; each overrides one setting.
        as_json: Print JSON instead of the folder: the facts of the last stage, with the warnings of all stages.
        resume: The run to continue, and whether the last stage runs again.
        works: Functions that replace the work of stages; None: the leader's functions if `TF_CONFIG` is set.
    """
    from stoker.app.chain import run_chain
    from stoker.app.release import start_rollout
    from stoker.app.stages import STAGES
    from stoker.app.tuned_settings import load_tuned
    from stoker.cli.progress import ConsoleListener

    wall = WallTime.of_process()
    loaded = load_tuned(experiment, overrides=overrides)
    names = [each.name for each in STAGES]
    trains = names.index(stage) >= names.index("train")
    with ConsoleListener(loaded.lock_note) as listener, contextlib.ExitStack() as held:
        replaced: Mapping[str, Work] = {}
        if trains and works is not None:
            replaced = works(loaded.used, listener.log)
        elif trains:
            if _trained_as_worker(loaded.written, listener.log):
                return
            replaced = held.enter_context(_coordinated(loaded.written, listener.log))
        result = run_chain(
            loaded.used, listener, until=stage, resume=resume, works=replaced, wall=wall
        )
        if stage == "push" and (
            line := start_rollout(loaded.used, result.results["push"]["version"])
        ):
            listener.log(line)
    last = result.outcomes[-1]
    if as_json:
        facts = {"run": str(result.run), "output": str(last.output), "skipped": last.skipped}
        print_result(
            json.dumps(facts | _until_now(last, wall) | {"warnings": result.warnings}, indent=2)
        )
    else:
        print_result(str(last.output))


def _trained_as_worker(experiment: Experiment, log: Log) -> bool:
    """Train as a worker if `TF_CONFIG` names another process as the leader; return whether it does.

    Args:
        experiment: The settings that this process was started with, without a lock file.
        log: Receives lines for the user.
    """
    from stoker.app.task.worker import task_of, train_as_worker

    cluster = task_of(os.environ)
    if cluster is None or cluster.leads:
        return False
    train_as_worker(experiment, cluster, log)
    return True


@contextlib.contextmanager
def _coordinated(experiment: Experiment, log: Log) -> Iterator[Mapping[str, Work]]:
    """Yield replacements for the work of stages: for `train` if this process is the chief of `TF_CONFIG`, else none."""
    from stoker.app.task.worker import coordinate, task_of

    cluster = task_of(os.environ)
    if cluster is None:
        yield {}
        return
    with coordinate(experiment, cluster, log) as works:
        yield works


def _until_now(outcome: StageOutcome, wall: WallTime) -> dict[str, Any]:
    """Return a stage's facts; if this process trained, the wall time is extended to now, to cover the shutdown."""
    facts: dict[str, Any] = {**outcome.result}
    # With several workers, these facts are the first worker's: its times are not extended.
    if (
        outcome.stage != "train"
        or outcome.skipped
        or "wall_time" not in facts
        or "workers" in facts
    ):
        return facts
    report = until_now(facts["wall_time"], wall)
    trained = facts["goodput"] is not None
    return facts | {
        "goodput": goodput(seconds_of_run(report)) if trained else None,
        "wall_time": report,
    }


_HELP = {
    "ingest": "Check every record; write the train and eval splits.",
    "analyze": "Write statistics, a schema and a report of the data.",
    "transform": "Compute the constants of preprocessing_fn; save its graph.",
    "export": "Write a SavedModel that takes raw features, and check it.",
    "evaluate": "Measure the SavedModel on the eval split. Exit code 3 if a gate fails.",
    "push": "Publish the model as the next version of the repository.",
}


def _command(stage: str) -> Callable[..., None]:
    def command(
        experiment: ExperimentFolder = Path(),
        overrides: Overrides = [],  # noqa: B006 - typer copies it
        again: Again = False,
        gpus: Gpus = None,
        as_json: AsJson = False,
    ) -> None:
        use_gpus(gpus)
        from stoker.app.run_folder import Resume

        _run_until(stage, experiment, overrides, as_json=as_json, resume=Resume(again=again))

    command.__doc__ = f"{_HELP[stage]}\n\nEarlier stages run first if their inputs have changed."
    return command


COMMANDS = {
    **{stage: _command(stage) for stage in ("ingest", "analyze", "transform")},
    "train": train,
    **{stage: _command(stage) for stage in ("export", "evaluate", "push")},
}
"""Name -> command, in the order of the stages."""
