"""Jobs that count on the API server of `tests.kubernetes_api`, through the real provider and the real pods' program."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.job_folder import submitted
from tests.kubernetes_api.cluster import KubernetesCluster, kubernetes_cluster
from tests.kubernetes_api.node.containers import REPOSITORY, Image
from tests.kubernetes_api.resources import JOB_SETS, Object
from tests.slurm_cluster import wait_until
from tests.submitted_jobs import SubmittedJobs

from stoker.jobs.job import Job, read_job
from stoker.jobs.places import add_to_index
from stoker.jobs.provider import JobState, Phase
from stoker.jobs.providers.kubernetes.names import object_name
from stoker.jobs.providers.kubernetes.provider import KubernetesProvider
from stoker.jobs.providers.kubernetes.settings import KubernetesTarget, Volume

IMAGE = "registry.test/stoker:1"
OVER = (Phase.DONE, Phase.FAILED, Phase.STOPPED)
NAMESPACE = "team"

REASON_S = 60.0
"""Longest time until a job says why it waits, seconds: that of the documentation."""

_COUNTS_IN_TASK = """\
import sys

if sys.orig_argv[1:5] == ["-P", "-m", "stoker", "count"]:
    import os
    sys.path.insert(0, os.path.dirname(__file__))
    import counting_job
    code = counting_job.in_task()
    sys.stdout.flush()
    os._exit(code)
"""
"""`sitecustomize.py` of the image: it has a verb `count` more."""


@dataclass
class KubernetesJobs(SubmittedJobs):
    """A cluster, and how jobs that count are submitted to it."""

    cluster: KubernetesCluster
    folder: Path
    runs: Path
    kubeconfig: Path

    def provider(self, **settings: Any) -> KubernetesProvider:
        """A target on the cluster."""
        chosen: dict[str, Any] = {
            "image": IMAGE,
            "kubeconfig": self.kubeconfig,
            "volumes": (Volume(claim="runs", path=self.runs),),
            "cpus": 0.1,
            "memory_gib": 2.0,
            "ephemeral_gib": 1.0,
            "grace_s": 20,
            **settings,
        }
        return KubernetesProvider("test", KubernetesTarget(**chosen))

    def job(self, name: str, *command: str, workers: int = 2, **more: Any) -> Job:
        """A job that counts, whose folder is written."""
        experiment = self.folder / "experiments" / name
        experiment.mkdir(parents=True)
        text = f"name: {name}\ndata: {{source: data.csv}}\nmodel: model:build\nlabel: y\n"
        (experiment / "stoker.yaml").write_text(text)
        place = submitted(experiment, self.runs, "count", *command, workers=workers, **more)
        add_to_index(place)
        return read_job(place)

    def state(self, job: Job) -> JobState:
        """The state of a job, as the cluster has it now."""
        return self.provider()._state(job.id)

    def wait_for_reason(self, job: Job, *words: str, provider: KubernetesProvider) -> None:
        """Wait until a job says all of these, in one line."""
        reasons: list[str] = []

        def says() -> bool:
            reasons.append(provider._state(job.id).reason)
            return all(word in reasons[-1] for word in words)

        try:
            wait_until(says, "reason", REASON_S)
        except AssertionError:
            raise AssertionError(f"{words} are not in {reasons[-1]!r}\n{self.log(job)}") from None
        assert "\n" not in reasons[-1]

    def wait_for_number(self, job: Job, number: int, rank: int = 0) -> None:
        """Wait until a worker has counted so far."""
        try:
            wait_until(lambda: len(self.numbers(job, rank)) > number, f"number {number}", 120.0)
        except AssertionError:
            raise AssertionError(self.log(job)) from None

    def numbers(self, job: Job, rank: int) -> list[int]:
        """What a worker has written."""
        path = job.place / f"numbers-{rank}"
        return [int(each) for each in path.read_text().split()] if path.exists() else []

    def saved(self, job: Job) -> set[str]:
        """The starts and workers that saved after a request to end: `START-RANK`."""
        return {path.name.removeprefix("saved-") for path in job.place.glob("saved-*")}

    def pods(self, job: Job) -> list[Object]:
        """The pods of a job that run, by rank."""
        found = self.cluster.live_pods(object_name(job.id))
        return sorted(found, key=lambda pod: pod["spec"].get("hostname") or pod["metadata"]["name"])

    def job_set(self, job: Job) -> Object:
        """The JobSet of a job, as the cluster has it."""
        return self.cluster.storage.get(JOB_SETS, NAMESPACE, object_name(job.id))

    def starts(self, job: Job) -> int:
        """How often it has started."""
        names = [each.name for each in (job.place / "incarnations").iterdir()]
        return max(int(name) for name in names if name.isdecimal())

    def log(self, job: Job) -> str:
        """What its pods and tasks have printed, for a test that fails."""
        parts = [
            f"--- {path.name}\n{path.read_text()[-3000:]}"
            for path in sorted((job.place / "logs").glob("*"))
        ]
        parts += [
            f"--- pod {each.pod['metadata']['name']}\n{log.text()[-3000:]}"
            for each in self.cluster.kubelet.known()
            if each.pod["metadata"]["name"].startswith(object_name(job.id))
            for log in each.logs
        ]
        events = self.cluster.events(object_name(job.id))
        parts += [f"{each['reason']}: {each['message']}" for each in events]
        return "\n".join([*parts, *self.cluster.api.troubles])

    def require_whole_count(self, job: Job, end: int) -> None:
        """Each worker has written each number once, in order."""
        for rank in range(job.resources.workers):
            assert self.numbers(job, rank) == list(range(end)), self.log(job)


@contextmanager
def kubernetes_jobs() -> Iterator[KubernetesJobs]:
    """Run a cluster with one node; the environment of this process has a home of its own."""
    folder = Path(tempfile.mkdtemp(prefix="kubernetes-", dir="/tmp"))
    image = Image(
        programs=_programs(folder / "image"),
        environment={
            "PYTHONPATH": f"/image/site:{REPOSITORY / 'tests' / 'without_sklearn'}",
            "CUDA_VISIBLE_DEVICES": "-1",
            "STOKER_CACHE": "off",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
    )
    runs = folder / "runs of O'Neil $(HOME) $$x"
    runs.mkdir()
    try:
        with (
            kubernetes_cluster(folder / "cluster", {IMAGE: image}) as cluster,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setenv("XDG_STATE_HOME", str(folder / "home"))
            patch.delenv("KUBECONFIG", raising=False)
            cluster.add_node("node-1")
            cluster.add_claim("runs", directory=runs)
            kubeconfig = cluster.kubeconfig(folder / "kubeconfig", namespace=NAMESPACE)
            yield KubernetesJobs(cluster, folder, runs, kubeconfig)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _programs(folder: Path) -> Path:
    site = folder / "site"
    site.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("counting_job.py"), site)
    (site / "sitecustomize.py").write_text(_COUNTS_IN_TASK)
    program = folder / "python3"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return folder


def manifests(text: str) -> list[Object]:
    """The objects of a stream of YAML."""
    import yaml

    return [dict(each) for each in yaml.safe_load_all(text)]
