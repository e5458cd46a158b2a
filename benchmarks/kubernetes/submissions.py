"""Submissions to a Kubernetes API server that loses answers, and a list of many jobs.

python benchmarks/kubernetes/submissions.py [--submissions N] [--listed N]

Writes benchmarks/results/kubernetes.json. The server is the tests' own (tests/kubernetes_api): what a real one and its
network take comes on top.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))

from figures import RESULTS, Figure, figure, spread, write
from tests.integration.jobs.kubernetes_jobs import NAMESPACE, KubernetesJobs, kubernetes_jobs
from tests.kubernetes_api.resources import CONFIG_MAPS, JOB_SETS, Resource

from stoker.jobs.providers.kubernetes.names import ID, object_name
from stoker.jobs.providers.kubernetes.problems import AnswerLost

LOST = 0.1
"""Share of all requests whose answer is lost, or that do not arrive."""

LIST_S = 2.0
"""Longest list."""

ROUNDS = 5


def submissions(jobs: KubernetesJobs, count: int) -> list[Figure]:
    """Submit jobs under lost answers, each as often as a person would."""
    made = [jobs.job(f"many-{number}", "2") for number in range(count)]
    again = 0
    jobs.cluster.faults.lose(LOST)
    began_s = time.monotonic()
    for job in made:
        while True:
            try:
                jobs.provider().submit(job)
                break
            except AnswerLost:
                again += 1
    took_s = time.monotonic() - began_s
    jobs.cluster.faults.lose(0.0)
    found = Counter(_names(jobs, JOB_SETS))
    whole = Counter(_names(jobs, CONFIG_MAPS))
    wanted = {object_name(job.id) for job in made}
    lost = len(wanted - found.keys()) + len(wanted - whole.keys())
    hit = sum(jobs.cluster.faults.counts.values())
    how = f"{count} submissions, each with a ConfigMap and a NetworkPolicy; {hit} requests lost, {again} commands repeated"
    return [
        figure(f"jobs of {count} submissions that are not there", lost, "jobs", at_most=0, how=how),
        figure(
            "jobs of no submission",
            len(found - Counter(wanted)),
            "jobs",
            at_most=0,
            how=how,
        ),
        figure("a submission, of them", took_s / count, "s", how=how),
    ]


def listed(jobs: KubernetesJobs, count: int) -> Figure:
    """List many jobs, which are copies of one."""
    (one, *_) = jobs.cluster.storage.items(JOB_SETS, NAMESPACE)
    for number in range(count - len(_names(jobs, JOB_SETS))):
        other = copy.deepcopy(one)
        other["metadata"]["name"] = f"copy-{number:08x}"
        other["metadata"]["annotations"][ID] = f"copy-{number:08x}"
        jobs.cluster.storage.create(JOB_SETS, other)
    took = []
    for _ in range(ROUNDS):
        began_s = time.monotonic()
        found = jobs.provider().jobs()
        took.append(time.monotonic() - began_s)
        assert len(found) >= count, len(found)
    return figure(
        f"a list of {count} jobs",
        statistics.median(took),
        "s",
        at_most=LIST_S,
        how=f"`KubernetesProvider.jobs` of a new provider; median of {ROUNDS} ({spread(took)} s)",
    )


def _names(jobs: KubernetesJobs, resource: Resource) -> list[str]:
    found = jobs.cluster.storage.items(resource, NAMESPACE)
    return [str(each["metadata"]["name"]) for each in found]


def main() -> None:
    """Measure, and write the figures."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--submissions", type=int, default=200)
    arguments.add_argument("--listed", type=int, default=500)
    arguments.add_argument("--out", type=Path, default=RESULTS / "kubernetes.json")
    given = arguments.parse_args()
    with kubernetes_jobs() as jobs:
        jobs.cluster.paused.set()  # no pod has to run
        found = submissions(jobs, given.submissions)
        found.append(listed(jobs, given.listed))
    write(given.out, found)


if __name__ == "__main__":
    main()
