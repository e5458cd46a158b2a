"""`stoker train` as one task of a cluster that another launcher has started: `TF_CONFIG` names all tasks.

The chief (worker 0 in a cluster without a chief) runs the stages before training. It then writes
the input of the training to a file in the runs folder, which all tasks must see at the same path. Every other task
waits for this file and trains with its own copy of the experiment folder. The tasks compare the settings with which
they were started, so that no task's settings are silently ignored. The file contains a heartbeat: if it does not
change, the chief was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from stoker.app.context import Context, Done, Work
from stoker.app.experiment import Experiment
from stoker.app.identity import shared_settings
from stoker.app.task.worker_process import WorkerSpec, ignore_progress, line_of, peer_failed
from stoker.app.task.workers_stage import require_strategy, spec_of, train_by
from stoker.cluster.launch import LaunchSettings
from stoker.cluster.resolver import ClusterSpec, read_tf_config
from stoker.core.errors import ConfigError, Plain, Preempted, Superseded
from stoker.core.fingerprint import fingerprint
from stoker.core.incarnation import own_incarnation

BEAT_S = 1.0
"""Interval of the chief's heartbeat, in seconds."""

POLL_S = 0.3
"""Poll interval of the waiting tasks, in seconds."""

RELEASE_S = 60.0
"""Maximum time that the chief waits until the other tasks know that nothing will be trained, seconds."""

LOG_EVERY_S = 60.0
"""Interval at which a waiting task logs that it waits, in seconds."""


def task_of(environ: Mapping[str, str]) -> ClusterSpec | None:
    """Return this process's role in a cluster, or None if it trains alone.

    Raises:
        ConfigError: `TF_CONFIG` is malformed, gives this process the role of an evaluator, or names
            parameter servers (no task would know when to stop them).
    """
    cluster = read_tf_config(environ)
    if cluster is None or cluster.trainers + len(cluster.servers) < 2:
        return None
    if cluster.servers:
        raise ConfigError(
            "parameter servers must be started by `stoker train`",
            got=Plain(f"TF_CONFIG with parameter servers: {len(cluster.servers)}"),
            fix="Unset TF_CONFIG and run `stoker train --workers 2 --parameter-servers 1`, or remove the servers.",
        )
    if cluster.job == "evaluator":
        raise ConfigError(
            "TF_CONFIG must give this process the role of a trainer",
            got=Plain("an evaluator"),
            fix="Remove the evaluator: training validates after each epoch, and `stoker evaluate` runs afterwards.",
        )
    return cluster


@contextlib.contextmanager
def coordinate(
    requested: Experiment, cluster: ClusterSpec, log: Callable[[str], None]
) -> Iterator[dict[str, Work]]:
    """Yield a function that replaces the work of the stage `train` in the cluster's leader.

    If the stage does not run (the model is already trained, or an earlier stage failed), the other tasks
    are released, because they would wait forever.

    Args:
        requested: The experiment without the settings of a lock file.
        cluster: This process's role in the cluster.
        log: Receives lines for the user.

    Raises:
        ConfigError: `train.strategy` is for a single process.
    """
    place, led = _place(requested, cluster), threading.Event()

    def lead(context: Context, folder: Path) -> Done:
        led.set()
        return _lead(context, folder, requested=requested, cluster=cluster, log=log)

    try:
        require_strategy(requested, servers=0)
        yield {"train": lead}
    except (Preempted, Superseded):
        # Do not release the waiting tasks. After a preemption, the restarted chief needs them. If a later start of the
        # job has begun, they are gone.
        raise
    except Exception as error:  # reported to the waiting tasks, then raised again
        if not led.is_set():
            log(f"{cluster.name} failed before training: the other tasks are informed")
            _release(place, cluster, line_of(error))
        raise
    if not led.is_set():
        _release(place, cluster, "")


def train_as_worker(
    requested: Experiment, cluster: ClusterSpec, log: Callable[[str], None]
) -> None:
    """Wait for the chief's file, and train with the cluster.

    Args:
        requested: The settings that this task was started with. They must equal the chief's, which training uses.
        cluster: This process's place in the cluster.
        log: Receives lines for the user.

    Raises:
        UserError: training failed, the settings differ from the chief's, or the chief failed before training.
        Preempted: this process received a signal, and a checkpoint was saved.
    """
    place = _place(requested, cluster)
    found = _wait_for_chief(place, cluster, log)
    if found["spec"] is None:
        with contextlib.suppress(OSError):  # the chief has stopped waiting
            (_barrier(place) / str(cluster.rank)).touch()
        if found["failed"]:
            raise peer_failed(cluster.leader, found["failed"])
        log(
            f"{cluster.name} has nothing to train: {cluster.leader} found the model already trained"
        )
        return
    spec = _with_own(WorkerSpec(**found["spec"]), requested)
    log(f"{cluster.name} trains with {cluster.leader} in run {spec.run_id}")
    with tempfile.TemporaryDirectory(prefix="stoker-join-") as scratch:
        train_by(
            spec,
            Path(scratch),
            settings=_settings(requested, cluster),
            log=log,
            progress=ignore_progress,
        )


def _with_own(spec: WorkerSpec, requested: Experiment) -> WorkerSpec:
    """Return the chief's spec with this task's own folder and settings."""
    # Use the chief's settings until all tasks have compared theirs: with different settings, a worker might fail or
    # hang before the other tasks know of the difference.
    settings = yaml.safe_load(spec.experiment) | {"folder": str(requested.folder)}
    return replace(spec, experiment=yaml.safe_dump(settings), requested=shared_settings(requested))


def _release(place: Path, cluster: ClusterSpec, failed: str) -> None:
    """Publish that nothing will be trained, until all tasks have read this or `RELEASE_S` have passed."""
    with _open_barrier(place) as barrier, _published(place, None, failed):
        until_s = time.monotonic() + RELEASE_S
        while len(list(barrier.iterdir())) < cluster.trainers - 1 and time.monotonic() < until_s:
            time.sleep(POLL_S)  # a shared file system sends no notification


def _settings(experiment: Experiment, cluster: ClusterSpec) -> LaunchSettings:
    return LaunchSettings(
        workers=cluster.trainers,
        cluster=cluster,
        # This process cannot try again: all tasks would have to restart, which only their launcher can do.
        max_restarts=0,
        watchdog_s=experiment.train.watchdog_s,
    )


def _lead(
    context: Context,
    folder: Path,
    *,
    requested: Experiment,
    cluster: ClusterSpec,
    log: Callable[[str], None],
) -> Done:
    place, settings = _place(requested, cluster), _settings(requested, cluster)
    with (
        _open_barrier(place) as barrier,
        tempfile.TemporaryDirectory(prefix="stoker-lead-") as scratch,
    ):
        spec = replace(
            spec_of(context, folder),
            barrier=str(barrier.resolve()),
            requested=shared_settings(requested),
        )
        with _published(place, spec):
            return train_by(
                spec, Path(scratch), settings=settings, log=log, progress=context.progress
            )


def _barrier(place: Path) -> Path:
    """Return the folder of the barrier."""
    return place.with_suffix(".ended")


@contextlib.contextmanager
def _open_barrier(place: Path) -> Iterator[Path]:
    """Create an empty barrier folder; remove it when the block ends."""
    barrier = _barrier(place)
    shutil.rmtree(barrier, ignore_errors=True)
    barrier.mkdir(parents=True)
    try:
        yield barrier
    finally:
        shutil.rmtree(barrier, ignore_errors=True)


def _place(experiment: Experiment, cluster: ClusterSpec) -> Path:
    """Return the path of the chief's file, which is the same for all tasks."""
    if (own := own_incarnation()) is not None:
        return own.folder / "cluster.json"
    return experiment.folder / experiment.runs / f".cluster-{fingerprint(cluster.jobs)[:16]}.json"


@contextlib.contextmanager
def _published(place: Path, spec: WorkerSpec | None, failed: str = "") -> Iterator[None]:
    """Publish the spec (None: nothing to train) or the failure, with a heartbeat that changes while the block runs."""
    over, message = threading.Event(), {"spec": spec and asdict(spec), "failed": failed}

    def publish() -> None:
        beat = 0
        while True:
            with contextlib.suppress(OSError):  # the next write may succeed
                _write(place, message | {"beat": f"{os.getpid()}-{beat}"})
            beat += 1
            if over.wait(BEAT_S):
                return

    thread = threading.Thread(target=publish, name="stoker-cluster", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        place.unlink(missing_ok=True)


def _write(place: Path, value: object) -> None:
    # No fsync, because the file is useless after a crash.
    made = place.with_suffix(".tmp")
    made.write_text(json.dumps(value))
    os.replace(made, place)


def _wait_for_chief(
    place: Path, cluster: ClusterSpec, log: Callable[[str], None]
) -> dict[str, Any]:
    first, logged_s = None, -LOG_EVERY_S
    while True:
        found = _read(place)
        if found is not None:
            if first is not None and found["beat"] != first:
                return found
            first = first or found["beat"]
        if time.monotonic() - logged_s >= LOG_EVERY_S:
            logged_s = time.monotonic()
            log(f"{cluster.name} waits until {cluster.leader} has prepared training, in {place}")
        time.sleep(POLL_S)  # a shared file system sends no notification


def _read(place: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(place.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"beat", "spec", "failed"} <= found.keys() else None
