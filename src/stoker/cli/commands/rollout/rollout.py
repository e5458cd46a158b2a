"""`stoker rollout start|status|pause|resume|promote|rollback|history|ab|outcome|result`."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.commands.rollout import ab
from stoker.cli.commands.rollout.export import export
from stoker.cli.commands.rollout.follow import follow
from stoker.cli.commands.rollout.shown import lines_of, show, status_of, summary
from stoker.cli.options import AsJson

if TYPE_CHECKING:
    from stoker.rollout.operations import ModelRollouts

app = typer.Typer(
    help="Move traffic to a new version step by step, or back.",
    no_args_is_help=True,
)
app.command()(export)

Model = Annotated[str, typer.Argument(help="The model's name in the repository.")]
Version = Annotated[int, typer.Argument(min=0, help="The version.")]
Models = Annotated[
    Path, typer.Option("--models", help="The model repository: <model>/<version>/ folders.")
]
Why = Annotated[str, typer.Option("--why", help="Reason, for the history.")]
MODELS = Path("models")


@app.command()
def start(
    model: Model,
    version: Version,
    models: Models = MODELS,
    canary: Annotated[
        str,
        typer.Option(
            "--canary",
            metavar="STAGES",
            help="Percentages of the traffic, each with its time if it is not --step-time: 1,10:20m,50,100. "
            "pause waits for `stoker rollout resume`; header=NAME, first, takes requests with this header; "
            "shadow or shadow=PERCENT, first, only copies requests and compares the answers.",
        ),
    ] = "1,10,50,100",
    step_time: Annotated[
        str, typer.Option("--step-time", help="Shortest time of a stage, e.g. 30s, 5m, 2h.")
    ] = "5m",
    min_requests: Annotated[
        int,
        typer.Option("--min-requests", min=0, help="Requests of the version before a stage ends."),
    ] = 500,
    warm_up: Annotated[
        str, typer.Option("--warm-up", help="Start of a stage, not counted in its time.")
    ] = "30s",
    bake: Annotated[
        str, typer.Option("--bake", help="Time after 100 % while the gates can still roll back.")
    ] = "0s",
    key: Annotated[
        str,
        typer.Option(
            "--key",
            help="Header, gRPC metadata key or cookie:NAME by which a user stays with a version. "
            "Default: each request by itself.",
        ),
    ] = "",
    max_shift: Annotated[
        float,
        typer.Option(
            "--max-shift", help="Largest accepted Kolmogorov distance of predictions, 0 to 1."
        ),
    ] = 0.2,
    allowed_ratio: Annotated[
        float,
        typer.Option(
            "--allowed-ratio",
            help="Bad or slow answers for each of the baseline that still count as not worse.",
        ),
    ] = 1.25,
    shadow_tolerance: Annotated[
        float,
        typer.Option(
            "--shadow-tolerance",
            help="Numbers of a shadow stage are equal up to this times the larger of 1 and the number.",
        ),
    ] = 1e-3,
    dry_run: Annotated[
        list[str] | None,
        typer.Option(
            "--dry-run", metavar="GATE", help="Measure and show this gate without effect."
        ),
    ] = None,
    keep_previous: Annotated[
        str,
        typer.Option(
            "--keep-previous", help="Time after 100 % during which the baseline stays loaded."
        ),
    ] = "30m",
    server_memory: ab.ServerMemory = 0.0,
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            metavar="URL",
            help="REST address of a server that cannot write to the repository: its counts are fetched. Repeatable.",
        ),
    ] = None,
    gates: Annotated[
        Path | None,
        typer.Option(
            "--gates",
            help="YAML file with gates of your own: Prometheus queries, Python functions.",
        ),
    ] = None,
    webhook: Annotated[
        list[str] | None,
        typer.Option(
            "--webhook",
            metavar="[MOMENT,...=]URL",
            help="URL that gets a POST before each stage, promotion and end, which waits for its 2xx, and after a rollback. "
            "Default: all four.",
        ),
    ] = None,
    notify: Annotated[
        list[str] | None,
        typer.Option(
            "--notify",
            metavar="URL",
            help="Gets each change as a message in Slack's form. env:NAME: the server's variable.",
        ),
    ] = None,
    load_limit: Annotated[
        str,
        typer.Option("--load-limit", help="A version that takes longer to load is rolled back."),
    ] = "10m",
    inconclusive_limit: Annotated[
        str,
        typer.Option("--inconclusive-limit", help="A gate without an answer for this long pauses."),
    ] = "5m",
    strict: Annotated[
        bool, typer.Option("--strict", help="Roll back instead of pausing at that limit.")
    ] = False,
    baseline: Annotated[
        int | None,
        typer.Option("--baseline", help="Version to compare with. Default: the one that serves."),
    ] = None,
    why: Why = "",
    detach: Annotated[
        bool,
        typer.Option(
            "-d",
            "--detach",
            help="Return after the start, without following it. Implied by --json.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Move a model's traffic to a version step by step, and print each change until the end.

    The servers do the work: it continues if this command ends.
    """
    from stoker.app.import_tensorflow import import_tensorflow
    from stoker.core.durations import seconds_of
    from stoker.rollout.state.settings import RolloutSettings
    from stoker.rollout.state.user_gates import read_gates
    from stoker.rollout.state.webhook import parse_webhook

    settings = RolloutSettings(
        stages=canary,
        key=key,
        step_time_s=seconds_of(step_time, name="--step-time"),
        min_requests=min_requests,
        warm_up_s=seconds_of(warm_up, name="--warm-up"),
        bake_s=seconds_of(bake, name="--bake"),
        max_shift=max_shift,
        allowed_ratio=allowed_ratio,
        shadow_tolerance=shadow_tolerance,
        dry_run=tuple(dry_run or ()),
        keep_previous_s=seconds_of(keep_previous, name="--keep-previous"),
        servers=tuple(server or ()),
        load_limit_s=seconds_of(load_limit, name="--load-limit"),
        inconclusive_limit_s=seconds_of(inconclusive_limit, name="--inconclusive-limit"),
        strict=strict,
        user_gates=() if gates is None else read_gates(gates),
        webhooks=tuple(parse_webhook(text) for text in webhook or ()),
        notify=tuple(notify or ()),
    )
    memory = ab.server_bytes(server_memory)
    rollouts = _open(models, model, gate_folder=None if gates is None else gates.parent)
    import_tensorflow()
    begun = rollouts.start(
        version,
        settings,
        why=why,
        baseline=baseline,
        server_bytes=memory,
    )
    if detach or as_json:
        show(begun, as_json=as_json)
    else:
        where = "" if models == MODELS else f" --models {shlex.quote(str(models))}"
        follow(rollouts, begun, target=f"{model}{where}")


@app.command()
def status(model: Model, models: Models = MODELS, as_json: AsJson = False) -> None:
    """Show the stage, the traffic, and what each gate says."""
    found = _open(models, model).status()
    if as_json:
        typer.echo(json.dumps(status_of(found), indent=2))
        return
    for line in lines_of(found):
        typer.echo(line)


@app.command()
def pause(model: Model, models: Models = MODELS, why: Why = "", as_json: AsJson = False) -> None:
    """Keep the traffic as it is; gates still roll back."""
    show(_open(models, model).pause(why=why), as_json=as_json)


@app.command()
def resume(model: Model, models: Models = MODELS, why: Why = "", as_json: AsJson = False) -> None:
    """Go on after a pause, or end a stage that waits for a person."""
    show(_open(models, model).resume(why=why), as_json=as_json)


@app.command()
def promote(
    model: Model,
    models: Models = MODELS,
    full: Annotated[bool, typer.Option("--full", help="Go to 100 % at once.")] = False,
    version: Annotated[
        int | None,
        typer.Option("--version", help="End an A/B test: this arm takes all traffic."),
    ] = None,
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Go to the next stage now, whatever its time and requests; or end an A/B test."""
    show(_open(models, model).promote(full=full, version=version, why=why), as_json=as_json)


@app.command()
def rollback(
    model: Model,
    models: Models = MODELS,
    to: Annotated[
        int | None,
        typer.Option("--to", help="Version that takes all traffic. Default: the baseline."),
    ] = None,
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Take all traffic off the version at once, without stages."""
    show(_open(models, model).roll_back(to=to, why=why), as_json=as_json)


@app.command()
def history(model: Model, models: Models = MODELS, as_json: AsJson = False) -> None:
    """List every change: when, what, who and why."""
    events = _open(models, model).history()
    if as_json:
        told = [{**event.to_json(), "state": now.to_json()} for event, now in events]
        typer.echo(json.dumps(told, indent=2))
        return
    for event, now in events:
        when = datetime.fromtimestamp(event.at_s, UTC).isoformat(timespec="seconds")
        why = f": {event.why}" if event.why else ""
        typer.echo(f"{when}  {summary(now)}  {event.what} by {event.who}{why}")


def _open(models: Path, model: str, *, gate_folder: Path | None = None) -> ModelRollouts:
    from stoker.rollout.operations import ModelRollouts

    return ModelRollouts(models, model, gate_folder=gate_folder)


for command in (ab.ab, ab.outcome, ab.result):
    app.command()(command)
