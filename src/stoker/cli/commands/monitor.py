"""`stoker monitor`: watches the runs and servers of this machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from stoker.cli.commands import monitor_stack
from stoker.cli.options import ExperimentFolder, Overrides
from stoker.core.errors import ConfigError, Plain

app = typer.Typer(
    help="Watch the GPUs, runs and servers of this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.command("up")(monitor_stack.up)
app.command("down")(monitor_stack.down)
app.command("status")(monitor_stack.status)

Runs = Annotated[Path, typer.Option("--runs", help="Folder of the runs.")]
RUNS = Path("runs")


Port = Annotated[int, typer.Option(help="Port on 127.0.0.1; 0: a free port.", min=0, max=65535)]


@app.command()
def tensorboard(
    experiment: ExperimentFolder = Path(),
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    port: Port = 6006,
) -> None:
    """Open the runs of an experiment in TensorBoard, on 127.0.0.1, until Ctrl-C."""
    from stoker.app.experiment import load_experiment

    loaded = load_experiment(experiment, overrides=overrides)
    runs = loaded.runs_root
    if not any(runs.glob("*/train/tensorboard")):
        raise ConfigError(
            "TensorBoard needs a run that has begun to train",
            got=Plain(f"none in {runs}"),
            fix="Run `stoker train` first.",
        )
    open_tensorboard(runs, port)


def open_tensorboard(runs: Path, port: int) -> NoReturn:
    """Replace this process with TensorBoard, on 127.0.0.1.

    Args:
        runs: Folder whose logs TensorBoard shows, including the logs of all folders below it.
        port: Port to listen on; 0: a free port.

    Raises:
        ConfigError: TensorBoard is not installed.
    """
    try:
        found = importlib.util.find_spec("tensorboard.main")
    except ImportError:
        found = None
    if found is None:
        raise ConfigError(
            "TensorBoard must be installed",
            got=Plain(f"no module tensorboard for {sys.executable}"),
            fix="Run `pip install tensorboard`.",
        )
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs)]
    where = ["--host", "127.0.0.1", "--port", str(port)]
    os.execv(sys.executable, [*command, *where])  # noqa: S606 - signals reach TensorBoard itself


@app.command()
def exporter(
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: a free port.")
    ] = 9401,
    runs: Runs = RUNS,
    servers: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            metavar="HOST:PORT",
            help="REST address of a server to list in the answer to GET /sd; may be repeated.",
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", help="Interval between two samples of the GPUs, seconds.")
    ] = 1.0,
    dcgm_names: Annotated[
        bool,
        typer.Option(
            "--dcgm-names", help="Use dcgm-exporter's names for the metrics and labels of GPUs."
        ),
    ] = False,
    host_metrics: Annotated[
        bool,
        typer.Option(
            "--host-metrics/--no-host-metrics",
            help="Report memory, load and disk of the machine; turn this off if node_exporter runs.",
        ),
    ] = True,
) -> None:
    """Serve metrics of this machine's GPUs on /metrics, and the list of targets for Prometheus on /sd.

    Runs until SIGINT or SIGTERM.
    """
    from stoker.core.signals import heard
    from stoker.monitor.exporter import ExporterConfig, running_exporter

    config = ExporterConfig(
        host=host,
        port=port,
        runs=runs,
        servers=tuple(servers or ()),
        every_s=interval,
        dcgm_names=dcgm_names,
        host_metrics=host_metrics,
    )
    over = threading.Event()
    with (
        heard((signal.SIGINT, signal.SIGTERM), lambda _: over.set()),
        running_exporter(config) as address,
    ):
        typer.echo(f"metrics: http://{address}/metrics")
        typer.echo(f"targets: http://{address}/sd")
        over.wait()
