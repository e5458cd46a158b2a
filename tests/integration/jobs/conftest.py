"""One real Slurm for all tests of a module, and jobs that count."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs.kubernetes_jobs import KubernetesJobs, kubernetes_jobs
from tests.slurm_cluster import Cluster, slurm_cluster, wait_until
from tests.submitted_jobs import SubmittedJobs

from stoker.jobs import places
from stoker.jobs.job import Job, Resources, write_job
from stoker.jobs.places import add_to_index
from stoker.jobs.provider import JobState
from stoker.jobs.providers.slurm.provider import SlurmProvider
from stoker.jobs.providers.slurm.settings import SlurmTarget

STAND_IN = Path(__file__).with_name("counting_job.py")


@dataclass
class Counting(SubmittedJobs):
    """A cluster, and how jobs that count are submitted to it."""

    cluster: Cluster
    runs: Path
    python: Path
    made: dict[str, Job] = field(default_factory=dict)

    def provider(self, **settings: Any) -> SlurmProvider:
        """A target whose workers count."""
        chosen: dict[str, Any] = {"python": str(self.python), "grace_s": 20, **settings}
        return SlurmProvider("test", SlurmTarget(**chosen))

    def job(self, name: str, *command: str, **more: Any) -> Job:
        """A job, whose folder is written."""
        resources = Resources(**{"workers": 2, "cpus": 1} | more.pop("resources", {}))
        job = Job(
            name=name,
            command=("count", *command),
            folder=self.runs,
            runs=self.runs,
            code="0" * 64,
            resources=resources,
            **more,
        )
        add_to_index(write_job(job))
        return job

    def state(self, job: Job) -> JobState:
        """The state of a job."""
        return self.provider().state(job.id)

    def wait_for_number(self, job: Job, number: int) -> None:
        """Wait until worker 0 has counted so far."""
        wait_until(lambda: len(self.numbers(job, 0)) > number, f"number {number}: {self.log(job)}")

    def numbers(self, job: Job, rank: int) -> list[int]:
        """What a worker has written."""
        path = job.place / f"numbers-{rank}"
        return [int(each) for each in path.read_text().split()] if path.exists() else []

    def saved(self, job: Job) -> set[str]:
        """The starts and workers that saved after a request to end: `START-RANK`."""
        return {path.name.removeprefix("saved-") for path in job.place.glob("saved-*")}

    def log(self, job: Job) -> str:
        """The log of the job's script."""
        path = job.place / "logs" / "slurm.log"
        return path.read_text() if path.exists() else ""

    def require_whole_count(self, job: Job, end: int) -> None:
        """Each worker has written each number once, in order."""
        for rank in range(job.resources.workers):
            assert self.numbers(job, rank) == list(range(end)), self.log(job)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster on this machine, for all modules that one process tests."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        with slurm_cluster(folder) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def counting(cluster: Cluster) -> Iterator[Counting]:
    """The environment of this process names the cluster; jobs of other modules are not known."""
    folder = Path(tempfile.mkdtemp(prefix="module-", dir=cluster.folder))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, cluster.environ[name])
        patch.setenv("XDG_STATE_HOME", str(folder / "home"))
        patch.setattr(places, "_found", {})
        runs = folder / 'runs of O\'Neil & "co" $x'
        runs.mkdir()
        python = folder / "python"
        python.write_text(
            f'#!/bin/sh\n[ "$2" = stoker ] || exec {sys.executable} "$@"\nshift 2\n'
            f'exec {sys.executable} -S -E {STAND_IN} "$@"\n'
        )
        python.chmod(0o755)
        yield Counting(cluster, runs, python)


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[KubernetesJobs]:
    """A Kubernetes cluster on this machine."""
    with kubernetes_jobs() as jobs:
        yield jobs


def comments(cluster: Cluster) -> list[str]:
    """Jobs of Stoker in the queue, by ID, also those that are over."""
    answer = cluster.run("squeue", "--noheader", "--states=all", "--format=%k")
    return [json.loads(line)["stoker"] for line in answer.splitlines() if line.startswith("{")]


def processes_of(folder: Path) -> list[int]:
    """Processes whose environment names a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]
