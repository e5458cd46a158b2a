"""Submissions whose answers get lost, and the list of many jobs."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from figures import Figure, figure, spread
from tests.lost_answers import write_losing_sbatch
from tests.slurm_cluster import Cluster

from stoker.jobs.archive import Archive
from stoker.jobs.job import Job, Resources
from stoker.jobs.providers.slurm.client import Slurm
from stoker.jobs.providers.slurm.machine import Here
from stoker.jobs.providers.slurm.problems import AnswerLost
from stoker.jobs.providers.slurm.script import job_id_of
from stoker.jobs.providers.slurm.settings import SlurmTarget
from stoker.jobs.submission import submit
from stoker.jobs.targets import Target

TARGET, MAX_LIST_S, ROUNDS = "cluster", 2.0, 5

NAME = "many-"
"""Begins the names of these jobs; those of another part are in the queue, too."""

LOST_OF = 10
"""One submission of so many is lost."""

HELD = SlurmTarget(nodes=1, sbatch=("--hold",))
"""Nothing of these jobs has to run."""


def measure(cluster: Cluster, folder: Path, *, submissions: int, jobs: int) -> list[Figure]:
    """Submit jobs under lost answers, add others until there are `jobs`, and list them.

    Args:
        cluster: Without jobs of Stoker.
        folder: For runs.
        submissions: Of which each tenth is lost.
        jobs: Of the list.
    """
    archive = Archive(content=b"no code: nothing of it runs", sizes={})
    made = [_job(folder / "runs", archive, number) for number in range(max(submissions, jobs))]
    with _losing(folder / "bin") as lost:
        for job in made[:submissions]:
            _submit_in_spite(job, archive)
        losses = len(list(lost.glob("lost-*")))
    found = _figures_of_submissions(made[:submissions], losses)
    for job in made[submissions:jobs]:
        _submit(job, archive)
    return [*found, *_list(cluster, folder, made[:jobs])]


def _job(runs: Path, archive: Archive, number: int) -> Job:
    return Job(
        name=f"{NAME}{number}",
        command=("train",),
        folder=runs.parent,
        runs=runs,
        code=archive.digest,
        resources=Resources(workers=1, cpus=1),
    )


def _submit(job: Job, archive: Archive) -> None:
    target = Target(name=TARGET, provider="slurm", settings=HELD)
    submit(job, archive, target=target, targets={TARGET: target})


def _submit_in_spite(job: Job, archive: Archive) -> None:
    """Submit as a person does: after an answer that was lost, the same command again."""
    for _ in range(3):
        try:
            _submit(job, archive)
        except AnswerLost:
            continue
        return
    raise RuntimeError(f"three answers were lost: {job.id}")


@contextmanager
def _losing(folder: Path) -> Iterator[Path]:
    path, real = os.environ["PATH"], shutil.which("sbatch")
    if real is None:
        raise RuntimeError("no sbatch")
    os.environ["PATH"] = f"{write_losing_sbatch(folder, real, every=LOST_OF)}:{path}"
    try:
        yield folder
    finally:
        os.environ["PATH"] = path


def _figures_of_submissions(jobs: Sequence[Job], losses: int) -> list[Figure]:
    ids = [job_id_of(each.comment) for each in Slurm(Here()).queue() if each.name.startswith(NAME)]
    known = [each for each in ids if each is not None]
    how = f"{len(jobs)} jobs submitted, {losses} answers of sbatch lost, half of them after Slurm had the job"
    name = f"{len(jobs)} submissions, 10 % of the answers lost"
    twice, missing = len(known) - len(set(known)), len({job.id for job in jobs} - set(known))
    return [
        figure(f"{name}: jobs", len(known), "jobs", at_least=len(jobs), how=how),
        figure(f"{name}: submitted twice", twice, "jobs", at_most=0, how=how),
        figure(f"{name}: lost", missing, "jobs", at_most=0, how=how),
    ]


def _list(cluster: Cluster, folder: Path, jobs: Sequence[Job]) -> list[Figure]:
    """List them, half of them over."""
    targets = Path(os.environ["XDG_CONFIG_HOME"]) / "stoker" / "targets.yaml"
    targets.parent.mkdir(parents=True, exist_ok=True)
    targets.write_text(yaml.safe_dump({TARGET: {"provider": "slurm"}}))
    numbers = [each.id for each in Slurm(Here()).queue() if each.name.startswith(NAME)]
    cluster.run("scancel", *numbers[::2])
    took = [_list_once(folder, len(jobs)) for _ in range(ROUNDS)]
    how = (
        f"`stoker jobs`, a process each, {ROUNDS} times; half of the jobs wait, half were cancelled"
    )
    found = []
    for kind, values in zip(("wall", "CPU"), zip(*took, strict=True), strict=True):
        found.append(
            figure(
                f"{len(jobs):,} jobs listed, {kind} time",
                statistics.median(values),
                "s",
                at_most=MAX_LIST_S,
                how=f"median of {how}; {spread(values)} s",
            )
        )
    return found


def _list_once(folder: Path, jobs: int) -> tuple[float, float]:
    """Wall and CPU time of one list, with the programs that it starts."""
    before, begun_s = _cpu_s(), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "stoker", "jobs"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    wall_s, cpu_s = time.monotonic() - begun_s, _cpu_s() - before
    lines = [line for line in done.stdout.splitlines() if line.startswith(NAME)]
    states = [line.split()[2] for line in lines]
    expected = {"waiting": jobs // 2, "stopped": jobs - jobs // 2}
    if {each: states.count(each) for each in set(states)} != expected:
        raise RuntimeError(f"not the {jobs} jobs: {done.stdout[:500]} {done.stderr}")
    return wall_s, cpu_s


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
