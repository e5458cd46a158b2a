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
from stoker.cluster.devices import find_devices
from stoker.cluster.launch import LaunchSettings, WorkerFailed, launch
from stoker.cluster.launch.member import Beat
from stoker.core.errors import EXIT_SUPERSEDED, ConfigError, Plain, Preempted, UserError
from stoker.core.files import read_json, scratch_folder, write_json
from stoker.core.incarnation import require_newest
from stoker.train.elastic import require_size

SPEC = "spec.json"
"""File with the input of the workers."""


def on_workers(
    experiment: Experiment, *, workers: int, servers: int, pin: bool, log: Callable[[str], None]
) -> dict[str, Callable[[Context, Path], Done]]:
    """Return the argument `works` of `run_chain` that runs the stage `train` on several processes.

    Args:
        experiment: Its section `train` sets the maximum number of restarts and the watchdog's timeout.
        workers: Number of processes that compute steps.
        servers: Number of parameter servers.
        pin: Whether to pin each worker to its own CPU cores.
        log: Receives the output lines of all processes.

    Raises:
        ConfigError: `train.strategy` is for a single process, or an elastic training cannot have this number of
            workers.
    """
    require_strategy(experiment, servers=servers)
    if experiment.train.elastic is not None and not servers:
        _require_elastic_size(experiment, workers)
    settings = LaunchSettings(
        workers=workers,
        servers=servers,
        pin=pin,
        max_restarts=experiment.train.max_restarts,
        watchdog_s=experiment.train.watchdog_s,
    )
    return {"train": functools.partial(train_on_workers, settings=settings, log=log)}


def require_strategy(experiment: Experiment, *, servers: int) -> None:
    """Reject a strategy for a single process if several processes train.

    Raises:
        ConfigError: `train.strategy` is for a single process.
    """
    spread = "parameter_server" if servers else "multi_worker"
    if experiment.train.strategy not in ("auto", spread):
        raise ConfigError(
            f"train.strategy must be auto or {spread} when several processes train together",
            got=experiment.train.strategy,
            fix="Remove it from stoker.yaml, or train without --workers and TF_CONFIG.",
        )


def _require_elastic_size(experiment: Experiment, workers: int) -> None:
    """Refuse a number of workers that `train.elastic` does not allow."""
    settings = experiment.train
    each = (
        settings.replicas
        if settings.replicas != "auto"
        else max(1, len(find_devices().gpus) // workers)
    )
    if settings.elastic is not None:
        what = "workers" if each == 1 else "replicas over all workers"
        require_size(settings.elastic, workers * each, what=what)


def train_on_workers(
    context: Context, folder: Path, *, settings: LaunchSettings, log: Callable[[str], None]
) -> Done:
    """Do the work of the stage `train` on several processes.

    Args:
        context: The experiment, and the earlier stages.
        folder: Folder of the stage.
        settings: See `train_by`, whose result and errors are those of this function too.
        log: See `train_by`.
    """
    with scratch_folder(folder.parent / "workers") as scratch:
        return train_by(
            spec_of(context, folder), scratch, settings=settings, log=log, progress=context.progress
        )


def train_by(
    spec: WorkerSpec,
    scratch: Path,
    *,
    settings: LaunchSettings,
    log: Callable[[str], None],
    progress: Callable[[str, float | None], None],
) -> Done:
    """Start the worker processes, and wait until they exit.

    Args:
        spec: The input of the workers.
        scratch: Folder for the spec and for the answers.
        settings: Number of processes, and what to do when one fails.
        log: Receives the output lines and events of all processes.
        progress: Receives the progress of the first worker.

    Returns:
        The result of the first worker.

    Raises:
        UserError: a worker reported an error that the user must fix.
        WorkerFailed: workers failed for another reason, more often than `max_restarts`.
        Preempted: this process received a signal, and the workers have saved and exited.
    """

    def heard(beat: Beat) -> None:
        if beat.rank == 0 and beat.line:
            progress(beat.line, beat.share)

    write_json(scratch / SPEC, asdict(spec))
    command = [sys.executable, "-m", "stoker.app.task.worker_process", str(scratch / SPEC)]
    try:
        launched = launch(command, settings=settings, log=log, on_beat=heard)
    except WorkerFailed as failed:
        raise _error_of(scratch, failed) from failed
    if launched.preempted:
        raise Preempted(
            "training was stopped by a signal",
            got=Plain("a signal, forwarded to all workers"),
            fix="Everything is saved. Run the command again to continue.",
        )
    done = read_json(scratch / DONE)
    restarts = {"restarts": list(launched.restarts)} if launched.restarts else {}
    return Done(
        result=done["result"] | {"workers": settings.workers} | restarts,
        columns=tuple(done["columns"]),
        content=done["content"],
    )


def spec_of(context: Context, folder: Path) -> WorkerSpec:
    """Return the input of the workers.

    Args:
        context: The experiment, and the earlier stages.
        folder: Folder of the stage.
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


def _error_of(scratch: Path, failed: WorkerFailed) -> UserError:
    """Return the error that the worker recorded; if it recorded none, an error that says that it failed."""
    if failed.failure.code == EXIT_SUPERSEDED:
        require_newest()
    answer = scratch / ERROR.format(rank=failed.failure.rank)
    if not failed.failure.is_final or not answer.is_file():
        return failed
    recorded = read_json(answer)
    error = UserError(recorded["line"])
    error.exit_code = recorded["exit_code"]
    return error
