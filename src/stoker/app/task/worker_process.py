"""`python -m stoker.app.task.worker_process SPEC.json`: one of several processes that train together.

What it is told is in the file; its place among the others is in `TF_CONFIG`. It does the work of
the stage `train` as one process alone does, and answers by files beside the one that it was told by.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from stoker.app.context import Context, Done
from stoker.app.experiment import Experiment
from stoker.app.import_tensorflow import import_tensorflow
from stoker.app.own_stages import stages_of
from stoker.app.task.barrier import gather, meet, say_failed
from stoker.cluster.resolver import read_tf_config, require_own_port
from stoker.core.config import build
from stoker.core.errors import EXIT_BUG, EXIT_DONE, EXIT_PREEMPTED, UserError
from stoker.core.files import read_json, write_json
from stoker.core.signals import ASKING, ends_when_asked, heard
from stoker.telemetry.wall_time import WallTime
from stoker.train.context.heartbeat import Heartbeat, process_heartbeat

DONE = "done.json"
"""What the stage reported, written by the first worker."""

ERROR = "error-{rank}.json"
"""What a worker could not do, and is the user's to mend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """What a worker is told: where the outputs of the stages before lie, and its own folder."""

    experiment: str
    """Every setting, as YAML: keys of JSON are text, and a class in `class_weight` is a number."""

    run_id: str
    """Id of the run."""

    outputs: dict[str, str]
    """Stage -> where its output lies."""

    identities: dict[str, str]
    """Stage -> identity of its record."""

    results: dict[str, dict[str, Any]]
    """Stage -> the facts that it recorded."""

    accept_change: bool
    """Go on from a checkpoint of other inputs."""

    folder: str
    """The folder of the stage `train`, which all workers share."""

    meeting: str = ""
    """Where each says how far it is, if another launcher has started all."""

    asked: dict[str, Any] = field(default_factory=dict)
    """What this worker's own task was started with, if another launcher has."""


def main(spec_path: Path) -> int:
    """Train as one of several; the exit code."""
    heartbeat = process_heartbeat()
    try:
        with ends_when_asked():
            spec = WorkerSpec(**read_json(spec_path))
            done = _train_among_others(spec, heartbeat) if spec.meeting else _train(spec, heartbeat)
    except UserError as error:
        answer = {"line": error.line(), "exit_code": error.exit_code}
        write_json(spec_path.with_name(ERROR.format(rank=heartbeat.rank)), answer)
        return error.exit_code
    except Exception:  # noqa: BLE001 - the edge: what is not the user's is our bug
        traceback.print_exc()
        return EXIT_BUG
    if heartbeat.rank == 0:
        write_json(spec_path.with_name(DONE), asdict(done))
    heartbeat.finish()
    return EXIT_DONE


def _train_among_others(spec: WorkerSpec, heartbeat: Heartbeat) -> Done:
    """Begin and end with the tasks that another launcher has started."""
    cluster, meeting = read_tf_config(os.environ), Path(spec.meeting)
    if cluster is None:
        raise RuntimeError("a meeting is that of a cluster")
    try:
        done = _train(spec, heartbeat, gather=lambda: gather(meeting, cluster))
    except Exception as error:
        say_failed(meeting, cluster, error)
        raise
    meet(meeting, cluster)
    return done


def _train(
    spec: WorkerSpec, heartbeat: Heartbeat, *, gather: Callable[[], None] = lambda: None
) -> Done:
    experiment = build(Experiment, yaml.safe_load(spec.experiment))
    if cluster := read_tf_config(os.environ):
        require_own_port(cluster)
    import_tensorflow(compiles=True)
    if cluster and cluster.serves:
        from stoker.train.parameter_server.cluster import serve_parameter_role

        heartbeat.enter("serve")
        # Nothing is lost with a server that the launcher ends, so nothing is said.
        with heard(ASKING, lambda _: os._exit(EXIT_PREEMPTED)):
            serve_parameter_role(cluster)
    context = Context(
        experiment=experiment,
        run_id=spec.run_id,
        outputs={stage: Path(output) for stage, output in spec.outputs.items()},
        identities=spec.identities,
        results=spec.results,
        progress=heartbeat.progress,
        accept_change=spec.accept_change,
        asked=spec.asked,
        gather=gather,
        wall=WallTime.of_process(),
    )
    (stage,) = (stage for stage in stages_of(experiment) if stage.name == "train")
    return stage.work(context, Path(spec.folder))


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # TensorFlow's own end waits for workers that may be gone.
    os._exit(code)
