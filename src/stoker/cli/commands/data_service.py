"""`stoker data-service start|status`: runs tf.data service on one or more machines."""

from __future__ import annotations

import json
import signal
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import AsJson

if TYPE_CHECKING:
    from stoker.data.feed.service.group import GroupConfig, Ready

app = typer.Typer(
    help="Make training batches in other processes (tf.data service).",
    no_args_is_help=True,
)

DEFAULT_PORT = 5050
"""Port of the dispatcher, as in TensorFlow's examples."""


@app.command()
def start(
    workers: Annotated[
        int,
        typer.Option("--workers", help="Number of worker processes; a single one uses all cores."),
    ] = 1,
    port: Annotated[
        int, typer.Option("--port", help="The dispatcher's port; 0 selects a free port.")
    ] = DEFAULT_PORT,
    worker_port: Annotated[
        int,
        typer.Option(
            "--worker-port",
            help="Port of the first worker; further workers get the next ports. 0 selects free ports.",
        ),
    ] = 0,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            help="Address at which readers reach this machine. Unless it is 127.0.0.1, every machine "
            "that can connect may use the ports.",
        ),
    ] = "127.0.0.1",
    dispatcher: Annotated[
        str | None,
        typer.Option("--dispatcher", help="HOST:PORT of a running dispatcher: start only workers."),
    ] = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(
            "--work-dir",
            help="Directory of the dispatcher's journal (default: temporary, deleted on exit).",
        ),
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option("--ready-file", help="File that receives the actual addresses.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a dispatcher and workers until SIGTERM; restart a process that dies."""
    from stoker.data.feed.service.group import GroupConfig
    from stoker.data.sources.config import split_address

    with tempfile.TemporaryDirectory(prefix="stoker-data-service-") as scratch:
        config = GroupConfig(
            host=host,
            port=port,
            workers=workers,
            worker_port=worker_port,
            dispatcher=None if dispatcher is None else "{}:{}".format(*split_address(dispatcher)),
            work_dir=Path(scratch) if work_dir is None else work_dir,
        )
        _run(config, ready_file=ready_file, as_json=as_json)


@app.command()
def status(
    address: Annotated[
        str, typer.Argument(help="HOST:PORT of the dispatcher.", metavar="ADDRESS")
    ] = f"127.0.0.1:{DEFAULT_PORT}",
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", help="Timeout for the answer, seconds.")
    ] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Get the list of workers from a dispatcher, and check that each worker answers."""
    from stoker.data.feed.service.status import service_status

    found = service_status(address, timeout_s=timeout_s)
    if as_json:
        typer.echo(json.dumps(asdict(found) | {"answering": found.answering}, indent=2))
        return
    typer.echo(
        f"dispatcher {found.address}: {found.answering} of {len(found.workers)} workers answer"
    )
    for worker in found.workers:
        state = f"{worker.tasks} tasks" if worker.answers else "no answer"
        typer.echo(f"  {worker.address}: {state}")


def _run(config: GroupConfig, *, ready_file: Path | None, as_json: bool) -> None:
    from stoker.core.files import write_json
    from stoker.data.feed.service.group import Group
    from stoker.data.feed.service.server import LOOPBACK

    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    if config.host != LOOPBACK:
        _log(
            f"anyone who can reach {config.host} on these ports can run TensorFlow operations as "
            "this user, and so read and write files: keep them behind a firewall"
        )
    with Group(config, _log) as group:
        if ready_file is not None:
            write_json(ready_file, asdict(group.ready))
        _log_ready(group.ready, as_json=as_json)
        group.watch(stopped)


def _log_ready(ready: Ready, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(ready)))
        return
    typer.echo(
        f"tf.data service at {ready.address}, {len(ready.workers)} worker(s) here. "
        f"In stoker.yaml: data: {{service: {{address: {ready.address}}}}}"
    )


def _log(line: str) -> None:
    typer.echo(f"data-service: {line}", err=True)
