"""What is written for Kubernetes, without a cluster: settings, names and manifests."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.custom_resources import definition, validate

from stoker.core.errors import ConfigError
from stoker.jobs.job import Job, Resources
from stoker.jobs.providers.kubernetes.manifests.render import (
    MAX_CODE_BYTES,
    Manifests,
    is_owned,
    owned,
    render,
)
from stoker.jobs.providers.kubernetes.manifests.versions import expected_versions
from stoker.jobs.providers.kubernetes.names import object_name
from stoker.jobs.providers.kubernetes.pod.facts import FACTS, Facts, read_facts
from stoker.jobs.providers.kubernetes.pod.main import SHOWN, differing_versions
from stoker.jobs.providers.kubernetes.settings import KubernetesTarget, Toleration, Volume
from stoker.jobs.targets import read_targets

VERSIONS = ("1.28", "1.31", kubernetes_validate.latest_version())
"""The oldest that has all fields, one in between, the newest that is known."""

RUNS = Volume(claim="runs", path=Path("/shared"))


def job(**more: Any) -> Job:
    facts: dict[str, Any] = {
        "name": "Trip_Tips",
        "command": ("train",),
        "folder": Path("/home/me/trip"),
        "runs": Path("/shared/runs"),
        "code": "0" * 64,
        "resources": Resources(workers=2, gpus=1),
    }
    return Job(**facts | more)


def target(**more: Any) -> KubernetesTarget:
    settings: dict[str, Any] = {"image": "r.io/team/train:1", "volumes": (RUNS,)}
    return KubernetesTarget(**settings | more)


FULL = target(
    queue="team",
    priority_class="high",
    node_selector={"gpu": "a100"},
    tolerations=(Toleration(key="spot"), Toleration(key="g", operator="Equal", value="1")),
    secrets={"WANDB_API_KEY": "wandb/key", "OTHER": "other/key"},
    service_account="train",
    image_pull_secrets=("registry",),
    fs_group=2000,
    disruption_budget=True,
    volumes=(RUNS, Volume(claim="data", path=Path("/data"), read_only=True, sub_path="taxi")),
)


def rendered(kind: str, wanted: Job | None = None, chosen: KubernetesTarget = FULL) -> Manifests:
    full = job(secrets=("WANDB_API_KEY",))
    return render(wanted or full, chosen, kind=kind, namespace="team", code=b"code")


def pod_of(made: Manifests) -> dict[str, Any]:
    spec = made.workload["spec"]
    if "replicatedJobs" in spec:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    if "tfReplicaSpecs" in spec:
        spec = spec["tfReplicaSpecs"]["Worker"]
    return dict(spec["template"]["spec"])


@pytest.mark.parametrize("chosen", [FULL, target()], ids=["full", "least"])
@pytest.mark.parametrize("version", VERSIONS)
def test_an_indexed_job_and_its_objects_are_what_kubernetes_takes(
    version: str, chosen: KubernetesTarget
) -> None:
    made = rendered("job", job(), chosen)
    for each in made.all:
        kubernetes_validate.validate(each, version, strict=True)
    bad = made.workload | {"spec": made.workload["spec"] | {"backofLimit": 0}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(bad, version, strict=True)


@pytest.mark.parametrize(("kind", "name"), [("jobset", "JobSet"), ("tfjob", "TFJob")])
def test_custom_resources_fit_their_definitions(shared_data: Path, kind: str, name: str) -> None:
    known = definition(shared_data / "crds", name)
    for chosen in (FULL, target()):
        validate(rendered(kind, job(), chosen).workload, known)


def test_a_jobset_starts_again_by_these_rules() -> None:
    made = rendered("jobset")
    policy = made.workload["spec"]["failurePolicy"]
    (child,) = made.workload["spec"]["replicatedJobs"]
    spec = child["template"]["spec"]

    assert spec["backoffLimit"] == 0
    assert pod_of(made)["restartPolicy"] == "Never"
    conditions = [each.get("onExitCodes", {}).get("values") for each in _rules(spec)]
    assert conditions == [None, [75], [2]]
    assert _rules(spec)[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert {each["action"] for each in _rules(spec)} == {"FailJob"}
    assert [
        (
            each["action"],
            each.get("onJobFailureMessagePatterns"),
            each.get("onJobFailureReasons"),
        )
        for each in policy["rules"]
    ] == [
        ("FailJobSet", ["exit code 2 "], None),
        ("RestartJobSetAndIgnoreMaxRestarts", None, ["PodFailurePolicy"]),
        ("RestartJobSet", None, None),
    ]
    assert policy["maxRestarts"] == 3


def test_an_indexed_job_replaces_pods_that_saved_or_were_evicted_without_a_limit() -> None:
    spec = rendered("job").workload["spec"]
    actions = [(each["action"], each.get("onExitCodes", {}).get("values")) for each in _rules(spec)]
    assert actions == [("FailJob", [2]), ("Ignore", None), ("Ignore", [75])]
    assert spec["backoffLimit"] == 6, "each of two workers may fail with the other"
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 2


def _rules(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return list(spec["podFailurePolicy"]["rules"])


@pytest.mark.parametrize(
    ("kind", "hosts"),
    [
        ("job", ["{}-0.{}:2222", "{}-1.{}:2223"]),
        ("jobset", ["{}-worker-0-0.{}:2222", "{}-worker-0-1.{}:2223"]),
        ("tfjob", ["{}-worker-0:2222", "{}-worker-1:2223"]),
    ],
)
def test_pods_find_each_other_by_name(kind: str, hosts: list[str]) -> None:
    made = rendered(kind)
    name = made.workload["metadata"]["name"]
    variables = {each["name"]: each for each in pod_of(made)["containers"][0]["env"]}
    facts = read_facts({FACTS: variables[FACTS]["value"]})
    assert list(facts.workers) == [host.format(name, name) for host in hosts]
    kinds = [each["kind"] for each in made.dependents]
    assert ("Service" in kinds) == (kind == "job"), "a JobSet and a TFJob have their own"
    if kind == "job":
        assert pod_of(made)["subdomain"] == name
    longest = max(len(host.partition(".")[0].partition(":")[0]) for host in facts.workers)
    assert longest + len("9999") <= 63


def test_the_name_of_the_objects_is_a_dns_label_with_the_whole_hash() -> None:
    for name in ("Trip_Tips", "2nd", "-" * 3 + "x" * 90, "._", "a" * 100):
        wanted = job(name=f"x{name}"[:100] if name[0] in "-._" else name)
        made = object_name(wanted.id)
        assert made.endswith(wanted.id[-9:])
        assert made.replace("-", "").isalnum()
        assert made == made.lower()
        assert made[0].isalpha()
        assert len(made) <= 39


def test_pods_have_no_more_rights_than_a_training_needs() -> None:
    made = rendered("job")
    pod = pod_of(made)
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    assert writable == {"/tmp", "/dev/shm", "/shared"}
    assert "hostPath" not in json.dumps(made.all)
    policy = next(each for each in made.dependents if each["kind"] == "NetworkPolicy")
    peers = policy["spec"]["ingress"][0]["from"]
    assert peers == [{"podSelector": policy["spec"]["podSelector"]}]
    assert policy["spec"]["podSelector"]["matchLabels"], "not all pods of the namespace"


def test_secrets_are_references_and_only_those_of_the_job() -> None:
    text = rendered("job").to_yaml("job")
    assert "OTHER" not in text
    variables = pod_of(rendered("job"))["containers"][0]["env"]
    (found,) = (each for each in variables if each["name"] == "WANDB_API_KEY")
    assert found["valueFrom"] == {"secretKeyRef": {"name": "wandb", "key": "key"}}


def test_a_pod_has_longer_to_end_than_its_task_to_save() -> None:
    pod = pod_of(rendered("job", job(), target(grace_s=300)))
    variables = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    facts = read_facts({FACTS: str(variables[FACTS])})
    assert facts.grace_s == 300 < pod["terminationGracePeriodSeconds"]


def test_code_is_in_a_config_map_up_to_900_kib() -> None:
    small = render(job(), target(), kind="job", namespace="n", code=b"x" * MAX_CODE_BYTES)
    (found,) = (each for each in small.dependents if each["kind"] == "ConfigMap")
    assert base64.b64decode(found["binaryData"]["code.tar.gz"]) == b"x" * MAX_CODE_BYTES
    assert Job(**json.loads(found["data"]["job.json"])).name == "Trip_Tips"

    large = b"x" * (MAX_CODE_BYTES + 1)
    made = render(job(), target(), kind="job", namespace="n", code=large)
    assert "ConfigMap" not in {each["kind"] for each in made.dependents}
    assert "configMap" not in json.dumps(made.workload)
    with pytest.raises(ConfigError, match=r"at most 900 KiB for a ConfigMap\. Received: 900 KiB"):
        render(job(), target(code="configmap"), kind="job", namespace="n", code=large)


def test_the_job_owns_its_other_objects() -> None:
    made = rendered("job")
    owner = made.workload | {"metadata": made.workload["metadata"] | {"uid": "u-1"}}
    again = made.workload | {"metadata": made.workload["metadata"] | {"uid": "u-2"}}
    for each in made.dependents:
        own = owned(each, owner)
        kubernetes_validate.validate(own, VERSIONS[-1], strict=True)
        assert is_owned(own, owner)
        assert not is_owned(own, again)


def test_kueue_may_admit_a_part_of_an_elastic_job_but_of_no_jobset() -> None:
    elastic = job(resources=Resources(workers=4, min_workers=2))
    names = ("job-min-parallelism", "job-completions-equal-parallelism")
    for kind, chosen, values in (
        ("job", FULL, ["2", "true"]),
        ("jobset", FULL, [None, None]),
        ("job", target(), [None, None]),
    ):
        made = rendered(kind, elastic, chosen).workload
        notes = made["metadata"]["annotations"]
        assert [notes.get(f"kueue.x-k8s.io/{name}") for name in names] == values
        assert ('"min_workers": 2' in json.dumps(made).replace("\\", "")) == (values[0] == "2")
    spec = rendered("job", elastic, FULL).workload["spec"]
    assert spec["completions"] == spec["parallelism"] == 4


@pytest.mark.parametrize("kind", ["job", "jobset", "tfjob"])
def test_labels_of_the_job_are_those_of_its_object_and_its_pods(kind: str) -> None:
    plain, labeled = (
        json.dumps(rendered(kind, replace(job(), labels=labels)).workload)
        for labels in ({}, {"team": "search"})
    )

    assert '"team": "search"' not in plain
    assert labeled.count('"team": "search"') >= 2


def test_manifests_are_created_suspended_and_printed_as_they_will_run() -> None:
    for kind in ("job", "jobset", "tfjob"):
        for chosen, waits in ((target(), False), (FULL, True)):
            made = rendered(kind, job(), chosen)
            assert '"suspend": true' in json.dumps(made.workload)
            printed = list(yaml.safe_load_all(made.to_yaml(kind)))
            assert ('"suspend": true' in json.dumps(printed[0])) == waits, "only Kueue ends it"
            assert "&id" not in made.to_yaml(kind), "kubectl reads no references"


def differing(source: str, versions: dict[str, str]) -> list[str]:
    facts = read_facts({FACTS: json.dumps(FACTS_OF_A_POD.to_json())})
    return differing_versions(replace(facts, versions=versions, versions_from=source))


def test_the_image_is_compared_with_the_submission_without_a_lock(tmp_path: Path) -> None:
    source, here = expected_versions(tmp_path)
    assert here["stoker"]
    assert differing(source, here) == []
    assert differing(source, here | {"stoker": "0.0.0", "numpy": "1"}) == [
        f"stoker in the image is {here['stoker']}; the submission has 0.0.0",
        f"numpy in the image is {here['numpy']}; the submission has 1",
    ]


REQUIREMENTS = """\
--index-url https://pypi.org/simple
NumPy==0.1 \\
    --hash=sha256:00
stoker==0.0.0 --hash=sha256:00  # first
keras==0.2 ; sys_platform == "linux"
wrapt==0.3 ; sys_platform == "win32"
pandas>=2
"""
PROJECT = """\
version = 1
[[package]]
name = "numpy"
version = "0.1"
source = { registry = "https://pypi.org/simple" }
[[package]]
name = "wrapt"
version = "1"
[[package]]
name = "wrapt"
version = "2"
[[package]]
name = "trip"
version = "1"
source = { virtual = "." }
"""


def test_the_image_is_compared_with_the_lock_file(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "uv.lock").write_text(PROJECT)
    experiment = tmp_path / "experiments" / "trip"
    experiment.mkdir(parents=True)
    assert expected_versions(experiment) == ("uv.lock", {"numpy": "0.1"})
    (experiment / "requirements.lock").write_text(REQUIREMENTS)
    source, versions = expected_versions(experiment)
    assert source == "requirements.lock"
    assert versions == {"numpy": "0.1", "stoker": "0.0.0", "keras": "0.2"}
    lines = differing(source, versions | {"gone": "1", "tensorflow": "1"})
    assert [line.partition(" ")[0] for line in lines] == ["tensorflow", "keras", "stoker", "numpy"]
    assert lines[0].endswith("; requirements.lock has 1")

    many = {each.name: "none" for each in distributions()}
    assert len(many) > SHOWN
    assert differing(source, many)[SHOWN:] == [
        f"and {len(many) - SHOWN} more packages differ from requirements.lock"
    ]
    place = job(folder=experiment)
    assert '"versions_from": "requirements.lock"' in json.dumps(
        json.loads(_facts_of(rendered("job", place, target()))), indent=1
    )


def _facts_of(made: Manifests) -> str:
    (container,) = made.workload["spec"]["template"]["spec"]["containers"]
    (found,) = [str(each["value"]) for each in container["env"] if each["name"] == FACTS]
    return found


FACTS_OF_A_POD = Facts(
    place="/p", kind="job", python="python3", workers=("a:1",), grace_s=1, start_s=1, max_restarts=0
)


def test_facts_pass_through_the_environment() -> None:
    facts = Facts(
        place="/p",
        kind="job",
        python="python3",
        workers=("a:1",),
        grace_s=1,
        start_s=2,
        max_restarts=3,
    )
    changed = replace(facts, time_limit_s=1.5, versions={"a": "1"})
    assert read_facts({FACTS: json.dumps(changed.to_json())}) == changed
    with pytest.raises(ConfigError, match="STOKER_KUBERNETES must be set"):
        read_facts({})


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, "targets.k.image must be given"),
        ({"image": ""}, "targets.k: image must name an image"),
        ({"image": "a", "namespace": "Team"}, "namespace must be a name that Kubernetes takes"),
        ({"image": "a", "kind": "cronjob"}, "kind must be one of: job, jobset, tfjob"),
        ({"image": "a", "grace_s": 1}, "grace_s must be from 10 to 86400 s"),
        ({"image": "a", "shm_gib": 8.0}, "shm_gib must be below memory_gib"),
        ({"image": "a", "ephemeral_gib": 1e-9}, "ephemeral_gib must be from 0.001"),
        ({"image": "a", "cpus": 0.0}, "cpus must be from 0.001"),
        ({"image": "a", "keep_s": 10**30}, "keep_s must be from 1 to"),
        ({"image": "a", "run_as_user": -1}, "run_as_user must be from 0 to"),
        ({"image": "a", "fs_group": 1 << 31}, "fs_group must be from 0 to"),
        ({"image": "a", "gpu_resource": ""}, "gpu_resource must be a name that Kubernetes takes"),
        ({"image": "a", "python": " "}, "python must name a program of the image"),
        ({"image": "a", "node_selector": {"a b": "c"}}, "a key of node_selector must be a name"),
        ({"image": "a", "node_selector": {"a": "b c"}}, "node_selector.a must be a name"),
        ({"image": "a", "tolerations": [{"key": "a b"}]}, "the key of a toleration must be"),
        ({"image": "a", "environment": {"A": "\0"}}, "environment.A must be text without"),
        ({"image": "a", "volumes": [{"claim": "c", "path": "/a:b"}]}, "must have no colon"),
        ({"image": "a", "volumes": [{"claim": "c", "path": "/tmp"}]}, "a different path"),
        ({"image": "a", "volumes": [{"claim": "c", "path": "/a"}] * 2}, "a different path"),
        ({"image": "a", "run_as_user": 0}, "run_as_user must not be root"),
        ({"image": "a", "code": "git+https://h/r@main"}, "with all 40 digits"),
        ({"image": "a", "code": "git+https://me:token@h/r@" + "0" * 40}, "//***@h/r@0"),
        ({"image": "a", "secrets": {"KEY": "my value"}}, "secrets.KEY must be SECRET/KEY"),
        ({"image": "a", "volumes": [{"claim": "c", "path": "runs"}]}, "must be an absolute path"),
        ({"image": "a", "tolerations": [{"operator": "Equal"}]}, "Equal must have a key"),
        ({"image": "a", "max_restart": 1}, "targets.k.max_restart is not a setting. Did you mean"),
    ],
)
def test_a_wrong_setting_is_one_line(tmp_path: Path, settings: dict[str, Any], rule: str) -> None:
    section = {"k": {"provider": "kubernetes", **settings}}
    file = tmp_path / "stoker.yaml"
    file.write_text(yaml.safe_dump({"targets": section}))
    with pytest.raises(ConfigError) as error:
        read_targets(section, file=file)["k"].open()
    assert rule in str(error.value)
    assert "\n" not in str(error.value)
