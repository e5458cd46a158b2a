"""`stoker rollout export`: writes the traffic split for a gateway, KServe, Argo Rollouts, Flagger or TensorFlow Serving."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.commands.call import connection
from stoker.cli.output import print_result, require_writable_file
from stoker.rollout.export.formats import Format, KserveMode, check_applies

if TYPE_CHECKING:
    from stoker.rollout.export.split import ExportedSplit
    from stoker.rollout.export.write import ExportOptions


def export(
    model: Annotated[str, typer.Argument(help="The model's name in the repository.")],
    to: Annotated[Format, typer.Option("--to", help="Format of the file.")],
    models: Annotated[
        Path, typer.Option("--models", help="The model repository: <model>/<version>/ folders.")
    ] = Path("models"),
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="File to write; readers see the old or the new content, never a part. Default: stdout.",
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="VERSION=HOST:PORT",
            help="Address of a version's servers. Default: the Kubernetes Service MODEL-vVERSION, port 8501.",
        ),
    ] = None,
    gateway: Annotated[
        str | None,
        typer.Option(
            "--gateway", help="Name of the Gateway: NAME or NAMESPACE/NAME. Default: gateway."
        ),
    ] = None,
    hostname: Annotated[
        str | None,
        typer.Option("--hostname", help="Route only requests to this host. Default: all hosts."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", help="Address of Envoy's listener. Default: 127.0.0.1:10000."),
    ] = None,
    routes: Annotated[
        Path | None,
        typer.Option(
            "--routes", help="File that --to envoy-routes writes; Envoy watches it for changes."
        ),
    ] = None,
    kserve_mode: Annotated[
        KserveMode | None,
        typer.Option("--kserve-mode", help="How KServe deploys. Default: standard."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage", help="KServe's storageUri, with {version} and {model} as placeholders."
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server", help="URL of a server that returns the verdict. Default: http://MODEL:8501."
        ),
    ] = None,
    base_path: Annotated[
        str | None,
        typer.Option(
            "--base-path",
            help="Path of the model's folder on the server. Default: its path on this machine.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="The server's model_config_file: entries of other models are copied from it.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="HOST:PORT",
            help="gRPC address of a server; the configuration is sent to it immediately. The server then serves "
            "only the models of this configuration. The token is read from STOKER_TOKEN.",
        ),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout-s",
            help="Maximum time that the server of --target may take to load the versions, seconds.",
        ),
    ] = 300.0,
) -> None:
    """Write the current traffic split for another program."""
    from stoker.core.files import full_disk_is_named, write_atomic
    from stoker.rollout.export.backends import parse_backends, parse_place
    from stoker.rollout.export.split import ExportedSplit
    from stoker.rollout.export.write import ExportOptions, export_text
    from stoker.rollout.operations import ModelRollouts

    given = {
        "backend": backend,
        "gateway": gateway,
        "hostname": hostname,
        "listen": listen,
        "routes": routes,
        "kserve-mode": kserve_mode,
        "storage": storage,
        "server": server,
        "base-path": base_path,
        "config": config,
        "target": target,
    }
    check_applies(to, [name for name, value in given.items() if value])
    split = ExportedSplit(model=model, state=ModelRollouts(models, model).status().state)
    options = ExportOptions(
        backends=parse_backends(backend or ()),
        gateway=gateway or "gateway",
        hostname=hostname or "",
        listen=parse_place(listen or "127.0.0.1:10000", flag="--listen"),
        routes_file=routes and routes.absolute(),
        kserve_mode=kserve_mode or KserveMode.STANDARD,
        storage=storage or "",
        server=server or "",
        base_path=base_path or str((models / model).absolute()),
        config=config,
    )
    text = export_text(split, to, options)
    if out is not None:
        require_writable_file(out, flag="--out")
        with full_disk_is_named(out):
            write_atomic(out, text)
    if target is not None:
        _send(split, options, target, timeout_s=timeout_s)
    elif out is None:
        print_result(text.rstrip("\n"))


def _send(split: ExportedSplit, options: ExportOptions, target: str, *, timeout_s: float) -> None:
    import time

    from stoker.client.grpc_client import GrpcClient
    from stoker.rollout.export.tf_serving import labels_of, model_server_config, reload_server

    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    config = model_server_config(
        split, base_path=options.base_path, others=options.config, now_s=time.time()
    )
    how = connection(timeout_s=timeout_s, ca=None, cert=None, key=None)
    with GrpcClient(target, connection=how) as client:
        reload_server(client, split, config, limit_s=timeout_s)
    labels = ", ".join(f"{label}: version {version}" for label, version in labels_of(split).items())
    names = ", ".join(each.name for each in config.model_config_list.config)
    print_result(f"{target} serves {names}; {labels}")
