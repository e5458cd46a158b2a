"""`stoker train` as one task of a cluster that another launcher has started: `TF_CONFIG` names all of them.

The chief, or where there is none worker 0, does the stages before training. By a file among the runs,
which must lie where all tasks see them at the same path, it tells what is to be trained; every other task
waits for that, and trains it with its own copy of the experiment's folder. What each was started with
itself is a part of the handshake, so that nobody's settings are passed over in silence. A file that a killed chief left is known by that it does not change.
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
from stoker.app.identity import asked_settings
from stoker.app.task.barrier import line_of, not_come
from stoker.app.task.worker_process import WorkerSpec
from stoker.app.task.workers_stage import require_strategy, spec_of, train_by
from stoker.cluster.launch import LaunchSettings
from stoker.cluster.resolver import ClusterSpec, read_tf_config
from stoker.core.errors import ConfigError, Plain, Preempted
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
    asked: Experiment, cluster: ClusterSpec, say: Callable[[str], None]
) -> Iterator[dict[str, Work]]:
    """What does the work of the stage `train` instead, where this process leads.

    Where that is not asked for it, the model was trained already, or a stage before has failed: then the
    others are told, who would wait for ever.

    Args:
        asked: What this task was started with; what is trained may have more, from a lock file.
        cluster: This process's place.
        say: Takes lines for a person.

    Raises:
        ConfigError: `train.strategy` is one for a single process.
    """
    place, led = _place(asked, cluster), threading.Event()

    def lead(context: Context, folder: Path) -> Done:
        led.set()
        return _lead(context, folder, asked=asked, cluster=cluster, say=say)

    try:
        require_strategy(asked, servers=0)
        yield {"train": lead}
    except Preempted:
        # Started again, it leads those who wait.
        raise
    except Exception as error:
        if not led.is_set():
            say(f"{cluster.name} has failed before training: the others are told")
            _let_go(place, cluster, line_of(error))
        raise
    if not led.is_set():
        _let_go(place, cluster, "")


def join(asked: Experiment, cluster: ClusterSpec, say: Callable[[str], None]) -> None:
    """Wait for the chief, and train with it.

    Args:
        asked: What this task was started with; what is trained is the chief's.
        cluster: This process's place.
        say: Takes lines for a person.

    Raises:
        UserError: what went wrong in training, this task was not started as the chief was among it; or
            what went wrong with the chief before.
        Preempted: this process was asked to end, and has saved.
    """
    place = _place(asked, cluster)
    found = _awaited(place, cluster, say)
    if found["spec"] is None:
        with contextlib.suppress(OSError):  # it has waited long enough
            (_meeting(place) / str(cluster.rank)).touch()
        if found["failed"]:
            raise not_come(cluster.leader, found["failed"])
        say(f"{cluster.name} has nothing to train: {cluster.leader} has found it trained")
        return
    spec = _with_own(WorkerSpec(**found["spec"]), asked)
    say(f"{cluster.name} trains with {cluster.leader} in run {spec.run_id}")
    with tempfile.TemporaryDirectory(prefix="stoker-join-") as scratch:
        train_by(spec, Path(scratch), settings=_settings(asked, cluster), say=say, tell=_nobody)


def _with_own(spec: WorkerSpec, asked: Experiment) -> WorkerSpec:
    """What the chief tells, by this task's own code."""
    # The chief's settings until all are known to be alike: with other ones a worker might fail, or
    # wait for what never comes, before the others could be told.
    settings = yaml.safe_load(spec.experiment) | {"folder": str(asked.folder)}
    return replace(spec, experiment=yaml.safe_dump(settings), asked=asked_settings(asked))


def _let_go(place: Path, cluster: ClusterSpec, failed: str) -> None:
    """Tell those who wait that there is nothing to train, until all have heard it or a minute has gone by."""
    with _met(place) as meeting, _told(place, None, failed):
        until_s = time.monotonic() + LET_GO_S
        while len(list(meeting.iterdir())) < cluster.trainers - 1 and time.monotonic() < until_s:
            time.sleep(POLL_S)  # others write there, of whom nothing tells


def _nobody(line: str, share: float | None) -> None:
    """How far training is, the chief tells."""


def _settings(experiment: Experiment, cluster: ClusterSpec) -> LaunchSettings:
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
    asked: Experiment,
    cluster: ClusterSpec,
    say: Callable[[str], None],
) -> Done:
    place, settings = _place(asked, cluster), _settings(asked, cluster)
    with _met(place) as meeting, tempfile.TemporaryDirectory(prefix="stoker-lead-") as scratch:
        spec = replace(
            spec_of(context, folder),
            meeting=str(meeting.resolve()),
            asked=asked_settings(asked),
        )
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
    """The file by which the tasks of this cluster find what is trained, whatever name each has for it."""
    return experiment.folder / experiment.runs / f".cluster-{fingerprint(cluster.jobs)[:16]}.json"


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
