"""`stoker deploy`: writes a Dockerfile for a model server, and the manifests that run its image."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.options import AsJson
from stoker.cli.output import print_result, require_new_folder


class DeployTarget(StrEnum):
    """Target platform."""

    COMPOSE = "compose"
    KUBERNETES = "kubernetes"
    KSERVE = "kserve"


class DeployServer(StrEnum):
    """Server in the image."""

    STOKER = "stoker"
    TENSORFLOW_SERVING = "tensorflow-serving"


def deploy(
    source: Annotated[
        Path,
        typer.Argument(
            help="An experiment that was run, or a model's folder of versions.",
            metavar="EXPERIMENT_OR_MODEL",
        ),
    ],
    target: Annotated[DeployTarget, typer.Option(help="Target platform.")],
    out: Annotated[Path, typer.Option(help="Folder to create; it must not exist yet.")],
    server: Annotated[
        DeployServer, typer.Option(help="Server in the image.")
    ] = DeployServer.STOKER,
    version: Annotated[int | None, typer.Option(help="Version (default: the newest).")] = None,
    image: Annotated[
        str | None,
        typer.Option(
            help="Name of the image in your registry (default: NAME:VERSION of the model)."
        ),
    ] = None,
    base_image: Annotated[str | None, typer.Option("--base-image", help="Base image.")] = None,
    replicas: Annotated[int, typer.Option(help="Minimum number of servers.")] = 2,
    max_replicas: Annotated[
        int, typer.Option("--max-replicas", help="Maximum number of servers.")
    ] = 10,
    cpu: Annotated[str, typer.Option(help="CPU cores per server.")] = "1",
    memory: Annotated[
        str | None, typer.Option(help="Memory per server; default: 2Gi, with --gpu 8Gi.")
    ] = None,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu",
            help="One GPU for each server; the image contains the CUDA version that Stoker pins.",
        ),
    ] = False,
    shared_repository: Annotated[
        str | None,
        typer.Option(
            "--shared-repository",
            metavar="VOLUME",
            help="Volume with the model repository of all servers, so that `stoker rollout` can move traffic "
            "between versions: nfs://SERVER/PATH, pvc://CLAIM (an existing claim) or the name of a "
            "StorageClass; it must support ReadWriteMany. For --target kubernetes.",
        ),
    ] = None,
    queue_target: Annotated[
        int | None,
        typer.Option(
            "--queue-target",
            help="Also scale by the number of waiting requests: the target number for each server. For --target "
            "kubernetes with prometheus-adapter (default: scale by CPU alone).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a Dockerfile and manifests for one model.

    It only writes files: it builds no image and changes no cluster.
    """
    from stoker.core.config import dns_name
    from stoker.deploy.plan import Plan
    from stoker.deploy.shared import parse_volume
    from stoker.deploy.write import read_model, write_deployment

    require_new_folder(
        out, fix="Name another folder, because the files in this one may have been edited."
    )
    model, number, folder = read_model(_versions(source), version=version)
    plan = Plan(
        model=model,
        version=number,
        source=folder,
        target=target.value,
        server=server.value,
        image=f"{dns_name(model)}:{number}" if image is None else image,
        base=_base_image(server) if base_image is None else base_image,
        replicas=replicas,
        max_replicas=max_replicas,
        cpu=cpu,
        memory=("8Gi" if gpu else "2Gi") if memory is None else memory,
        gpu=gpu,
        shared=None if shared_repository is None else parse_volume(shared_repository),
        queue_target=queue_target,
    )
    files = write_deployment(plan, out)
    if as_json:
        facts = {"out": str(out), "model": model, "version": number, "image": plan.image}
        print_result(json.dumps(facts | {"files": [str(path) for path in files]}))
        return
    for path in files:
        print_result(f"wrote {out / path}")
    print_result(f"next: read {out / 'README.md'}")


def _versions(source: Path) -> Path:
    from stoker.app.experiment import FILE, load_experiment

    if not (source / FILE).is_file():
        return source
    experiment = load_experiment(source)
    return experiment.models_root / experiment.model_name


def _base_image(server: DeployServer) -> str:
    if server is DeployServer.STOKER:
        return f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
    from importlib import metadata

    # The client package tensorflow-serving-api and the image have the same version numbers.
    return f"tensorflow/serving:{metadata.version('tensorflow-serving-api')}"
