"""`stoker train` as one task of a cluster that another launcher has started: `TF_CONFIG` names all of them.

The chief, or where there is none worker 0, does the stages before training. By a file beside the runs,
which must lie where all tasks see it at the same path, it tells what is to be trained; every other task
waits for that, and trains with it. A file that a killed chief left is known by that it does not change.
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

from stoker.app.context import Context, Done, Work
from stoker.app.experiment import Experiment
from stoker.app.worker import WorkerSpec
from stoker.app.workers_stage import require_strategy, spec_of, train_by
from stoker.cluster.launch import LaunchSettings
from stoker.cluster.resolver import ClusterSpec, read_tf_config
from stoker.core.errors import ConfigError, Plain, Preempted, UserError
from stoker.core.fingerprint import fingerprint

BEAT_S = 1.0
"""Pause between two signs of life of the chief."""

POLL_S = 0.3
"""Pause between two looks for them."""

LET_GO_S = 60.0
"""Longest that the chief waits for the others to hear that there is nothing to train."""

SAY_EVERY_S = 60.0
"""A task that waits says so as often."""


def task_of(environ: Mapping[str, str]) -> ClusterSpec | None:
    """What this process is of a cluster of several, None where it is alone.

    Raises:
        ConfigError: `TF_CONFIG` is malformed, makes an evaluator of this process, or names parameter
            servers, of which nobody would know when they may end.
    """
    cluster = read_tf_config(environ)
    if cluster is None or cluster.trainers + len(cluster.servers) < 2:
        return None
    if cluster.servers:
        raise ConfigError(
            "parameter servers must be started by us",
            got=Plain(f"TF_CONFIG with {len(cluster.servers)} of them"),
            fix="Unset TF_CONFIG, and `stoker train --workers 2 --parameter-servers 1`; or leave them out.",
        )
    if cluster.job == "evaluator":
        raise ConfigError(
            "TF_CONFIG must make a trainer of this process",
            got=Plain("an evaluator"),
            fix="Leave it out: training validates by itself, and `stoker evaluate` comes after it.",
        )
    return cluster


@contextlib.contextmanager
def leading(
    experiment: Experiment, cluster: ClusterSpec, say: Callable[[str], None]
) -> Iterator[dict[str, Work]]:
    """What does the work of the stage `train` instead, where this process leads.

    Where that is not asked for it, the model was trained already, or a stage before has failed: then the
    others are told, who would wait for ever.

    Raises:
        ConfigError: `train.strategy` is one for a single process.
    """
    settings, place = _settings(experiment, cluster), _place(experiment, cluster)
    led = threading.Event()

    def lead(context: Context, folder: Path) -> Done:
        led.set()
        return _lead(context, folder, settings=settings, cluster=cluster, say=say)

    try:
        yield {"train": lead}
    except Preempted:
        # Started again, it leads those who wait.
        raise
    except Exception as error:
        if not led.is_set():
            say(f"{cluster.name} has failed before training: the others are told")
            _let_go(place, cluster, _line_of(error))
        raise
    if not led.is_set():
        _let_go(place, cluster, "")


def join(experiment: Experiment, cluster: ClusterSpec, say: Callable[[str], None]) -> None:
    """Wait for the chief, and train with it.

    Raises:
        ConfigError: `train.strategy` is one for a single process.
        UserError: what went wrong in training, or with the chief before.
        Preempted: this process was asked to end, and has saved.
    """
    settings = _settings(experiment, cluster)
    place = _place(experiment, cluster)
    found = _awaited(place, cluster, say)
    if found["spec"] is None:
        with contextlib.suppress(OSError):  # it has waited long enough
            (_meeting(place) / str(cluster.rank)).touch()
        if found["failed"]:
            raise UserError(
                f"{cluster.leader} must come as far as training",
                got=Plain(found["failed"]),
                fix="Mend that, and start all tasks again.",
            )
        say(f"{cluster.name} has nothing to train: {cluster.leader} has found it trained")
        return
    spec = WorkerSpec(**found["spec"])
    say(f"{cluster.name} trains with {cluster.leader} in run {spec.run_id}")
    with tempfile.TemporaryDirectory(prefix="stoker-join-") as scratch:
        train_by(spec, Path(scratch), settings=settings, say=say, tell=_nobody)


def _let_go(place: Path, cluster: ClusterSpec, failed: str) -> None:
    """Tell those who wait that there is nothing to train, until all have heard it or a minute has gone by."""
    with _met(place) as meeting, _told(place, None, failed):
        until_s = time.monotonic() + LET_GO_S
        while len(list(meeting.iterdir())) < cluster.trainers - 1 and time.monotonic() < until_s:
            time.sleep(POLL_S)  # others write there, of whom nothing tells


def _line_of(error: Exception) -> str:
    return error.line() if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _nobody(line: str, share: float | None) -> None:
    """How far training is, the chief tells."""


def _settings(experiment: Experiment, cluster: ClusterSpec) -> LaunchSettings:
    require_strategy(experiment, servers=0)
    return LaunchSettings(
        workers=cluster.trainers,
        cluster=cluster,
        # All would have to begin again: whoever started them does that.
        max_restarts=0,
        watchdog_s=experiment.train.watchdog_s,
    )


def _lead(
    context: Context,
    folder: Path,
    *,
    settings: LaunchSettings,
    cluster: ClusterSpec,
    say: Callable[[str], None],
) -> Done:
    place = _place(context.experiment, cluster)
    with _met(place) as meeting, tempfile.TemporaryDirectory(prefix="stoker-lead-") as scratch:
        spec = replace(spec_of(context, folder), meeting=str(meeting.resolve()))
        with _told(place, spec):
            return train_by(spec, Path(scratch), settings=settings, say=say, tell=context.progress)


def _meeting(place: Path) -> Path:
    """Where each task says that it has ended."""
    return place.with_suffix(".ended")


@contextlib.contextmanager
def _met(place: Path) -> Iterator[Path]:
    """Nobody has ended yet."""
    meeting = _meeting(place)
    shutil.rmtree(meeting, ignore_errors=True)
    meeting.mkdir(parents=True)
    try:
        yield meeting
    finally:
        shutil.rmtree(meeting, ignore_errors=True)


def _place(experiment: Experiment, cluster: ClusterSpec) -> Path:
    """The file by which the tasks of this cluster find what is trained."""
    return experiment.runs_root / f".cluster-{fingerprint(cluster.jobs)[:16]}.json"


@contextlib.contextmanager
def _told(place: Path, spec: WorkerSpec | None, failed: str = "") -> Iterator[None]:
    """The spec lies there, None for that there is nothing to train, and why; and its beat changes."""
    over, told = threading.Event(), {"spec": spec and asdict(spec), "failed": failed}

    def tell() -> None:
        beat = 0
        while True:
            with contextlib.suppress(OSError):  # the next one may be written
                _write(place, told | {"beat": f"{os.getpid()}-{beat}"})
            beat += 1
            if over.wait(BEAT_S):
                return

    thread = threading.Thread(target=tell, name="stoker-cluster", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        place.unlink(missing_ok=True)


def _write(place: Path, value: object) -> None:
    # Not to the disk: it is of use to nobody after a crash.
    made = place.with_suffix(".tmp")
    made.write_text(json.dumps(value))
    os.replace(made, place)


def _awaited(place: Path, cluster: ClusterSpec, say: Callable[[str], None]) -> dict[str, Any]:
    first, said_s = None, -SAY_EVERY_S
    while True:
        found = _read(place)
        if found is not None:
            if first is not None and found["beat"] != first:
                return found
            first = first or found["beat"]
        if time.monotonic() - said_s >= SAY_EVERY_S:
            said_s = time.monotonic()
            say(f"{cluster.name} waits until {cluster.leader} has prepared training, in {place}")
        time.sleep(POLL_S)  # a shared file system tells nobody of a change elsewhere


def _read(place: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(place.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"beat", "spec", "failed"} <= found.keys() else None
