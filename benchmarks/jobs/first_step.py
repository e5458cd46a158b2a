"""From `stoker submit` to the first step, next to the same two workers that `srun` starts by hand."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from figures import Figure, figure, spread
from tests.slurm_cluster import Cluster, wait_until
from tests.slurm_training import TRAINED_S, Training, write_experiment

from stoker.cluster.resolver import held_ports

MAX_S = 3.0
WORKERS = 2

BY_HAND = """\
export TF_CONFIG='{"cluster": {"worker": [ADDRESSES]}, "task": {"type": "worker", "index": '$SLURM_PROCID'}}'
exec PYTHON -P -m stoker train EXPERIMENT --set runs=RUNS
"""
"""What a person writes into a script for `srun`."""


def measure(cluster: Cluster, folder: Path, *, pairs: int) -> list[Figure]:
    """Start both in turn, and return how much longer the job takes.

    Args:
        cluster: Idle.
        folder: For experiment and runs.
        pairs: One job and one start by hand each.
    """
    experiment = folder / "pair"
    write_experiment(experiment)
    jobs, hands = [], []
    for number in range(pairs):
        job = Training(cluster, experiment, folder / f"job-{number}", workers=WORKERS)
        hand = Training(cluster, experiment, folder / f"hand-{number}", workers=WORKERS)
        # Which one comes first changes, as what runs before warms the caches of the disk.
        for which in ("job", "hand") if number % 2 else ("hand", "job"):
            if which == "job":
                jobs.append(_submitted_s(job))
            else:
                hands.append(_by_hand_s(hand))
        sys.stdout.write(f"pair {number}: job {jobs[-1]:.1f} s, by hand {hands[-1]:.1f} s\n")
        sys.stdout.flush()
    return _figures(jobs, hands)


def _figures(jobs: list[float], hands: list[float]) -> list[Figure]:
    more = [job - hand for job, hand in zip(jobs, hands, strict=True)]
    how = f"{len(more)} pairs in turn, {WORKERS} workers on {WORKERS} machines of an idle cluster"
    return [
        figure(
            "from submit to the first step, longer than by hand",
            statistics.median(more),
            "s",
            at_most=MAX_S,
            peer="srun by hand",
            how=f"median of the differences of {how}; {spread(more)} s",
        ),
        figure(
            "from submit to the first step",
            statistics.median(jobs),
            "s",
            how=f"median; {spread(jobs)} s",
        ),
        figure(
            "from srun by hand to the first step",
            statistics.median(hands),
            "s",
            how=f"median; {spread(hands)} s; the same command with TF_CONFIG",
        ),
    ]


def _submitted_s(training: Training) -> float:
    begun_s = time.time()  # the clock of the steps' notes
    training.submit()
    first_s = _first_step_s(training) - begun_s
    training.cluster.run("scancel", training.scheduler_id())
    _wait_for_idle(training.cluster)
    return first_s


def _by_hand_s(training: Training) -> float:
    with held_ports(WORKERS, address="127.0.0.1") as ports:
        addresses = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
    words = {"ADDRESSES": addresses, "PYTHON": sys.executable}
    words |= {"EXPERIMENT": str(training.experiment), "RUNS": str(training.runs)}
    script = BY_HAND
    for word, value in words.items():
        script = script.replace(word, value)
    command = ["srun", f"--nodes={WORKERS}", f"--ntasks={WORKERS}", "bash", "-c", script]
    begun_s = time.time()
    with subprocess.Popen(
        command,
        env={**os.environ, **training.environment()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        first_s = _first_step_s(training) - begun_s
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    _wait_for_idle(training.cluster)
    return first_s


def _first_step_s(training: Training) -> float:
    wait_until(training.steps, "first step", TRAINED_S)
    return training.steps()[0].at_s


def _wait_for_idle(cluster: Cluster) -> None:
    wait_until(lambda: len(cluster.idle()) == 4, "idle machines")
