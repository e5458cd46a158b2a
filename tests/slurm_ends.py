"""Ways to end a training on Slurm in its middle; it resumes automatically, or is submitted again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.slurm_cluster import Cluster, wait_until
from tests.slurm_training import Training

PARTITION, URGENT = "proof", "first"
"""A partition of two machines, and one that preempts its jobs."""

GRACE_S = 150
"""`grace_s` of the target: a time limit that is one to two minutes away is near enough to save at once."""


def open_partitions(cluster: Cluster) -> None:
    """Make both partitions, with one machine more than four workers need, so that one may be lost."""
    common = ("scontrol", "create", "Nodes=n[2-4]")
    cluster.run(*common, f"PartitionName={PARTITION}", "PriorityTier=1", "GraceTime=10")
    cluster.run(*common, f"PartitionName={URGENT}", "PriorityTier=10", "PreemptMode=OFF")


def machines(training: Training) -> str:
    """The machines of the training's start, as Slurm writes them; empty while it has none."""
    number = training.scheduler_id()
    return training.cluster.run("squeue", "--noheader", f"--jobs={number}", "--format=%N").strip()


def requeue(training: Training, _: random.Random) -> None:
    """Put it into the queue again, as an administrator does."""
    training.cluster.run("scontrol", "requeue", training.scheduler_id())


def preempt(training: Training, _: random.Random, *, length_s: float = 1.0) -> None:
    """Submit a job that needs its machines, in a partition of higher priority; it notes its begin and end."""
    nodes, output = machines(training), training.notes / "urgent"
    options = (f"--partition={URGENT}", f"--nodelist={nodes}", "--exclusive", f"--output={output}")
    training.cluster.run("sbatch", *options, f"--wrap=date +%s.%N; sleep {length_s:g}; date +%s.%N")


def reach_limit(training: Training, _: random.Random) -> None:
    """Set a time limit that is near, until it starts again."""
    started_s = training.state().started_s
    assert started_s is not None
    minutes = int((time.time() - started_s) / 60) + 2
    start, number = training.starts(), f"JobId={training.scheduler_id()}"
    training.cluster.run("scontrol", "update", number, f"TimeLimit={minutes}")
    training.wait_for_start(start + 1)
    training.cluster.run("scontrol", "update", number, "TimeLimit=600")


def lose_machine(training: Training, _: random.Random) -> None:
    """Kill the slurmd of its machine: its processes live on there while it starts on another."""
    node = training.cluster.run("scontrol", "show", "hostnames", machines(training)).split()[0]
    start = training.starts()
    training.cluster.daemons[f"slurmd-{node}"].send(signal.SIGKILL)
    training.wait_for_start(start + 1)
    training.cluster.start_node(node)
    wait_until(lambda: node in training.cluster.idle(), f"{node} again", 120.0)


def kill_worker(training: Training, chance: random.Random) -> None:
    """Kill a process of a worker, without a warning; if there is none yet, the first that comes."""
    found: list[int] = []

    def there() -> bool:
        found[:] = worker_processes(training, start=training.starts())
        return bool(found)

    wait_until(there, lambda: f"worker: {training.log()}", 300.0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(found), signal.SIGKILL)


def cancel(training: Training, _: random.Random) -> None:
    """Cancel it, and submit it again."""
    training.cluster.run("scancel", training.scheduler_id())
    training.wait_for_end()
    training.submit()


def stop(training: Training, _: random.Random) -> None:
    """Stop it, and submit it again."""
    training.stoker("stop", training.job)
    training.submit()


ENDS: dict[str, Callable[[Training, random.Random], None]] = {
    "requeue": requeue,
    "preempt": preempt,
    "limit": reach_limit,
    "machine": lose_machine,
    "kill": kill_worker,
    "cancel": cancel,
    "stop": stop,
}
"""Each may come at any moment, also before the first step."""

PATIENT = ("limit", "stop")
"""Ends before which the workers have as long as they need to save; for others Slurm waits for seconds."""


def worker_processes(training: Training, *, start: int | None = None) -> list[int]:
    """The processes of the training's workers, by number; with `start`, only those of that start."""
    found = []
    own = str(training.notes).encode()
    mark = b"" if start is None else f"STOKER_INCARNATION={training.place}:{start}\0".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            environ = (process / "environ").read_bytes() + b"\0"
            is_worker = b"stoker.app.task.worker_process" in words
            if is_worker and own in environ and mark in environ:
                found.append(int(process.name))
    return sorted(found)
