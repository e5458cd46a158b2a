"""`python -m stoker.app.task.worker_process SPEC.json`: one of several processes that train together.

`SPEC.json` holds a `WorkerSpec`, and `TF_CONFIG` the process's role in the cluster. The process does the work of the
stage `train`, and writes the result or the error to files next to the spec.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from stoker.app.context import Context, Done, StageResults
from stoker.app.experiment import Experiment
from stoker.app.import_tensorflow import import_tensorflow
from stoker.app.own_stages import stages_of
from stoker.cluster.resolver import ClusterSpec, read_tf_config, require_own_port
from stoker.core import log_lines
from stoker.core.config import build
from stoker.core.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_PREEMPTED,
    DataError,
    Plain,
    Superseded,
    UserError,
)
from stoker.core.files import read_json, write_json
from stoker.core.signals import ASKING, ends_when_asked, heard
from stoker.telemetry.wall_time import WallTime
from stoker.train.context.heartbeat import Heartbeat, process_heartbeat

DONE = "done.json"
"""File with the stage's result, written by the first worker."""

ERROR = "error-{rank}.json"
"""File with a worker's `UserError`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """The input of a worker: the experiment, the outputs of earlier stages, and its folder."""

    experiment: str
    """All settings, as YAML, because the keys of `class_weight` are numbers, which JSON cannot represent."""

    run_id: str
    """ID of the run."""

    outputs: dict[str, str]
    """Output folder of each stage."""

    identities: dict[str, str]
    """Identity of each stage's record."""

    results: StageResults
    """Recorded result of each stage."""

    accept_change: bool
    """Whether to continue from a checkpoint that was made with other inputs."""

    folder: str
    """Folder of the stage `train`, shared by all workers."""

    barrier: str = ""
    """Folder of the barrier if another launcher started the tasks; else empty."""

    requested: dict[str, Any] = field(default_factory=dict)
    """Settings that this task was started with, if another launcher started it."""

    def context(
        self,
        progress: Callable[[str, float | None], None],
        *,
        wait_for_all: Callable[[], None] = lambda: None,
        wall: WallTime | None = None,
    ) -> Context:
        """Return the input of the stage `train`; the arguments are those of `Context`."""
        return Context(
            experiment=build(Experiment, yaml.safe_load(self.experiment)),
            run_id=self.run_id,
            outputs={stage: Path(output) for stage, output in self.outputs.items()},
            identities=self.identities,
            results=self.results,
            progress=progress,
            accept_change=self.accept_change,
            requested=self.requested,
            wait_for_all=wait_for_all,
            wall=wall or WallTime(),
        )


def ignore_progress(line: str, share: float | None) -> None:
    """Do nothing; used where another process reports progress, or progress is not shown."""


def main(spec_path: Path) -> int:
    """Train as one of several processes; return the exit code."""
    heartbeat = process_heartbeat()
    if log_lines.wants_json([], os.environ):
        log_lines.enable(os.environ)
    try:
        with ends_when_asked():
            spec = WorkerSpec(**read_json(spec_path))
            log_lines.set_facts(run=spec.run_id, worker=str(heartbeat.rank))
            done = _train_in_cluster(spec, heartbeat) if spec.barrier else _train(spec, heartbeat)
    except UserError as error:
        answer = {"line": error.line(), "exit_code": error.exit_code}
        try:
            write_json(spec_path.with_name(ERROR.format(rank=heartbeat.rank)), answer)
        except UserError:  # a later start of the job has begun, or the disk is full
            sys.stderr.write(f"{error.line()}\n")
        return error.exit_code
    except Exception:  # noqa: BLE001 - the process boundary: all but a UserError is a bug
        traceback.print_exc()
        return EXIT_BUG
    if heartbeat.rank == 0:
        write_json(spec_path.with_name(DONE), asdict(done))
    heartbeat.finish()
    return EXIT_DONE


def _train_in_cluster(spec: WorkerSpec, heartbeat: Heartbeat) -> Done:
    """Train as a task that another launcher started: wait for all tasks before, and for their exit after training."""
    cluster, barrier = read_tf_config(os.environ), Path(spec.barrier)
    if cluster is None:
        raise RuntimeError("a barrier needs a cluster in TF_CONFIG")
    try:
        done = _train(spec, heartbeat, wait_for_all=lambda: wait_for_all(barrier, cluster))
    except Exception as error:  # reported to the other tasks, then raised again
        report_failure(barrier, cluster, error)
        raise
    finish(barrier, cluster)
    return done


def _train(
    spec: WorkerSpec, heartbeat: Heartbeat, *, wait_for_all: Callable[[], None] = lambda: None
) -> Done:
    context = spec.context(
        heartbeat.progress, wait_for_all=wait_for_all, wall=WallTime.of_process()
    )
    if cluster := read_tf_config(os.environ):
        require_own_port(cluster)
    import_tensorflow(compiles=True)
    if cluster and cluster.serves:
        from stoker.train.parameter_server.cluster import serve_parameter_role

        heartbeat.enter("serve")
        # The launcher ends a parameter server by a signal, which loses nothing, so it exits silently.
        with heard(ASKING, lambda _: os._exit(EXIT_PREEMPTED)):
            serve_parameter_role(cluster)
    (stage,) = (stage for stage in stages_of(context.experiment) if stage.name == "train")
    return stage.work(context, Path(spec.folder))


FINISH_S = 60.0
"""Maximum time that the first task waits for the other tasks to exit, seconds."""

POLL_S = 0.2
"""Poll interval in seconds: a shared file system sends no notification of a remote change."""

READY = "ready-{rank}"
"""File that marks a task as ready to connect through TensorFlow."""

FAILED = "failed-{rank}.json"
"""File with the error of a task that cannot train."""


def wait_for_all(barrier: Path, cluster: ClusterSpec) -> None:
    """Mark this task as ready, and wait until all tasks are ready.

    Raises:
        UserError: another task cannot train; the message names the task and its error.
    """
    while True:
        try:
            # Written again in every iteration, because a restarted first task clears the folder.
            (barrier / READY.format(rank=cluster.rank)).touch()
        except FileNotFoundError:
            raise peer_failed(cluster.leader, "it has exited") from None
        if len(list(barrier.glob(READY.format(rank="*")))) >= cluster.trainers:
            return
        for path in barrier.glob(FAILED.format(rank="*")):
            with contextlib.suppress(DataError):  # the first task has exited and removed the folder
                failure = read_json(path)
                raise peer_failed(failure["name"], failure["line"])
        time.sleep(POLL_S)  # a shared file system sends no notification


def report_failure(barrier: Path, cluster: ClusterSpec, error: Exception) -> None:
    """Report to the waiting tasks that this task cannot train, and why."""
    failure = {"name": cluster.name, "line": line_of(error)}
    # Without the folder, no task is waiting. After `Superseded`, the folder belongs to a later start of the job.
    if barrier.is_dir() and not isinstance(error, Superseded):
        write_json(barrier / FAILED.format(rank=cluster.rank), failure)


def finish(barrier: Path, cluster: ClusterSpec) -> None:
    """Mark this task as finished. The first task then waits for the others: its exit makes TensorFlow abort them."""
    with contextlib.suppress(OSError):  # the first task has stopped waiting and removed the folder
        (barrier / str(cluster.rank)).touch()
    until_s = time.monotonic() + FINISH_S
    while cluster.leads and time.monotonic() < until_s:
        if len(list(barrier.glob("[0-9]*"))) >= cluster.trainers:
            return
        time.sleep(POLL_S)  # a shared file system sends no notification


def line_of(error: Exception) -> str:
    """Return the error as one line."""
    return error.line() if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def peer_failed(name: str, line: str) -> UserError:
    """Return the error that the other tasks raise when one task cannot train.

    Args:
        name: The failed task.
        line: Its error.
    """
    return UserError(
        f"{name} failed before training started",
        got=Plain(line),
        fix="Fix the error, and start all tasks again.",
    )


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip TensorFlow's own shutdown, which waits for workers that may be gone.
    os._exit(code)
