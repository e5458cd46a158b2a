"""Submissions to Kubernetes: once however often they are repeated, completely or not at all, each refusal in one line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.jobs.kubernetes_jobs import NAMESPACE, KubernetesJobs
from tests.kubernetes_api.resources import (
    CONFIG_MAPS,
    CUSTOM,
    JOB_SETS,
    JOBS,
    LOCAL_QUEUES,
    POLICIES,
    SERVICES,
    TF_JOBS,
    Resource,
)
from tests.kubernetes_api.server.access import EVERYTHING
from tests.kubernetes_api.server.faults import Fault

from stoker.core.errors import UserError
from stoker.jobs.archive import CODE
from stoker.jobs.job import Job
from stoker.jobs.providers.kubernetes import client
from stoker.jobs.providers.kubernetes.manifests.workload import KINDS
from stoker.jobs.providers.kubernetes.names import object_name
from stoker.jobs.providers.kubernetes.problems import AnswerLost
from stoker.jobs.providers.kubernetes.rights import KUEUE, Right, needed

SUBMISSIONS = int(os.environ.get("STOKER_SUBMISSIONS", "10"))


@pytest.fixture(scope="module", autouse=True)
def _no_pods(kubernetes: KubernetesJobs) -> None:
    """Nothing has to run."""
    kubernetes.cluster.paused.set()


def names(kubernetes: KubernetesJobs, resource: Resource) -> list[str]:
    """Names of all objects of Stoker of a kind."""
    found = kubernetes.cluster.storage.items(resource, NAMESPACE)
    return [each["metadata"]["name"] for each in found]


def submit_in_spite(kubernetes: KubernetesJobs, job: Job) -> str:
    """Submit as a person does: after an answer that was lost, the same command again."""
    for _ in range(3):
        with contextlib.suppress(AnswerLost):
            return kubernetes.provider().submit(job)
    raise AssertionError("three submissions were lost")


def test_lost_answers_make_no_second_job_and_lose_none(kubernetes: KubernetesJobs) -> None:
    jobs = [kubernetes.job(f"many-{number}", "2") for number in range(SUBMISSIONS)]
    kubernetes.cluster.faults.lose(0.1)
    try:
        found = [submit_in_spite(kubernetes, job) for job in jobs]
    finally:
        kubernetes.cluster.faults.lose(0.0)
    # The process that submitted it was killed before it could note the answer.
    (jobs[0].place / "submitted.json").unlink()
    assert kubernetes.provider().submit(jobs[0]) == found[0]

    wanted = sorted(object_name(job.id) for job in jobs)
    for resource in (JOB_SETS, CONFIG_MAPS, POLICIES):
        assert [each for each in names(kubernetes, resource) if each.startswith("many-")] == wanted
    for job in jobs:
        assert not kubernetes.job_set(job)["spec"]["suspend"]
    assert sum(kubernetes.cluster.faults.counts.values()) > 0
    listed = {state.id for state in kubernetes.provider().jobs()}
    assert listed >= {job.id for job in jobs}


@pytest.mark.parametrize(
    ("fault", "method"), [(Fault.LOST, "POST"), (Fault.BUSY, "POST"), (Fault.BROKEN, "PATCH")]
)
def test_a_fault_of_the_server_is_not_seen(
    kubernetes: KubernetesJobs, fault: Fault, method: str
) -> None:
    job = kubernetes.job(f"fault-{fault.name.lower()}", "2")
    kubernetes.cluster.faults.plan(fault, "/jobsets", method=method)

    kubernetes.provider().submit(job)

    assert kubernetes.cluster.faults.counts[fault] >= 1
    assert not kubernetes.job_set(job)["spec"]["suspend"]


@pytest.mark.parametrize("fault", [Fault.SILENT, Fault.HALF])
def test_a_server_that_stops_in_the_middle_gets_each_request_again(
    kubernetes: KubernetesJobs, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "READ_S", 0.5)
    job = kubernetes.job(f"stops-{fault.name.lower()}", "2")
    for path, method in (("/jobsets", "POST"), ("/configmaps", "POST"), ("/jobsets", "PATCH")):
        kubernetes.cluster.faults.plan(fault, path, method=method)

    kubernetes.provider().submit(job)

    assert kubernetes.cluster.faults.counts[fault] == 3
    assert not kubernetes.job_set(job)["spec"]["suspend"]
    assert names(kubernetes, JOB_SETS).count(object_name(job.id)) == 1


@pytest.mark.parametrize("fault", [Fault.SILENT, Fault.HALF])
def test_a_server_that_never_answers_is_one_line_and_the_same_command_goes_on(
    kubernetes: KubernetesJobs, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "READ_S", 0.2)
    monkeypatch.setattr(client, "LONGEST_S", 0.0)
    there = kubernetes.submit(f"there-{fault.name.lower()}", "2")
    job = kubernetes.job(f"never-{fault.name.lower()}", "2")
    provider = kubernetes.provider(kind="jobset")
    commands: list[Callable[[], object]] = [
        lambda: provider.validate(job),
        lambda: provider.submit(job),
        provider.jobs,
        lambda: provider._state(there.id),
        lambda: provider.events(there.id),
        lambda: list(provider.log_lines(there.id, worker=None, follow=False)),
        lambda: provider.stop(there.id),
        lambda: provider.where_is(there.id, 0),
    ]
    kubernetes.cluster.faults.plan(fault, times=1000)
    for command in commands:
        with pytest.raises(
            AnswerLost, match=r"http://127\.0\.0\.1:\d+ .*no whole answer within 0.2 s"
        ):
            command()
    kubernetes.cluster.faults.planned.clear()
    kubernetes.cluster.faults.plan(fault, "/jobsets", method="POST")
    with pytest.raises(AnswerLost, match="not submitted twice"):
        provider.submit(job)

    assert kubernetes.job_set(job)["spec"]["suspend"]
    provider.submit(job)
    assert not kubernetes.job_set(job)["spec"]["suspend"]
    assert names(kubernetes, JOB_SETS).count(object_name(job.id)) == 1
    assert kubernetes.job_set(there)


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_dry_run_prints_what_the_cluster_takes_and_makes_nothing(
    kubernetes: KubernetesJobs, kind: str
) -> None:
    job = kubernetes.job(f"dry-{kind}", "2")
    provider = kubernetes.provider(kind=kind)
    before = kubernetes.cluster.storage.revision

    provider.validate(job)
    text = provider.describe(job, (job.place / CODE).read_bytes())

    assert kubernetes.cluster.storage.revision == before
    resources = {each.kind: each for each in kubernetes.cluster.api.resources}
    kinds = []
    for each in yaml.safe_load_all(text):
        kinds.append(each["kind"])
        kubernetes.cluster.api.create(resources[each["kind"]], each, dry_run=True)
    assert kinds[0] == {"job": "Job", "jobset": "JobSet"}[kind]
    assert {"ConfigMap", "NetworkPolicy"} <= set(kinds)


def refused(kubernetes: KubernetesJobs, name: str, **settings: Any) -> str:
    """What a submission is refused with, which leaves nothing."""
    job = kubernetes.job(name, "2")
    before = {each: names(kubernetes, each) for each in (JOB_SETS, JOBS, CONFIG_MAPS, SERVICES)}

    def submit() -> None:
        provider = kubernetes.provider(**settings)
        provider.validate(job)
        provider.submit(job)

    with pytest.raises(UserError) as caught:
        submit()
    assert "\n" not in str(caught.value)
    assert {each: names(kubernetes, each) for each in before} == before
    assert not (job.place / "submitted.json").exists()
    return str(caught.value)


def test_missing_rights_are_named_and_the_smallest_role_is_enough(
    kubernetes: KubernetesJobs,
) -> None:
    role = Path(__file__).parents[3] / "docs" / "how-to" / "kubernetes-rbac.yaml"
    (rules,) = (
        each["rules"] for each in yaml.safe_load_all(role.read_text()) if each["kind"] == "Role"
    )
    listed = {
        Right(verb=verb, resource=resource, group=group, subresource=subresource)
        for each in rules
        for verb, group, named in product(each["verbs"], each["apiGroups"], each["resources"])
        for resource, _, subresource in [named.partition("/")]
    }
    checked: set[Right] = set()
    for kind in KINDS:
        target = kubernetes.provider(queue="queue", disruption_budget=True).settings
        checked |= set(needed(target, kind))
    unchecked = {"create pods/portforward", "get pods/portforward", f"get localqueues.{KUEUE}"}
    assert {str(each) for each in listed - checked} == unchecked
    assert checked <= listed
    access = kubernetes.cluster.access
    try:
        access.rules = rules
        kubernetes.submit("rights", "2")
        kubernetes.submit("rights-queue", "2", settings={"kind": "job", "disruption_budget": True})
        assert kubernetes.provider().jobs()
        access.rules = [each for each in rules if each["resources"] != ["pods/log"]]
        said = refused(kubernetes, "no-logs")
    finally:
        access.rules = [EVERYTHING]
    assert "get pods/log" in said
    assert "list pods" not in said
    assert "kubernetes-rbac.yaml" in said


def test_a_namespace_that_does_not_exist_is_one_line(kubernetes: KubernetesJobs) -> None:
    assert "namespace must exist in the cluster" in refused(
        kubernetes, "nowhere", namespace="nowhere"
    )


def test_a_kind_that_is_not_installed_is_one_line(kubernetes: KubernetesJobs) -> None:
    kubernetes.cluster.uninstall(JOB_SETS)
    try:
        said = refused(kubernetes, "no-kind", kind="jobset")
        # Without a wish, it is an Indexed Job then.
        job = kubernetes.job("falls-back", "2")
        kubernetes.provider().submit(job)
    finally:
        kubernetes.cluster.install(JOB_SETS)
    assert "not installed" in said
    assert "kind: job" in said
    assert object_name(job.id) in names(kubernetes, JOBS)


@pytest.mark.parametrize(
    ("gone", "settings", "words"),
    [
        (TF_JOBS, {"kind": "tfjob"}, ["TFJob (kubeflow.org/v1)", "training operator"]),
        (None, {"queue": "none"}, ["LocalQueue of namespace team"]),
        (LOCAL_QUEUES, {"queue": "none"}, ["`queue` needs Kueue", "not installed"]),
    ],
)
def test_what_is_not_installed_for_a_setting_is_one_line(
    kubernetes: KubernetesJobs, gone: Resource | None, settings: dict[str, Any], words: list[str]
) -> None:
    kinds = [each for each in CUSTOM if gone is not None and each.group == gone.group]
    for each in kinds:
        kubernetes.cluster.uninstall(each)
    try:
        said = refused(kubernetes, f"without-{kinds[0].plural if kinds else 'queue'}", **settings)
    finally:
        for each in kinds:
            kubernetes.cluster.install(each)
    assert all(word in said for word in words), said


def test_a_right_that_goes_after_the_check_leaves_nothing(kubernetes: KubernetesJobs) -> None:
    """A policy may refuse what the rights allow: then the job, which was there already, is removed again."""
    kubernetes.cluster.faults.plan(Fault.FORBIDDEN, "/networkpolicies", method="POST")
    assert "you must have the rights" in refused(kubernetes, "policy")


def test_an_expired_token_is_one_line(kubernetes: KubernetesJobs) -> None:
    path = kubernetes.cluster.kubeconfig(kubernetes.folder / "expired", token="old")
    assert "may have expired" in refused(kubernetes, "expired", kubeconfig=path)


def test_no_kubeconfig_is_one_line(
    kubernetes: KubernetesJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(kubernetes.folder))
    said = refused(kubernetes, "no-config", kubeconfig=kubernetes.folder / "none")
    assert "kubeconfig" in said


def test_a_full_quota_is_one_line_and_leaves_nothing(kubernetes: KubernetesJobs) -> None:
    count = len(names(kubernetes, CONFIG_MAPS))
    kubernetes.cluster.add_quota("objects", configmaps=str(count))
    said = refused(kubernetes, "full")
    assert "within the quota of its namespace" in said
