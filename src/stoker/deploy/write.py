"""Writes a deployment: Dockerfile, model, manifests and README."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from importlib import resources
from pathlib import Path
from string import Template

from stoker.core.errors import ConfigError, Plain
from stoker.core.files import publish_folder, scratch_folder
from stoker.deploy.plan import REST_PORT, Plan
from stoker.deploy.requirements import cuda_requirements, pinned_requirements
from stoker.deploy.shared import ROOT

_OBJECTS = ("deployment", "service", "autoscaler", "disruption", "network")

_MIN_GIB, _VERSIONS = 10, 10
"""A shared volume has at least this many GiB, and room for this many versions of the model."""

_LIMITS = {
    "compose": "One server, reachable from this machine only.",
    "kubernetes": "$replicas to $max_replicas servers, spread over nodes, by CPU$and_queue; only labeled "
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
    """Write the folder of a deployment; if that fails, no folder remains.

    Args:
        plan: The deployment.
        out: The folder to write; must not exist.

    Returns:
        The written files without those of the model, relative to `out`.

    Raises:
        ConfigError: `out` exists, or a server has less memory than the model needs.
    """
    if os.path.lexists(out):
        raise ConfigError(
            "--out must be a folder that does not exist yet",
            got=str(out),
            fix="Choose another folder: this one may contain changes made by hand.",
        )
    _check_memory(plan)
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
    """Copy a folder. Unlike `shutil.copytree`, stop at the first error, such as a full disk, and raise that error."""
    to.mkdir(parents=True)
    for path in sorted(source.rglob("*")):
        if path.is_dir():
            (to / path.relative_to(source)).mkdir()
        else:
            shutil.copyfile(path, to / path.relative_to(source))


def _size(folder: Path) -> int:
    """Return the total size of the files in a folder, bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _check_memory(plan: Plan) -> None:
    size = _size(plan.source)
    if size >= plan.memory_bytes:
        raise ConfigError(
            "--memory must be more than the model's size on disk: a server holds the model in memory",
            got=Plain(f"{plan.memory}, and a model of {size / (1 << 30):.2f} GiB"),
            fix="Give it at least twice the model's size.",
        )


def _texts(plan: Plan, out: Path) -> dict[str, str]:
    """Return the generated files: name -> text."""
    values = _values(plan, out)
    texts = {"Dockerfile": _fill(f"dockerfile-{plan.server}", **values)}
    texts[".dockerignore"] = (
        "compose.yaml\nkubernetes/\nkserve/\npush.yaml\nprometheus-adapter.yaml\nREADME.md\n"
    )
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
        if plan.queue_target is not None:
            texts["prometheus-adapter.yaml"] = _fill("prometheus-adapter", **values)
    values["wheel"] = _fill("readme-wheel", **values) if plan.server == "stoker" else ""
    values["push"] = "" if plan.target == "compose" else _fill("readme-push", **values)
    values["steps"] = _fill(f"steps-{plan.target}", **values)
    texts["README.md"] = _fill("readme", **values)
    return texts


def _shared_texts(plan: Plan, values: dict[str, str]) -> dict[str, str]:
    """Return the additional files for a shared repository: name -> text; empty without a shared repository."""
    if plan.shared is None:
        return {}
    texts = {"push.yaml": _fill("push", **values, pod=_block(_job_pod(values), 6))}
    if plan.shared.claim:
        return texts
    claim = _fill("claim", **values)
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
    # TensorFlow Serving's image has neither curl nor Python, but bash can open a connection.
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
            replicas=plan.replicas,
            max_replicas=plan.max_replicas,
            and_queue="" if plan.queue_target is None else " and queue",
        ),
        "unchecked": _UNCHECKED[plan.server] + (" It was not run with a GPU." if plan.gpu else ""),
        "registry": ""
        if "/" in plan.image
        else f"\n`{plan.image}` names no registry: give one by `--image`, or load the image into the "
        "cluster's\nnodes (`kind load docker-image`, `minikube image load`).\n",
        # The folder, quoted for the shell commands in the README.
        "out": shlex.quote(str(out)),
        **_gpu_values(plan),
        **_shared_values(plan),
        **_queue_values(plan, out),
    }


def _queue_values(plan: Plan, out: Path) -> dict[str, str]:
    """Return the text that the autoscaler and the README get if the queue scales the servers; otherwise empty."""
    if plan.queue_target is None:
        return {"queue_metric": "", "queue_readme": ""}
    target = str(plan.queue_target)
    return {
        "queue_metric": "\n" + _fill("autoscaler-queue", queue_target=target).rstrip("\n"),
        "queue_readme": _fill("readme-queue", queue_target=target, out=shlex.quote(str(out))),
    }


def _shared_values(plan: Plan) -> dict[str, str]:
    """Return the text that the manifests and the README get if there is a shared repository; otherwise empty."""
    names = {"name": plan.name, "model": plan.model, "root": ROOT, "image_root": plan.image_root}
    if plan.shared is None:
        place = _fill("readme-image")
        return names | {"shared_volume": "", "shared_mount": "", "later": "", "model_place": place}
    claim = f"{{claimName: {json.dumps(plan.claim)}}}"
    names["claim"] = plan.claim
    return (
        names
        | plan.shared.values
        | {"capacity_gib": str(max(_MIN_GIB, _VERSIONS * _size(plan.source) >> 30))}
        | {
            "shared_volume": f"\n  - {{name: models, persistentVolumeClaim: {claim}}}",
            "shared_mount": f"\n  - {{name: models, mountPath: {ROOT}}}",
            "later": "\n" + _fill("steps-shared", **names),
            "model_place": _fill("readme-shared", **names),
        }
    )


def _gpu_values(plan: Plan) -> dict[str, str]:
    """Return the text that the Dockerfile, the manifests and the README get if servers use a GPU; otherwise empty."""
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
    """Return the container that copies the model from the image into the shared repository; it needs no GPU."""
    limits = _fill("container-limits", **{**values, "gpu_limit": ""})
    return _fill("container-seed", **values) + limits


def _block(text: str, indent: int) -> str:
    """Return the text for a placeholder: all lines except the first are indented."""
    return text.rstrip("\n").replace("\n", "\n" + " " * indent)


def _fill(template: str, **values: str) -> str:
    text = (resources.files(__package__) / "templates" / f"{template}.txt").read_text("utf-8")
    return Template(text).substitute(values)


def read_model(folder: Path, *, version: int | None) -> tuple[str, int, Path]:
    """Find a version of a model in a folder and check it against its manifest.

    Args:
        folder: A folder of versions.
        version: The version; None for the newest.

    Returns:
        The model's name, and the version with its folder.

    Raises:
        ConfigError: the version does not exist.
        DataError: the version is damaged.
    """
    from stoker.registry.repository import checked_name, verify, version_folders

    folders = version_folders(folder)
    wanted = max(folders, default=0) if version is None else version
    if wanted not in folders:
        raise ConfigError(
            f"{folder} must hold {'a version' if version is None else f'version {version}'}",
            got=Plain(", ".join(map(str, sorted(folders))) or "no versions"),
            fix="Give an experiment that was run, or a model's folder of versions.",
        )
    verify(folders[wanted])
    return checked_name(folder.resolve().name), wanted, folders[wanted]
