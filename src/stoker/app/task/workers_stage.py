"""The stage `train` on several processes of this machine, each of which is `app/task/worker_process.py`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import yaml

from stoker.app.context import Context, Done
from stoker.app.experiment import Experiment
from stoker.app.task.worker_process import DONE, ERROR, WorkerSpec
from stoker.cluster.launch import LaunchSettings, WorkerFailed, launch
from stoker.cluster.launch.heartbeat import Beat
from stoker.core.errors import ConfigError, Plain, Preempted, UserError
from stoker.core.files import read_json, scratch_folder, write_json

SPEC = "spec.json"
"""What the workers are told."""


def on_workers(
    experiment: Experiment, *, workers: int, servers: int, pin: bool, say: Callable[[str], None]
) -> dict[str, Callable[[Context, Path], Done]]:
    """What does the work of the stage `train` instead, as `run_chain` takes it.

    Args:
        experiment: Its `train` section says how often workers start again, and when they hang.
        workers: Processes that compute steps.
        servers: Parameter servers.
        pin: Give each worker cores of its own.
        say: Takes the lines of all of them.

    Raises:
        ConfigError: `train.strategy` is one for a single process.
    """
    require_strategy(experiment, servers=servers)
    settings = LaunchSettings(
        workers=workers,
        servers=servers,
        pin=pin,
        max_restarts=experiment.train.max_restarts,
        watchdog_s=experiment.train.watchdog_s,
    )
    return {"train": functools.partial(train_on_workers, settings=settings, say=say)}


def require_strategy(experiment: Experiment, *, servers: int) -> None:
    """Refuse a strategy of one process for several.

    Raises:
        ConfigError: `train.strategy` is one for a single process.
    """
    spread = "parameter_server" if servers else "multi_worker"
    if experiment.train.strategy not in ("auto", spread):
        raise ConfigError(
            f"train.strategy must be auto or {spread} where several processes train together",
            got=experiment.train.strategy,
            fix="Leave it out of stoker.yaml, or leave --workers and TF_CONFIG out.",
        )


def train_on_workers(
    context: Context, folder: Path, *, settings: LaunchSettings, say: Callable[[str], None]
) -> Done:
    """Do the work of the stage `train` on several processes.

    Args:
        context: The experiment, and the stages before.
        folder: The stage's folder.
        settings: As for `train_by`, whose errors this raises and whose answer it gives.
        say: As for `train_by`.
    """
    with scratch_folder(folder.parent / "workers") as scratch:
        return train_by(
            spec_of(context, folder), scratch, settings=settings, say=say, tell=context.progress
        )


def train_by(
    spec: WorkerSpec,
    scratch: Path,
    *,
    settings: LaunchSettings,
    say: Callable[[str], None],
    tell: Callable[[str, float | None], None],
) -> Done:
    """Start what `app/task/worker_process.py` is, and wait for its end.

    Args:
        spec: What the workers are told.
        scratch: Takes it, and what they answer.
        settings: How many processes, and what is done when one fails.
        say: Takes the lines of all of them, and what happens to them.
        tell: Takes how far the first one is.

    Returns:
        What the first one reports.

    Raises:
        UserError: what a worker says is the user's to mend.
        WorkerFailed: a worker failed otherwise, once too often.
        Preempted: this process was asked to end, and the workers have.
    """

    def heard(beat: Beat) -> None:
        if beat.rank == 0 and beat.line:
            tell(beat.line, beat.share)

    write_json(scratch / SPEC, asdict(spec))
    command = [sys.executable, "-m", "stoker.app.task.worker_process", str(scratch / SPEC)]
    try:
        launched = launch(command, settings=settings, log=say, on_beat=heard)
    except WorkerFailed as failed:
        raise _said(scratch, failed) from failed
    if launched.preempted:
        raise Preempted(
            "training ends when its process is asked to",
            got=Plain("a signal, passed on to all workers"),
            fix="Everything is saved: run it again to go on.",
        )
    done = read_json(scratch / DONE)
    restarts = {"restarts": list(launched.restarts)} if launched.restarts else {}
    return Done(
        result=done["result"] | {"workers": settings.workers} | restarts,
        columns=tuple(done["columns"]),
        content=done["content"],
    )


def spec_of(context: Context, folder: Path) -> WorkerSpec:
    """What workers are told.

    Args:
        context: The experiment, and the stages before.
        folder: The stage's folder.
    """
    return WorkerSpec(
        experiment=yaml.safe_dump(context.experiment.to_json()),
        run_id=context.run_id,
        outputs={stage: str(output.resolve()) for stage, output in context.outputs.items()},
        identities=context.identities,
        results=context.results,
        accept_change=context.accept_change,
        folder=str(folder.resolve()),
    )


def _said(scratch: Path, failed: WorkerFailed) -> UserError:
    """The error that the worker wrote down, else that it failed."""
    answer = scratch / ERROR.format(rank=failed.failure.rank)
    if not failed.failure.is_final or not answer.is_file():
        return failed
    said = read_json(answer)
    error = UserError(said["line"])
    error.exit_code = said["exit_code"]
    return error
