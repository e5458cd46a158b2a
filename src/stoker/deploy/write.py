"""Writes a deployment: Dockerfile, model, manifests and README."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from importlib import metadata, resources
from pathlib import Path
from string import Template

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from stoker.cluster.doctor.framework import cuda_packages
from stoker.core.errors import ConfigError, Plain, UserError
from stoker.core.files import publish_folder, scratch_folder
from stoker.deploy.plan import REST_PORT, Plan
from stoker.deploy.shared import ROOT

CUDA_LOCK = "requirements-cuda.lock"
"""TensorFlow's CUDA libraries with versions and hashes: a link to the file that `make setup` installs."""

_OBJECTS = ("deployment", "service", "autoscaler", "disruption", "network")

_LIMITS = {
    "compose": "One server, reachable from this machine only.",
    "kubernetes": "$replicas to $max_replicas servers, spread over nodes, by CPU; only labeled "
    "clients reach them; they cannot connect to anything.",
    "kserve": "$replicas to $max_replicas servers, by CPU. KServe and your service mesh control who "
    "may call.",
}

_UNCHECKED = {
    "stoker": "The image was not built here, and nothing was applied to a cluster.",
    "tensorflow-serving": "The image was not built here, nothing was applied to a cluster, and whether "
    "the registry has this tag was not checked.",
}


def write_deployment(plan: Plan, out: Path) -> list[Path]:
    """Write the folder; on failure, write nothing.

    Args:
        plan: The deployment.
        out: The folder to write; must not exist.

    Returns:
        The files other than the model's, relative to `out`.

    Raises:
        ConfigError: `out` exists.
    """
    if os.path.lexists(out):
        raise ConfigError(
            "--out must be a folder that does not exist yet",
            got=str(out),
            fix="Name another folder: this one may contain changes made by hand.",
        )
    texts = _texts(plan, out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(out) as scratch:
        for name, text in texts.items():
            path = scratch / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        _copy(plan.source, scratch / "models" / plan.model / str(plan.version))
        if plan.server == "stoker":
            (scratch / "wheels").mkdir()
        publish_folder(scratch, out)
    return [Path(name) for name in texts]


def _copy(source: Path, to: Path) -> None:
    """Copy a folder; unlike `shutil.copytree`, stop at a full disk with its error."""
    to.mkdir(parents=True)
    for path in sorted(source.rglob("*")):
        if path.is_dir():
            (to / path.relative_to(source)).mkdir()
        else:
            shutil.copyfile(path, to / path.relative_to(source))


def _texts(plan: Plan, out: Path) -> dict[str, str]:
    """File -> text."""
    values = _values(plan, out)
    texts = {"Dockerfile": _fill(f"dockerfile-{plan.server}", **values)}
    texts[".dockerignore"] = "compose.yaml\nkubernetes/\nkserve/\npush.yaml\nREADME.md\n"
    if plan.server == "stoker":
        texts["requirements.txt"] = "\n".join(pinned_requirements()) + "\n"
    if plan.gpu:
        texts["requirements-cuda.txt"] = cuda_requirements()
    if plan.target == "compose":
        texts["compose.yaml"] = _fill("compose", **values)
    elif plan.target == "kserve":
        pod = _block(_pod(plan, values), 4)
        texts["kserve/inference-service.yaml"] = _fill("kserve", **values, pod=pod)
    else:
        pod = _block(_pod(plan, values), 6)
        for name in _OBJECTS:
            texts[f"kubernetes/{name}.yaml"] = _fill(name, **values, pod=pod)
        texts |= _shared_texts(plan, values)
    values["wheel"] = _fill("readme-wheel", **values) if plan.server == "stoker" else ""
    values["push"] = "" if plan.target == "compose" else _fill("readme-push", **values)
    values["steps"] = _fill(f"steps-{plan.target}", **values)
    texts["README.md"] = _fill("readme", **values)
    return texts


def _shared_texts(plan: Plan, values: dict[str, str]) -> dict[str, str]:
    """File -> text of what a shared repository adds; empty without one."""
    if plan.shared is None:
        return {}
    claim, pod = _fill("claim", **values), _block(_job_pod(values), 6)
    texts = {"push.yaml": _fill("push", **values, pod=pod)}
    if plan.shared.nfs_server:
        texts["kubernetes/volume.yaml"] = _fill("volume", **values)
        claim += _fill("claim-volume", **values)
    return texts | {"kubernetes/claim.yaml": claim}


def _values(plan: Plan, out: Path) -> dict[str, str]:
    stoker = plan.server == "stoker"
    check = (
        f"import urllib.request as r; r.urlopen('http://127.0.0.1:{REST_PORT}/readyz', timeout=3)"
    )
    health = ["CMD", "python", "-c", check]
    # TensorFlow Serving's image has neither curl nor Python; bash can connect.
    connect = ["CMD", "bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{REST_PORT}"]
    return {
        "name": plan.name,
        "model": plan.model,
        "version": str(plan.version),
        "server": "Stoker" if stoker else "TensorFlow Serving",
        "image": plan.image,
        "base": plan.base,
        "arguments": json.dumps(plan.arguments),
        "annotations": json.dumps(
            {"stoker/model": plan.model, "stoker/version": str(plan.version)}
        ),
        "status_path": json.dumps(f"/v1/models/{plan.model}"),
        "health": json.dumps(health if stoker else connect),
        "cpu": plan.cpu,
        "memory": plan.memory,
        "compose_memory": plan.memory.removesuffix("i").lower(),
        "replicas": str(plan.replicas),
        "max_replicas": str(plan.max_replicas),
        "limits": Template(_LIMITS[plan.target]).substitute(
            replicas=plan.replicas, max_replicas=plan.max_replicas
        ),
        "unchecked": _UNCHECKED[plan.server] + (" It was not run with a GPU." if plan.gpu else ""),
        "registry": ""
        if "/" in plan.image
        else f"\n`{plan.image}` names no registry: give one by `--image`, or load the image into the "
        "cluster's\nnodes (`kind load docker-image`, `minikube image load`).\n",
        # In the README's commands.
        "out": shlex.quote(str(out)),
        **_gpu_values(plan),
        **_shared_values(plan),
    }


def _shared_values(plan: Plan) -> dict[str, str]:
    """Additions of a shared repository to the manifests and the README."""
    names = {"name": plan.name, "model": plan.model, "root": ROOT, "image_root": plan.image_root}
    if plan.shared is None:
        place = _fill("readme-image")
        return names | {"shared_volume": "", "shared_mount": "", "later": "", "model_place": place}
    claim = f"{{claimName: {plan.name}-models}}"
    return (
        names
        | plan.shared.values
        | {
            "shared_volume": f"\n  - {{name: models, persistentVolumeClaim: {claim}}}",
            "shared_mount": f"\n  - {{name: models, mountPath: {ROOT}}}",
            "later": "\n" + _fill("steps-shared", **names),
            "model_place": _fill("readme-shared", **names),
        }
    )


def _gpu_values(plan: Plan) -> dict[str, str]:
    """Additions for a GPU to the Dockerfile, the manifests and the README; empty without one."""
    parts = {
        "cuda_file": " requirements-cuda.txt",
        "cuda_install": _fill("dockerfile-cuda-install"),
        "cuda_driver": _fill("dockerfile-cuda-driver"),
        "gpu_limit": ', nvidia.com/gpu: "1"',
        "gpu_compose": "\n        reservations: {devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]}",
        "gpu_readme": _fill("readme-gpu"),
    }
    return parts if plan.gpu else dict.fromkeys(parts, "")


def _pod(plan: Plan, values: dict[str, str]) -> str:
    container = _fill(f"container-{plan.server}", **values) + _fill("container-limits", **values)
    init = (
        ""
        if plan.shared is None
        else f"# Several pods may do this at once.\ninitContainers:\n  - {_block(_seed(values), 4)}\n"
    )
    return _fill("pod", **values, init=init, container=_block(container, 4))


def _job_pod(values: dict[str, str]) -> str:
    return _fill("pod", **values, init="", container=_block(_seed(values), 4))


def _seed(values: dict[str, str]) -> str:
    """The container that adds the image's version to the shared repository; it needs no GPU."""
    limits = _fill("container-limits", **{**values, "gpu_limit": ""})
    return _fill("container-seed", **values) + limits


def _block(text: str, indent: int) -> str:
    """Text for a placeholder, with all lines but the first indented."""
    return text.rstrip("\n").replace("\n", "\n" + " " * indent)


def _fill(template: str, **values: str) -> str:
    text = (resources.files(__package__) / "templates" / f"{template}.txt").read_text("utf-8")
    return Template(text).substitute(values)


def pinned_requirements() -> list[str]:
    """Return `name==version` of all dependencies of Stoker, as installed here; not Stoker itself.

    Raises:
        UserError: a dependency is not installed.
    """
    found: dict[str, str] = {}
    todo = [("stoker", frozenset[str]())]
    seen = set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for requirement in _requires(name, extras):
            needed = canonicalize_name(requirement.name)
            found[needed] = _version(requirement.name)
            todo.append((needed, frozenset(requirement.extras)))
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def cuda_requirements() -> str:
    """Return the lock file of TensorFlow's CUDA libraries: names, versions and hashes.

    Raises:
        UserError: the lock does not match the installed TensorFlow.
    """
    text = (resources.files(__package__) / CUDA_LOCK).read_text("utf-8")
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
    for package in cuda_packages():
        version = locked.get(package.name)
        if version is None or not SpecifierSet(package.wanted).contains(version):
            raise UserError(
                f"the lock of CUDA libraries must match the installed TensorFlow, which needs "
                f"{package.name}{package.wanted}",
                got=Plain("not in the lock" if version is None else f"version {version}"),
                fix="Install the TensorFlow version for which this Stoker was released.",
            )
    return text


def _requires(name: str, extras: frozenset[str]) -> list[Requirement]:
    requirements = [Requirement(text) for text in metadata.requires(name) or []]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None
        or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise UserError(
            f"{name} must be installed: the image gets the versions that are installed here",
            got=Plain("not installed"),
            fix="Install Stoker with all its dependencies.",
        ) from None


def read_model(folder: Path, *, version: int | None) -> tuple[str, int, Path]:
    """Find a version of a model in a folder and check it against its manifest.

    Args:
        folder: A folder of versions.
        version: The version; None for the newest.

    Returns:
        Its name, version and folder.

    Raises:
        ConfigError: the version does not exist.
        DataError: it is damaged.
    """
    from stoker.registry.repository import checked_name, verify, version_folders

    folders = version_folders(folder)
    wanted = max(folders, default=0) if version is None else version
    if wanted not in folders:
        raise ConfigError(
            f"{folder} must hold {'a version' if version is None else f'version {version}'}",
            got=Plain(", ".join(map(str, sorted(folders))) or "no versions"),
            fix="Name an experiment that was run, or a model's folder of versions.",
        )
    verify(folders[wanted])
    return checked_name(folder.resolve().name), wanted, folders[wanted]
