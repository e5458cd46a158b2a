"""What the API server of a cluster does to those who watch, list and follow: nothing is missed, nothing comes twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.integration.jobs.kubernetes_jobs import IMAGE, NAMESPACE, OVER, KubernetesJobs
from tests.kubernetes_api.cluster import TOKEN, USER
from tests.kubernetes_api.resources import CONFIG_MAPS, JOB_SETS, PODS, Object, Resource
from tests.kubernetes_api.server.faults import Fault
from tests.slurm_cluster import wait_until

from stoker.core.errors import UserError
from stoker.jobs.provider import Phase
from stoker.jobs.providers.kubernetes import client, pod_logs
from stoker.jobs.providers.kubernetes import watch as watching
from stoker.jobs.providers.kubernetes.client import Cluster
from stoker.jobs.providers.kubernetes.names import CONTAINER, object_name, selector
from stoker.jobs.providers.kubernetes.pod_logs import log_lines
from stoker.jobs.providers.kubernetes.watch import watch

HOLD = ("30", "hold", "8", "1")
"""The first start stays at 8 until it is ended."""


@pytest.fixture
def cluster(kubernetes: KubernetesJobs) -> Cluster:
    """The API, as the provider uses it."""
    return Cluster(kubeconfig=kubernetes.kubeconfig, namespace=NAMESPACE)


def add(kubernetes: KubernetesJobs, resource: Resource, name: str, **content: Any) -> Object:
    """Make an object, as another user of the cluster does."""
    metadata = {"name": name, "namespace": NAMESPACE, **content.pop("metadata", {})}
    own = {"apiVersion": resource.api_version(), "kind": resource.kind, "metadata": metadata}
    return kubernetes.cluster.api.create(resource, own | content)


def in_thread(lines: Iterator[Any], into: list[Any]) -> threading.Thread:
    """Collect what comes; an error comes last."""

    def collect() -> None:
        try:
            for each in lines:
                into.append(each)  # noqa: PERF402 - what has come must be seen at once
        except UserError as error:
            into.append(error)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def watched(kubernetes: KubernetesJobs) -> list[Object]:
    """What one watch of ConfigMaps has seen: it goes on through all tests."""
    api = Cluster(kubeconfig=kubernetes.kubeconfig, namespace=NAMESPACE)
    found: list[Object] = []
    in_thread(watch(api, api.path("v1", "configmaps")), found)
    add(kubernetes, CONFIG_MAPS, "first")
    wait_until(lambda: "first" in names(found), "the first object")
    return found


def names(found: list[Object]) -> list[str]:
    return [each["metadata"]["name"] for each in found]


FAULTS: dict[str, Callable[[KubernetesJobs], None]] = {
    "too-old": lambda jobs: jobs.cluster.storage.forget(),
    "breaks-off": lambda jobs: jobs.cluster.faults.plan(Fault.CUT, "configmaps.*watch=", times=2),
    "busy": lambda jobs: jobs.cluster.faults.plan(Fault.BUSY, "configmaps"),
    "broken": lambda jobs: jobs.cluster.faults.plan(Fault.BROKEN, "configmaps"),
    "lost": lambda jobs: jobs.cluster.faults.plan(Fault.LOST, "configmaps"),
    "too-old-again": lambda jobs: jobs.cluster.faults.plan(
        Fault.FORGOTTEN, "configmaps.*watch=", times=2
    ),
}
"""Name -> what happens to the requests of a watch; it has to begin again."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_watch_misses_nothing(
    kubernetes: KubernetesJobs, watched: list[Object], name: str
) -> None:
    FAULTS[name](kubernetes)
    if not name.startswith("too-old"):
        kubernetes.cluster.restart_server(0.1)  # so that it has to begin again
    with kubernetes.cluster.storage.changed:
        add(kubernetes, CONFIG_MAPS, f"during-{name}")
        if name.startswith("too-old"):
            kubernetes.cluster.storage.forget()
    wait_until(lambda: f"during-{name}" in names(watched), "what came in the meantime")
    add(kubernetes, CONFIG_MAPS, f"after-{name}")
    wait_until(lambda: f"after-{name}" in names(watched), "what came after it")


def test_a_list_in_pages_begins_again_when_its_version_is_forgotten(
    kubernetes: KubernetesJobs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        add(kubernetes, CONFIG_MAPS, f"page-{number}", metadata={"labels": {"pages": "yes"}})
    monkeypatch.setattr(client, "PAGE", 2)
    path = cluster.path("v1", "configmaps")
    wanted = [f"page-{number}" for number in range(5)]

    for times in (0, 1, 100):
        kubernetes.cluster.faults.plan(Fault.FORGOTTEN, "configmaps.*continue=", times=times)
        assert names(cluster.all(path, labelSelector="pages=yes")) == wanted, times
    kubernetes.cluster.faults.planned.clear()


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/jobsets"), ("POST", "/configmaps"), ("PATCH", "")]
)
def test_a_conflict_with_another_change_is_not_seen(
    kubernetes: KubernetesJobs, method: str, path: str
) -> None:
    job = kubernetes.job(f"conflict-{method.lower()}{path.replace('/', '-')}", "2")
    kubernetes.cluster.faults.plan(Fault.CONFLICT, path, method=method)

    kubernetes.provider().submit(job)

    assert not kubernetes.job_set(job)["spec"]["suspend"]
    assert kubernetes.cluster.storage.find(CONFIG_MAPS, NAMESPACE, object_name(job.id))


def test_what_others_own_stays_and_nothing_is_left_next_to_it(kubernetes: KubernetesJobs) -> None:
    jobs = [kubernetes.job(f"taken-{kind}", "2") for kind in ("map", "set")]
    theirs = add(kubernetes, CONFIG_MAPS, object_name(jobs[0].id), data={"a": "theirs"})
    for job, words in zip(jobs, ("delete or rename it", "another object"), strict=True):
        if job is jobs[1]:
            set_of_other = kubernetes.job_set(kubernetes.submit("other", "2"))
            metadata = {"annotations": {"stoker/id": "other-12345678"}}
            spec = set_of_other["spec"] | {"suspend": True}
            add(kubernetes, JOB_SETS, object_name(job.id), metadata=metadata, spec=spec)
        with pytest.raises(UserError, match=words):
            kubernetes.provider().submit(job)
    assert kubernetes.cluster.storage.get(CONFIG_MAPS, NAMESPACE, object_name(jobs[0].id)) == theirs
    assert kubernetes.cluster.storage.find(JOB_SETS, NAMESPACE, object_name(jobs[0].id)) is None
    assert kubernetes.cluster.storage.find(JOB_SETS, NAMESPACE, object_name(jobs[1].id))


def test_logs_and_states_survive_every_fault_of_the_server(
    kubernetes: KubernetesJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job; its log is followed while streams break off, versions are forgotten and the server restarts."""
    job = kubernetes.submit("followed", *HOLD)
    monkeypatch.setattr(pod_logs, "QUIET_S", 1.0)
    for module, name in ((client, "READ_S"), (watching, "READ_S"), (watching, "ROUND_S")):
        monkeypatch.setattr(module, name, 1)
    lines: list[Any] = []
    follower = in_thread(kubernetes.provider().log_lines(job.id, worker=None, follow=True), lines)
    phases: list[Any] = []
    asking = threading.Event()

    def ask() -> Iterator[Any]:
        while not asking.is_set():
            yield kubernetes.state(job).phase
            kubernetes.provider().events(job.id)
            asking.wait(0.2)

    asker = in_thread(ask(), phases)

    def counted(rank: int) -> list[int]:
        own = [each for each in lines if str(each).startswith(f"[worker {rank}] ")]
        return [int(each.rpartition(" ")[2]) for each in own if " counts " in each]

    # An evicted pod takes along the lines that were not read yet.
    for rank in range(2):
        wait_until(
            lambda rank=rank: 7 in counted(rank), f"number 7 of worker {rank} in the log", 120.0
        )
    faults = kubernetes.cluster.faults
    faults.plan(Fault.CUT, "/log", times=3)
    faults.plan(Fault.HALF, "/log", times=2)
    faults.plan(Fault.SILENT, "/log")
    faults.plan(Fault.SILENT, "pods.*watch=")
    faults.plan(Fault.BUSY, "/log", times=1)
    faults.plan(Fault.BROKEN, "watch=")
    faults.plan(Fault.FORGOTTEN, "pods.*watch=")
    kubernetes.cluster.restart_server(2.0)
    kubernetes.cluster.evict(kubernetes.pods(job)[1])
    assert kubernetes.wait(job, *OVER).phase is Phase.DONE, kubernetes.log(job)
    asking.set()
    for thread in (follower, asker):
        thread.join(60.0)
        assert not thread.is_alive()

    kubernetes.require_whole_count(job, 30)
    for rank in range(2):
        assert counted(rank) == list(range(30)), "\n".join(map(str, lines))
    assert set(phases) <= {Phase.WAITING, Phase.RUNNING, Phase.RESTARTING, Phase.DONE}, phases


def test_a_container_that_was_started_again_shows_what_it_printed_before(
    kubernetes: KubernetesJobs, cluster: Cluster
) -> None:
    job = kubernetes.job("again", "2")
    script = "mkdir -p /tmp/a; n=$(ls /tmp/a | wc -l); touch /tmp/a/$n; echo start $n; [ $n -gt 0 ]"
    chosen = dict(each.split("=") for each in selector(job.id).split(","))
    spec = {
        "restartPolicy": "OnFailure",
        "containers": [
            {
                "name": CONTAINER,
                "image": IMAGE,
                "command": ["sh", "-c", script],
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp/a"}],
            }
        ],
        "volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "again"}}],
    }
    kubernetes.cluster.add_claim("again")
    add(kubernetes, PODS, "again", metadata={"labels": chosen}, spec=spec)

    def has_ended() -> bool:
        return bool(
            kubernetes.cluster.storage.get(PODS, NAMESPACE, "again")["status"]["phase"]
            == "Succeeded"
        )

    wait_until(has_ended, "end of the pod")
    for until in (None, lambda: True):
        found = list(log_lines(cluster, selector(job.id), worker=None, until=until))
        assert [each.partition("Z ")[2] for each in found] == ["start 0", "start 1"], until


def test_a_log_that_is_followed_ends_with_an_error_if_the_token_has_expired(
    kubernetes: KubernetesJobs,
) -> None:
    job = kubernetes.submit("expires", "2000", workers=1)
    lines: list[Any] = []
    follower = in_thread(kubernetes.provider().log_lines(job.id, worker=None, follow=True), lines)
    wait_until(lambda: len(lines) > 5, "lines")
    tokens = kubernetes.cluster.access.tokens
    del tokens[TOKEN]
    try:
        kubernetes.cluster.restart_server(0.1)
        follower.join(60.0)
    finally:
        tokens[TOKEN] = USER
    assert not follower.is_alive()
    assert "may have expired" in str(lines[-1])
    kubernetes.provider().stop(job.id)
