"""`stoker monitor up|down|status`: Prometheus and Alertmanager of this machine."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import AsJson
from stoker.cli.output import print_result

if TYPE_CHECKING:
    from stoker.monitor.settings import Slo
    from stoker.monitor.stack.wiring import Wiring

StateFolder = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        help="Folder for settings, time series and logs (default: ~/.local/state/stoker/monitor).",
    ),
]


def up(
    experiment: Annotated[
        Path | None,
        typer.Argument(
            help="Experiment whose runs are watched and whose `slo` section applies.",
            metavar="EXPERIMENT",
        ),
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--runs", help="Folder of runs to watch; may be repeated (default: the experiment's)."
        ),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server", metavar="HOST:PORT", help="REST address of a server; may be repeated."
        ),
    ] = None,
    exporter: Annotated[
        list[str] | None,
        typer.Option(
            "--exporter",
            metavar="HOST:PORT",
            help="Address of a `stoker monitor exporter`, whose /sd lists more targets; may be repeated.",
        ),
    ] = None,
    webhook: Annotated[
        str,
        typer.Option("--webhook", metavar="URL", help="URL to which Alertmanager posts alerts."),
    ] = "",
    slack_file: Annotated[
        Path | None,
        typer.Option("--slack-file", help="File with the address of a Slack webhook."),
    ] = None,
    availability: Annotated[
        float | None,
        typer.Option(
            "--availability",
            help="Objective: percentage of requests that do not fail because of the server (default: 99.9).",
        ),
    ] = None,
    p99_ms: Annotated[
        float | None,
        typer.Option(
            "--p99-ms",
            help="Objective: 99 of 100 requests take at most this time, milliseconds (default: 50).",
        ),
    ] = None,
    no_checkpoint_minutes: Annotated[
        float,
        typer.Option(
            "--no-checkpoint-minutes",
            help="Alert if the newest checkpoint of a run is older than this, minutes.",
        ),
    ] = 60.0,
    time_scale: Annotated[
        float,
        typer.Option(
            "--time-scale",
            help="Divide every window and every `for` of the alert rules by this, 1 to 60: to see alerts fire, not for production.",
        ),
    ] = 1.0,
    prometheus_port: Annotated[
        int, typer.Option("--prometheus-port", min=1, max=65535, help="Port on 127.0.0.1.")
    ] = 9090,
    alertmanager_port: Annotated[
        int, typer.Option("--alertmanager-port", min=1, max=65535, help="Port on 127.0.0.1.")
    ] = 9093,
    state: StateFolder = None,
    keep_edited: Annotated[
        bool,
        typer.Option(
            "--keep-edited",
            help="If generated files were edited, use them unchanged instead of failing.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Write the same setup, with dashboards, for Docker Compose and Kubernetes to this folder; start nothing.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start Prometheus and Alertmanager on 127.0.0.1, for the runs and servers of this machine."""
    from stoker.monitor.settings import RuleSettings
    from stoker.monitor.stack.processes import Stack
    from stoker.monitor.stack.wiring import Receiver, Wiring

    slo, found = _of_experiment(experiment)
    wiring = Wiring(
        runs=tuple(str(folder.resolve()) for folder in runs or [found]),
        servers=tuple(server or ()),
        exporters=tuple(exporter or ()),
        rules=RuleSettings(
            slo=replace(
                slo,
                availability=slo.availability if availability is None else availability,
                p99_ms=slo.p99_ms if p99_ms is None else p99_ms,
            ),
            time_scale=time_scale,
            no_checkpoint_minutes=no_checkpoint_minutes,
        ),
        receiver=Receiver(webhook=webhook, slack_file=slack_file),
    )
    if out is not None:
        _write(wiring, out, as_json=as_json)
        return
    stack = Stack(
        folder=_state_folder(state),
        prometheus_port=prometheus_port,
        alertmanager_port=alertmanager_port,
    )
    started = stack.up(wiring, keep_edited=keep_edited)
    if as_json:
        print_result(json.dumps([asdict(each) for each in started]))
        return
    for each in started:
        print_result(f"{each.name}: http://{each.address}")
    print_result(
        "to see alerts: stoker monitor status, or Prometheus's Alerts page; to stop both: stoker monitor down"
    )


def down(state: StateFolder = None) -> None:
    """Stop the Prometheus and Alertmanager that `stoker monitor up` started; keep their time series."""
    from stoker.monitor.stack.processes import Stack

    ended = Stack(folder=_state_folder(state)).down()
    for each in ended:
        print_result(f"ended {each.name}, http://{each.address}")
    if not ended:
        print_result("nothing to stop")


def status(state: StateFolder = None, as_json: AsJson = False) -> None:
    """Show the programs of `stoker monitor up`, scrape targets and firing alerts; exit 3 if a program has ended."""
    from stoker.core.errors import CheckFailed
    from stoker.monitor.stack.state import read_started
    from stoker.monitor.stack.status import read_status

    found = read_status(read_started(_state_folder(state)))
    if as_json:
        print_result(json.dumps(asdict(found)))
    else:
        for each in found.programs:
            problem = f" ({each.problem})" if each.problem else ""
            print_result(f"{each.name}: {each.state}, http://{each.address}{problem}")
        for job, address, health in found.targets:
            print_result(f"target {job} {address}: {health}")
        for name, summary in found.alerts:
            print_result(f"firing {name}: {summary}")
        if not found.programs:
            print_result("nothing runs; to start Prometheus and Alertmanager: stoker monitor up")
    if any(each.state == "ended" for each in found.programs):
        raise CheckFailed(
            "A program of the monitoring setup has ended",
            fix="Run stoker monitor down, then stoker monitor up.",
        )


def _of_experiment(experiment: Path | None) -> tuple[Slo, Path]:
    """Return the objectives (`slo`) and the folder of runs of an experiment."""
    from stoker.monitor.settings import Slo

    if experiment is None:
        return Slo(), Path("runs")
    from stoker.app.experiment import load_experiment

    found = load_experiment(experiment)
    return found.slo, found.folder / found.runs


def _state_folder(state: Path | None) -> Path:
    if state is not None:
        return state.resolve()
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "stoker" / "monitor"


def _write(wiring: Wiring, out: Path, *, as_json: bool) -> None:
    from stoker.monitor.manifests.write import write_manifests

    files = write_manifests(wiring, out)
    if as_json:
        print_result(json.dumps({"out": str(out), "files": files}))
        return
    for name in files:
        print_result(f"wrote {out / name}")
    print_result(f"next: read {out / 'README.md'}")
