"""A plan -> a folder with a Dockerfile, the model, the manifests and what to do with them."""

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

_OBJECTS = ("deployment", "service", "autoscaler", "disruption", "network")

_LIMITS = {
    "compose": "One server. It listens on this machine alone.",
    "kubernetes": "$replicas to $max_replicas servers, spread over nodes, by CPU; only labelled "
    "clients reach them, and they reach nobody.",
    "kserve": "$replicas to $max_replicas servers, by CPU. Who may call is KServe's and your mesh's "
    "matter.",
}

_UNCHECKED = {
    "stoker": "The image was not built here, and nothing was applied to a cluster.",
    "tensorflow-serving": "The image was not built here, nothing was applied to a cluster, and whether "
    "the registry has this tag was not asked.",
}


def write_deployment(plan: Plan, out: Path) -> list[Path]:
    """Write the folder, whole or not at all.

    Args:
        plan: What is deployed.
        out: Where to; must not exist.

    Returns:
        Its files but the model's, relative to it.

    Raises:
        ConfigError: `out` exists.
    """
    if os.path.lexists(out):
        raise ConfigError(
            "--out must be a folder that does not exist yet",
            got=str(out),
            fix="Name another: what was written before may have been changed by hand.",
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
    """Copy a folder; unlike `shutil.copytree` it ends at a full disk, and says that it is one."""
    to.mkdir(parents=True)
    for path in sorted(source.rglob("*")):
        if path.is_dir():
            (to / path.relative_to(source)).mkdir()
        else:
            shutil.copyfile(path, to / path.relative_to(source))


def _texts(plan: Plan, out: Path) -> dict[str, str]:
    """File -> its text."""
    values = _values(plan, out)
    texts = {"Dockerfile": _fill(f"dockerfile-{plan.server}", **values)}
    texts[".dockerignore"] = "compose.yaml\nkubernetes/\nkserve/\nREADME.md\n"
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
    values["wheel"] = _fill("readme-wheel", **values) if plan.server == "stoker" else ""
    values["push"] = "" if plan.target == "compose" else _fill("readme-push", **values)
    values["steps"] = _fill(f"steps-{plan.target}", **values)
    texts["README.md"] = _fill("readme", **values)
    return texts


def _values(plan: Plan, out: Path) -> dict[str, str]:
    stoker = plan.server == "stoker"
    check = (
        f"import urllib.request as r; r.urlopen('http://127.0.0.1:{REST_PORT}/readyz', timeout=3)"
    )
    health = ["CMD", "python", "-c", check]
    # TensorFlow Serving's image has no curl and no Python, but bash, which can connect.
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
    }


def _gpu_values(plan: Plan) -> dict[str, str]:
    """What a GPU adds to the Dockerfile, the manifests and the README; nothing without one."""
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
    return _fill("pod", container=_block(container, 4))


def _block(text: str, indent: int) -> str:
    """Lines as they stand at a `$place`: all but the first further in."""
    return text.rstrip("\n").replace("\n", "\n" + " " * indent)


def _fill(template: str, **values: str) -> str:
    text = (resources.files(__package__) / "templates" / f"{template}.txt").read_text("utf-8")
    return Template(text).substitute(values)


def read_model(folder: Path, *, version: int | None) -> tuple[str, int, Path]:
    """The model that a folder holds, checked against its manifest.

    Args:
        folder: A folder of versions.
        version: Which; the newest if None.

    Returns:
        Its name, version and folder.

    Raises:
        ConfigError: there is no such version.
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
