"""Manifests against Kubernetes' own schemas, and their flags and probes against the real server."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.integration.tools.conftest import half

from stoker.cli.main import invoke
from stoker.cluster.doctor.framework import Package, cuda_packages
from stoker.core.errors import ConfigError, DataError, UserError
from stoker.deploy import requirements
from stoker.deploy.plan import Plan
from stoker.deploy.requirements import cuda_requirements, pinned_requirements
from stoker.deploy.shared import SharedVolume, parse_volume
from stoker.registry.repository import Repository
from stoker.serve.config import ServeConfig

ROOT = Path(__file__).parents[3]
VERSIONS = ("1.29", "1.33", "1.37")
"""Kubernetes releases whose schemas are checked."""

SERVERS = ("stoker", "tensorflow-serving")
TARGETS = ("compose", "kubernetes", "kserve")
KSERVE_ONLY = {"minReplicas", "maxReplicas", "scaleMetric", "scaleTarget", "timeout"}
"""The fields of KServe's predictor besides those of a pod. Source: KServe, ComponentExtensionSpec."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of a model."""
    folder = tmp_path_factory.mktemp("deploy")
    repository = Repository(folder / "models")
    for number in (1, 2):
        repository.push(half(folder / f"half{number}", addend=number), "half_plus")
    return repository.base("half_plus")


@pytest.fixture(scope="module")
def written(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """(target, server) -> the folder that the command wrote."""
    folder = tmp_path_factory.mktemp("written")
    made = {}
    for target in TARGETS:
        for server in SERVERS:
            out = folder / f"{target}-{server}"
            flags = ["--target", target, "--server", server, "--out", str(out)]
            assert invoke(["deploy", str(base), *flags], debug=False) == 0
            made[target, server] = out
    return made


def objects(folder: Path) -> dict[str, Any]:
    """Kind -> object of all manifests."""
    loaded = [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("k*/*.yaml"))]
    return {one["kind"]: one for one in loaded}


def pod_of(folder: Path) -> Any:
    found = objects(folder)
    if "Deployment" in found:
        return found["Deployment"]["spec"]["template"]["spec"]
    predictor = found["InferenceService"]["spec"]["predictor"]
    return {key: value for key, value in predictor.items() if key not in KSERVE_ONLY}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("server", SERVERS)
def test_every_object_is_what_kubernetes_takes(
    written: dict[tuple[str, str], Path], server: str, version: str
) -> None:
    found = objects(written["kubernetes", server])
    assert set(found) == {
        "Deployment",
        "Service",
        "HorizontalPodAutoscaler",
        "PodDisruptionBudget",
        "NetworkPolicy",
    }
    pod: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    pod["spec"] = pod_of(written["kserve", server])
    container = pod["spec"]["containers"][0]
    for one in (*found.values(), pod):
        kubernetes_validate.validate(one, version, strict=True)

    # The check sees a name that is spelled wrongly, and a value of another type.
    wrong: tuple[dict[str, Any], ...] = ({"readinesProbe": {}}, {"ports": "8501"})
    for change in wrong:
        pod["spec"]["containers"][0] = container | change
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("target", ["kubernetes", "kserve"])
def test_no_container_has_more_than_it_needs(
    written: dict[tuple[str, str], Path], target: str, server: str
) -> None:
    pod = pod_of(written[target, server])
    (container,) = pod["containers"]
    security = container["securityContext"]

    assert pod["automountServiceAccountToken"] is False
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] > 0
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert {"memory", "ephemeral-storage"} <= set(container["resources"]["limits"])
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert probe in container
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"/tmp"}
    waits_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert waits_s + 30 <= pod["terminationGracePeriodSeconds"]


def test_a_server_that_loads_and_warms_up_for_as_long_as_it_may_is_not_killed(
    written: dict[tuple[str, str], Path],
) -> None:
    probe = pod_of(written["kubernetes", "stoker"])["containers"][0]["startupProbe"]
    starts_s = probe["periodSeconds"] * probe["failureThreshold"]
    deadline_s = objects(written["kubernetes", "stoker"])["Deployment"]["spec"][
        "progressDeadlineSeconds"
    ]
    compose = yaml.safe_load((written["compose", "stoker"] / "compose.yaml").read_text())
    period = compose["services"]["server"]["healthcheck"]["start_period"]

    warm_s = ServeConfig(root=Path()).warm_s
    assert starts_s >= 2 * warm_s
    # A worker that replaces a dead one loads the models, and connections wait meanwhile.
    alive = pod_of(written["kubernetes", "stoker"])["containers"][0]["livenessProbe"]
    assert alive["periodSeconds"] * alive["failureThreshold"] > warm_s
    assert deadline_s > starts_s
    assert period == f"{starts_s}s"


@pytest.mark.parametrize("server", SERVERS)
def test_the_objects_mean_the_same_pods(written: dict[tuple[str, str], Path], server: str) -> None:
    found = objects(written["kubernetes", server])
    deployment = found["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= labels
    assert (
        found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"]
        == (deployment["metadata"]["name"])
    )
    assert "replicas" not in deployment["spec"]
    names = {
        port["name"] for port in pod_of(written["kubernetes", server])["containers"][0]["ports"]
    }
    assert {port["targetPort"] for port in found["Service"]["spec"]["ports"]} == names
    policy = found["NetworkPolicy"]["spec"]
    assert policy["egress"] == []
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert all(rule["from"] for rule in policy["ingress"])


@pytest.mark.parametrize("server", SERVERS)
def test_compose_is_as_tight(written: dict[tuple[str, str], Path], server: str) -> None:
    (service,) = yaml.safe_load((written["compose", server] / "compose.yaml").read_text())[
        "services"
    ].values()

    assert service["read_only"] is True
    assert service["user"] == "10001:10001"
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("target", TARGETS)
def test_the_image_has_the_newest_version_whole_and_does_not_run_as_root(
    base: Path, written: dict[tuple[str, str], Path], target: str, server: str
) -> None:
    out = written[target, server]
    copied = Repository(out / "models")
    dockerfile = (out / "Dockerfile").read_text()

    assert copied.versions("half_plus") == [2]
    assert copied.content_hash("half_plus", 2) == Repository(base.parent).content_hash(
        "half_plus", 2
    )
    assert re.findall(r"^USER (.*)$", dockerfile, re.MULTILINE) == ["10001:10001"]
    assert "$" not in dockerfile.replace("$PATH", "")
    for path in (*out.glob("*.md"), *out.glob("k*/*.yaml"), *out.glob("*.yaml")):
        assert "$" not in path.read_text().replace("$$", "")
    (command,) = re.findall(r"^CMD (.*)$", dockerfile, re.MULTILINE)
    started = (
        yaml.safe_load((out / "compose.yaml").read_text())["services"]["server"]["command"]
        if target == "compose"
        else pod_of(out)["containers"][0]["args"]
    )
    assert json.loads(command) == started


@contextlib.contextmanager
def running(arguments: list[str], ready: Path) -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker", *arguments, "--ready-file", str(ready)],
        stderr=subprocess.PIPE,
    )
    try:
        give_up_s = time.monotonic() + 600
        while not ready.exists():
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            assert time.monotonic() < give_up_s
            time.sleep(0.05)
        yield json.loads(ready.read_text())["rest_port"]
    finally:
        process.terminate()
        process.communicate(timeout=300)


def test_our_server_takes_the_flags_and_answers_the_probes(
    written: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    """As in the container, but for the folder, the ports and the address, which are this machine's."""
    out = written["kubernetes", "stoker"]
    container = pod_of(out)["containers"][0]
    here = {
        "--host=0.0.0.0": "--host=127.0.0.1",
        "--port=8500": "--port=0",
        "--rest_api_port=8501": "--rest_api_port=0",
        "--model_base_path=/models/half_plus": f"--model_base_path={out / 'models' / 'half_plus'}",
    }
    assert set(here) <= set(container["args"])
    # The address itself is not listened on here, so the server's message on it is produced first.
    ServeConfig(
        models={"half_plus": out / "models" / "half_plus"},
        host="0.0.0.0",
        allow_unauthenticated="--allow-unauthenticated" in container["args"],
    )
    with running([here.get(a, a) for a in container["args"]], tmp_path / "ready.json") as port:
        paths = {
            container[probe]["httpGet"]["path"]
            for probe in ("startupProbe", "readinessProbe", "livenessProbe")
        }
        paths |= {
            pod_of(written["kubernetes", "tensorflow-serving"])["containers"][0]["readinessProbe"][
                "httpGet"
            ]["path"]
        }
        for path in paths:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=300) as answer:
                assert answer.status == 200
        compose = yaml.safe_load((written["compose", "stoker"] / "compose.yaml").read_text())
        check = compose["services"]["server"]["healthcheck"]["test"]
        code = check[-1].replace("8501", str(port))
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0
        other = yaml.safe_load(
            (written["compose", "tensorflow-serving"] / "compose.yaml").read_text()
        )["services"]["server"]["healthcheck"]["test"]
        connect = [part.replace("8501", str(port)) for part in other[1:]]
        assert subprocess.run(connect).returncode == 0, shlex.join(connect)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode != 0
    assert subprocess.run(connect, capture_output=True).returncode != 0


def test_the_image_gets_the_versions_that_are_installed_here() -> None:
    pinned = dict(line.split("==") for line in pinned_requirements())

    assert "stoker" not in pinned
    for name in ("tensorflow", "grpcio", "httptools", "numpy", "pyyaml"):
        assert re.fullmatch(r"[0-9][0-9a-z.+!]*", pinned[name])
    # What TensorFlow needs, and not what tests need.
    assert "h5py" in pinned
    assert "pytest" not in pinned


@pytest.fixture(scope="module")
def with_gpu(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Target -> the folder that the command wrote for servers with a GPU."""
    folder = tmp_path_factory.mktemp("gpu")
    for target in TARGETS:
        flags = ["--target", target, "--gpu", "--out", str(folder / target)]
        assert invoke(["deploy", str(base), *flags], debug=False) == 0
    return {target: folder / target for target in TARGETS}


def test_the_image_with_a_gpu_gets_cuda_from_the_lock_and_from_no_other_image(
    with_gpu: dict[str, Path], written: dict[tuple[str, str], Path]
) -> None:
    out = with_gpu["compose"]
    dockerfile = (out / "Dockerfile").read_text()
    lock = (out / "requirements-cuda.txt").read_text()

    assert lock == (ROOT / "requirements-cuda.lock").read_text()
    assert lock.count("--hash=sha256:") >= lock.count("==") > 10
    locked = {line.partition("==")[0] for line in lock.splitlines() if "==" in line}
    assert {package.name for package in cuda_packages()} <= locked
    bases = re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)
    assert set(bases) == {f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"}
    (copied,) = re.findall(r"^COPY (requirements.*) ./$", dockerfile, re.MULTILINE)
    assert copied.split() == ["requirements.txt", "requirements-cuda.txt"]
    assert "--no-deps --require-hashes --requirement requirements-cuda.txt" in dockerfile
    assert "ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility" in dockerfile

    without = written["compose", "stoker"]
    assert not (without / "requirements-cuda.txt").exists()
    assert "cuda" not in (without / "Dockerfile").read_text().lower()
    assert "nvidia" not in (without / "compose.yaml").read_text()


def test_each_server_gets_one_gpu_where_the_image_has_cuda(with_gpu: dict[str, Path]) -> None:
    found = objects(with_gpu["kubernetes"])
    pods = [pod_of(with_gpu[target]) for target in ("kubernetes", "kserve")]
    (service,) = yaml.safe_load((with_gpu["compose"] / "compose.yaml").read_text())[
        "services"
    ].values()

    kubernetes_validate.validate(found["Deployment"], VERSIONS[-1], strict=True)
    for pod in pods:
        assert pod["containers"][0]["resources"]["limits"] == {
            "memory": "8Gi",
            "ephemeral-storage": "512Mi",
            "nvidia.com/gpu": "1",
        }
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    for target in TARGETS:
        assert "needs a free GPU" in (with_gpu[target] / "README.md").read_text()


def test_a_lock_that_does_not_fit_the_installed_tensorflow_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for wanted, had in ((">=99", "version 12"), (">=1", "not in the lock")):
        name = "nvidia-cublas-cu12" if wanted == ">=99" else "nvidia-other-cu99"
        package = Package(name=name, wanted=wanted, installed=None, fits=False)
        monkeypatch.setattr(requirements, "cuda_packages", lambda package=package: (package,))
        with pytest.raises(UserError, match=f"needs {name}{wanted}.*{had}"):
            cuda_requirements()


@pytest.fixture(scope="module")
def shared(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of volume -> the folder that the command wrote for servers with a shared repository."""
    folder = tmp_path_factory.mktemp("shared")
    volumes = {"nfs": "nfs://10.0.0.7/srv/models", "class": "efs-sc", "claim": "pvc://team-models"}
    for name, volume in volumes.items():
        flags = ["--target", "kubernetes", "--shared-repository", volume, "--gpu"]
        flags += ["--queue-target", "8"]
        out = str(folder / name)
        assert invoke(["deploy", str(base), *flags, "--out", out], debug=False) == 0
    return {name: folder / name for name in volumes}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_shared_repository_is_what_kubernetes_takes(
    shared: dict[str, Path], version: str
) -> None:
    for volume, out in shared.items():
        found = objects(out)
        assert set(found) >= {"Deployment", "Service", "HorizontalPodAutoscaler"}
        assert ("PersistentVolumeClaim" in found) == (volume != "claim")
        assert ("PersistentVolume" in found) == (volume == "nfs")
        job = yaml.safe_load((out / "push.yaml").read_text())
        for one in (*found.values(), job):
            kubernetes_validate.validate(one, version, strict=True)


def test_all_servers_mount_the_repository_and_can_write_to_it(shared: dict[str, Path]) -> None:
    found = objects(shared["nfs"])
    pod = found["Deployment"]["spec"]["template"]["spec"]
    job = yaml.safe_load((shared["nfs"] / "push.yaml").read_text())["spec"]["template"]["spec"]
    claim, volume = found["PersistentVolumeClaim"], found["PersistentVolume"]

    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert claim["spec"]["storageClassName"] == volume["spec"]["storageClassName"] == ""
    assert claim["spec"]["accessModes"] == volume["spec"]["accessModes"] == ["ReadWriteMany"]
    assert volume["spec"]["nfs"] == {"server": "10.0.0.7", "path": "/srv/models"}
    # Without these a server sees a new state up to a minute late.
    assert {"acdirmin=1", "acdirmax=1", "lookupcache=positive"} <= set(
        volume["spec"]["mountOptions"]
    )
    assert objects(shared["class"])["PersistentVolumeClaim"]["spec"]["storageClassName"] == "efs-sc"
    existing = pod_of(shared["claim"])["volumes"][1]["persistentVolumeClaim"]
    assert existing == {"claimName": "team-models"}

    for one in (pod, job):
        (mounted,) = (each for each in one["volumes"] if each["name"] == "models")
        name = mounted["persistentVolumeClaim"]["claimName"]
        assert name == claim["metadata"]["name"]
        for container in (*one["containers"], *one.get("initContainers", ())):
            mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
            assert set(mounts) == {"/tmp", "/models"}
            assert "readOnly" not in mounts["/models"]
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (
                container["name"] == "server"
            )


@pytest.mark.parametrize("target", ["kubernetes", "kserve"])
def test_a_name_that_is_a_word_of_yaml_stays_a_text(
    base: Path, tmp_path: Path, target: str
) -> None:
    shutil.copytree(base, tmp_path / "null")
    flags = ["--target", target, "--image", "22:22", "--out", str(tmp_path / "out")]
    flags += ["--shared-repository", "pvc://null"] if target == "kubernetes" else []

    assert invoke(["deploy", str(tmp_path / "null"), *flags], debug=False) == 0

    for one in objects(tmp_path / "out").values():
        assert one["metadata"]["name"] == "null"
        assert set(one["metadata"]["labels"].values()) <= {"null", "model-server"}
        if one["apiVersion"] in ("v1", "apps/v1"):
            kubernetes_validate.validate(one, VERSIONS[-1], strict=True)
    pod = pod_of(tmp_path / "out")
    assert {each["image"] for each in pod["containers"]} == {"22:22"}
    assert {
        each.get("persistentVolumeClaim", {"claimName": "null"})["claimName"]
        for each in pod["volumes"]
    } == {"null"}


@pytest.mark.parametrize("flag", ["--image", "--base-image", "--memory", "--cpu"])
def test_an_empty_value_is_not_the_default(
    base: Path, tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["deploy", str(base), "--target", "kubernetes", "--out", str(tmp_path / "out")]
    assert invoke([*argv, flag, ""], debug=False) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"stoker: {flag} must be like")
    assert not (tmp_path / "out").exists()


def plan(**settings: Any) -> Plan:
    facts: dict[str, Any] = {
        "model": "taxi",
        "version": 1,
        "source": Path(),
        "target": "kubernetes",
        "server": "stoker",
        "image": "taxi:1",
        "base": "python:3.11-slim",
    }
    return Plan(**(facts | settings))


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"model": "a$(HOME)"}, "the model's name"),
        ({"model": "a: b"}, "the model's name"),
        ({"image": "x\nUSER root"}, "--image must be like"),
        ({"image": "a/:1"}, "--image must be like"),
        ({"image": "a::1@"}, "--image must be like"),
        ({"image": "a:1@sha256:0"}, "--image must be like"),
        ({"image": ""}, "--image must be like"),
        ({"image": "a" * 256}, "--image must be like"),
        ({"cpu": "0.0"}, "--cpu must be like"),
        ({"cpu": "0.0001"}, "--cpu must be like"),
        ({"cpu": "1234567"}, "--cpu must be like"),
        ({"memory": "12345678Gi"}, "--memory must be like"),
        ({"max_replicas": 1 << 31}, "at least 1 replica"),
        ({"queue_target": 1 << 31}, "--queue-target must be from 1"),
        ({"base": "a b"}, "--base-image must be like"),
        ({"cpu": "1 core"}, "--cpu must be like"),
        ({"memory": "2"}, "--memory must be like"),
        ({"replicas": 0}, "at least 1 replica"),
        ({"replicas": 5, "max_replicas": 2}, "at least 1 replica"),
        ({"target": "compose", "cpu": "500m"}, "number of cores"),
        ({"server": "tensorflow-serving", "gpu": True}, "--gpu needs --server stoker"),
        ({"target": "kserve", "shared": SharedVolume()}, "--shared-repository needs"),
        ({"server": "tensorflow-serving", "shared": SharedVolume()}, "--shared-repository needs"),
        ({"model": "m" * 60, "shared": SharedVolume()}, "NAME-push-VERSION must have at most 63"),
        ({"queue_target": 0}, "--queue-target must be from 1"),
        ({"queue_target": 5, "target": "kserve"}, "--queue-target needs"),
        ({"queue_target": 5, "server": "tensorflow-serving"}, "--queue-target needs"),
    ],
)
def test_what_a_manifest_could_not_hold_is_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        plan(**settings)


@pytest.mark.parametrize(
    "text",
    [
        *("nfs://host", "nfs://a b/c", "nfs:///x", "nfs://h/../x", "nfs://h/a/.."),
        *("A", "a\nb", "-a", "a..b", "a" * 64, "", "pvc://", "pvc://A", "pvc://a/b", "pvc://../a"),
    ],
)
def test_a_volume_is_an_export_a_claim_or_a_class(text: str) -> None:
    with pytest.raises(ConfigError, match="--shared-repository must be nfs://SERVER/PATH"):
        parse_volume(text)


@pytest.mark.parametrize(
    "image",
    ["a", "a:V1.0-RC1", "r.io:5000/a/b_c:1", "a/b--c", f"R.io/a:1@sha256:{'0' * 64}"],
)
def test_an_image_has_any_name_that_a_registry_takes(image: str) -> None:
    assert plan(image=image).image == image


def test_a_name_is_one_that_a_service_can_have() -> None:
    assert plan(model="Taxi_Tips.v2").name == "taxi-tips-v2"
    assert plan(model="2026").name == "model-2026"


def test_what_was_written_before_is_not_overwritten(
    base: Path, written: dict[tuple[str, str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    out = str(written["compose", "stoker"])
    flags = ["--target", "compose", "--out", out]

    assert invoke(["deploy", str(base), *flags], debug=False) == 2
    assert "does not exist yet" in capfd.readouterr().err
    assert invoke(["deploy", str(base), *flags[:3], out + "9", "--version", "7"], debug=False) == 2
    assert "must hold version 7. Received: 1, 2." in capfd.readouterr().err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """64 KiB, which can also be made read-only."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_cannot_be_written_is_one_line(
    base: Path, small_disk: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(command: str, out: Path) -> str:
        flags = ["--target", "compose"] if command == "deploy" else ["--to", "litert"]
        flags += [] if command == "deploy" else ["--data", str(tmp_path / "rows.json")]
        assert invoke([command, str(model), *flags, "--out", str(out)], debug=False) == 2
        said = capfd.readouterr().err
        assert said.count("\n") == 1
        return said

    model = tmp_path / "half_plus"
    shutil.copytree(base / "2", model / "2")
    (model / "2" / "assets").mkdir(exist_ok=True)
    (model / "2" / "assets" / "large").write_bytes(bytes(1 << 20))
    (model / "2" / "stoker.manifest.json").unlink()
    (tmp_path / "rows.json").write_text("[1.0, 2.0]")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")

    assert "must have room for it" in refused("deploy", small_disk / "a")
    assert list(small_disk.iterdir()) == []
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for command in ("deploy", "convert"):
        assert "can be written" in refused(command, small_disk / "a")
        assert "can be written" in refused(command, tmp_path / "rows.json" / "a")
        assert "can be written" in refused(command, tmp_path / ("a" * 300))
        assert "does not exist yet" in refused(command, tmp_path / "link")


def test_the_readme_says_what_can_be_pasted(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "a folder; $HOME"
    for target, image in (("compose", "a:1"), ("kubernetes", "a:1"), ("kserve", "r.io/a:1")):
        flags = ["--target", target, "--image", image, "--out", str(out / target)]
        flags += ["--replicas", "3", "--max-replicas", "5"]
        assert invoke(["deploy", str(base), *flags], debug=False) == 0
        readme = (out / target / "README.md").read_text()
        commands = [line.strip() for line in readme.splitlines() if line.startswith(" " * 7)]
        named = [word for line in commands for word in shlex.split(line) if str(tmp_path) in word]
        assert named
        assert all(word.startswith(str(out / target)) for word in named)
        # Compose builds the image where it runs it.
        assert ("docker push" in readme) == (target != "compose")
        assert ("names no registry" in readme) == (target == "kubernetes")
        assert ("3 to 5 servers" in readme) == (target != "compose")


def test_a_model_that_is_larger_than_the_memory_of_a_server_is_refused(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(base, tmp_path / "half_plus")
    version = tmp_path / "half_plus" / "2"
    (version / "stoker.manifest.json").unlink()
    (version / "assets").mkdir(exist_ok=True)
    with (version / "assets" / "large").open("wb") as large:
        large.truncate(1 << 30)
    flags = ["--target", "kubernetes", "--memory", "1Gi", "--out", str(tmp_path / "out")]

    assert invoke(["deploy", str(tmp_path / "half_plus"), *flags], debug=False) == 2
    said = capfd.readouterr().err
    assert "--memory must be more than the model's size on disk" in said
    assert "Received: 1Gi, and a model of 1.00 GiB." in said
    assert not (tmp_path / "out").exists()


def test_a_damaged_version_is_not_deployed(base: Path, tmp_path: Path) -> None:
    from stoker.deploy.write import read_model

    shutil.copytree(base, tmp_path / "half_plus")
    (tmp_path / "half_plus" / "2" / "saved_model.pb").write_bytes(b"x")

    with pytest.raises(DataError, match="bytes that differ from the pushed ones"):
        read_model(tmp_path / "half_plus", version=None)
    assert read_model(tmp_path / "half_plus", version=1)[:2] == ("half_plus", 1)
